"""Check values of a DeepSpeed configuration, replace `"auto"`, collect contradictions. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from accel_plugins.deepspeed.hf_config import AUTO
from accel_plugins.kwargs.base import is_count
from accel_state.did_you_mean import did_you_mean
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from accel_plugins.deepspeed.hf_config import HfDeepSpeedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownValue:
    """A value that is known from outside of the configuration, with its source for messages.

    If it is `binding`, another value in the configuration is an error; else the configuration wins.
    """

    value: Any
    source: str
    binding: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A value of the configuration that contradicts a known one."""

    key: str
    found: Any
    known: KnownValue

    def __str__(self) -> str:
        known = self.known
        return f"{self.key} is {self.found!r} in the configuration, but {known.value!r} by {known.source}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A filled configuration, its contradictions, and the dotted keys whose value is still `"auto"`."""

    config: dict[str, Any]
    mismatches: tuple[Mismatch, ...] = ()
    open_keys: tuple[str, ...] = ()


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a configuration that is not a dictionary, with its dotted key.

    Example:
        >>> [*leaves({"a": {"b": 1, "c": 2}, "d": 3})]
        [('a.b', 1), ('a.c', 2), ('d', 3)]
    """
    for name, value in config.items():
        if isinstance(value, dict):
            yield from leaves(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            yield prefix + name, value


def fill(config: Mapping[str, Any], known: Mapping[str, KnownValue]) -> Filled:
    """Replace every `"auto"` whose value is known by its dotted key, and compare the other values.

    Keys that the configuration lacks are not added.

    Example:
        >>> known = {"a": KnownValue(value=1, source="us"), "b.c": KnownValue(value=2, source="us")}
        >>> filled = fill({"a": "auto", "b": {"c": 3}}, known)
        >>> filled.config["a"], [str(one) for one in filled.mismatches]
        (1, ['b.c is 3 in the configuration, but 2 by us'])
    """
    mismatches: list[Mismatch] = []
    unknown: list[str] = []

    def walk(node: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in node.items():
            key = prefix + name
            if isinstance(value, dict):
                result[name] = walk(cast("dict[str, Any]", value), f"{key}.")
                continue
            found = known.get(key)
            result[name] = found.value if found is not None and _is_auto(value) else value
            if found is not None and found.binding and not _same(result[name], found.value):
                mismatches.append(Mismatch(key=key, found=value, known=found))
            if _is_auto(result[name]):
                unknown.append(key)
        return result

    filled = walk(config, "")
    return Filled(config=filled, mismatches=tuple(mismatches), open_keys=tuple(unknown))


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a value by its dotted key, adding missing dictionaries.

    Example:
        >>> config = {}
        >>> put(config, "zero_optimization.stage", 3)
        >>> config
        {'zero_optimization': {'stage': 3}}
    """
    *above, last = key.split(".")
    for name in above:
        config = config.setdefault(name, {})
    config[last] = value


def refuse_mismatches(mismatches: Sequence[Mismatch | str]) -> None:
    """Raise one error that names all contradictions, if there are any."""
    if mismatches:
        raise SettingsError(
            "The DeepSpeed configuration contradicts other settings: "
            + "; ".join(map(str, mismatches))
            + ". Set each in one place only, or to 'auto' in the configuration."
        )


def refuse_misspelt(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Refuse misspelt top-level keys of a configuration; return other unknown ones, which have no effect."""
    known = sorted(set(names))
    unknown = [name for name in config if name not in known]
    for name in unknown:
        hint = did_you_mean(name, known, "", cutoff=0.8)
        if hint:
            raise SettingsError(
                f"The DeepSpeed configuration has {name!r}: {config[name]!r}, which the installed version of "
                f"DeepSpeed does not know; {hint}"
            )
    return unknown


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == AUTO


def _same(found: Any, known: Any) -> bool:
    # JSON has one kind of number: 2 is 2.0, but true is not 1.
    return isinstance(found, bool) == isinstance(known, bool) and found == known


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
    """Check the values that DeepSpeed would refuse later, or ignore."""
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
