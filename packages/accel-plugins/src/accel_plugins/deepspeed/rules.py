"""Fields of the plugin by key of the configuration, and their valid values. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from accel_plugins.deepspeed.hf_config import AUTO
from accel_plugins.kwargs.base import is_count
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel_plugins.deepspeed.hf_config import HfDeepSpeedConfig

KEYS: Mapping[str, str] = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""Keys of the configuration by field of `DeepSpeedPlugin`."""

_DEVICES = ("none", "cpu", "nvme")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


_WANTED: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    KEYS["gradient_accumulation_steps"]: ("a whole number above 0", lambda value: is_count(value, least=1)),
    KEYS["gradient_clipping"]: ("a number, 0 or more", _is_number),
    KEYS["zero_stage"]: ("0, 1, 2 or 3", lambda value: is_count(value, least=0) and value <= 3),
    KEYS["offload_optimizer_device"]: (f"one of {_DEVICES}", lambda value: value in _DEVICES),
    KEYS["offload_param_device"]: (f"one of {_DEVICES}", lambda value: value in _DEVICES),
    "train_micro_batch_size_per_gpu": ("a whole number above 0", lambda value: is_count(value, least=1)),
    "train_batch_size": ("a whole number above 0", lambda value: is_count(value, least=1)),
}


def check_fields(config: HfDeepSpeedConfig) -> None:
    """Check the values that DeepSpeed would refuse later, or ignore.

    Args:
        config: The configuration with the plugin's fields.

    Raises:
        SettingsError: Values are invalid; all are named.
    """
    problems = [
        f"{key}={value!r}: expected {wanted}"
        for key, (wanted, holds) in _WANTED.items()
        if (value := config.get_value(key)) not in {None, AUTO} and not holds(value)
    ]
    stage = config.get_value(KEYS["zero_stage"], 0)
    problems += [] if problems or stage == AUTO else _offloading(config, stage)
    if config.get_value("managed_gradient_accumulation") is False:
        problems.append(
            "managed_gradient_accumulation=False: accel sets the engine's accumulation boundary itself; "
            "leave it out"
        )
    if problems:
        raise SettingsError(f"The DeepSpeed configuration cannot be used: {'; '.join(problems)}.")


def without_none(config: Mapping[str, Any]) -> dict[str, Any]:
    """Remove offload sections whose device is `"none"`.

    Example:
        >>> without_none({"zero_optimization": {"stage": 2, "offload_param": {"device": "none"}}})
        {'zero_optimization': {'stage': 2}}
    """
    zero = dict(config.get("zero_optimization", {}))
    for what in ("offload_optimizer", "offload_param"):
        node = zero.get(what)
        if isinstance(node, dict) and cast("dict[str, Any]", node).get("device") in {None, "none"}:
            del zero[what]
    return {**config, "zero_optimization": zero}


def _offloading(config: HfDeepSpeedConfig, stage: int) -> list[str]:
    problems: list[str] = []
    for what, least in (("optimizer", 1), ("param", 3)):
        device = config.get_value(KEYS[f"offload_{what}_device"]) or "none"
        path = config.get_value(KEYS[f"offload_{what}_nvme_path"])
        needed = 3 if device == "nvme" else least
        if device != "none" and stage < needed:
            problems.append(
                f"offload_{what} to {device!r} needs ZeRO stage "
                f"{needed}{' or higher' if needed < 3 else ''}, but the stage is {stage}"
            )
        if device == "nvme" and not path:
            problems.append(f"offload_{what} to 'nvme' needs offload_{what}_nvme_path, a folder on the disk")
        if path and device != "nvme":
            problems.append(
                f"offload_{what}_nvme_path={path!r} has no effect with offload_{what}_device={device!r}"
            )
    return problems
