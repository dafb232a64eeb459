"""Read DeepSpeed's configuration, fill its `"auto"` values, and check it."""

from __future__ import annotations

import base64
import copy
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from accel_plugins.strategy import Feature, FromConfiguration
from accel_state.errors import SettingsError
from accel_state.logging import get_logger

if TYPE_CHECKING:
    from torch import Tensor

logger = get_logger(__name__)

AUTO = "auto"
"""Value that is replaced by one from the model, the optimizer, the loaders or the arguments."""


class HfDeepSpeedConfig:
    """A DeepSpeed configuration, with the queries that transformers makes.

    Args:
        config_file_or_dict: A mapping, the path of a JSON file, or the JSON text in URL-safe base64.

    Raises:
        SettingsError: The configuration cannot be read.

    Example:
        >>> config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
        >>> config.is_zero3(), config.get_value("zero_optimization.offload_param.device", "none")
        (True, 'none')
    """

    def __init__(self, config_file_or_dict: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        self.config = read_config(config_file_or_dict)
        self._stage: Any = -1
        self._offload = False
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Update the ZeRO stage and the offload flag after the configuration has changed."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = {
            self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")
        }
        self._offload = (self.is_zero2() or self.is_zero3()) and not devices.isdisjoint({"cpu", "nvme"})

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Find the dictionary with a dotted key.

        Args:
            ds_key_long: Dotted key.

        Returns:
            The dictionary, or `None`; and the last component of the key.
        """
        node: Any = self.config
        *above, last = ds_key_long.split(".")
        for name in above:
            node = node.get(name) if isinstance(node, dict) else None
        return (cast("dict[str, Any]", node) if isinstance(node, dict) else None), last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a dotted key.

        Args:
            ds_key_long: Dotted key.
            default: Value to return if the key is absent.
        """
        node, last = self.find_config_node(ds_key_long)
        return default if node is None else node.get(last, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a dotted key and its subtree.

        Args:
            ds_key_long: Dotted key.
            must_exist: Whether its absence is an error.

        Raises:
            ValueError: The key is absent and `must_exist` is true.
        """
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise ValueError(f"The DeepSpeed configuration has no {ds_key_long!r}: {self.config!r}")

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a value is present and true.

        Example:
            >>> config = HfDeepSpeedConfig({"bf16": {"enabled": True}})
            >>> config.is_true("bf16.enabled"), config.is_true("fp16.enabled")
            (True, False)
        """
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a value is present and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not bool(value)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether a value is `"auto"`."""
        return self.get_value(ds_key_long) == AUTO

    def is_zero2(self) -> bool:
        """Return whether the ZeRO stage is 2: optimizer state and gradients are sharded."""
        return self._stage == 2

    def is_zero3(self) -> bool:
        """Return whether the ZeRO stage is 3, which also shards parameters."""
        return self._stage == 3

    def is_offload(self) -> bool:
        """Return whether parameters or optimizer state are offloaded to the CPU or disk."""
        return self._offload


def read_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Read a configuration into a new dictionary: from a mapping, a JSON file, or JSON text in base64."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    expected = "Pass a dictionary, the path of a JSON file, or JSON in base64."
    if not isinstance(source, (str, os.PathLike)):
        raise SettingsError(f"The DeepSpeed configuration is {source!r}. {expected}")
    path = Path(source).expanduser()
    is_file = os.path.isfile(path)  # noqa: PTH113 - false for a text that is too long for a name
    where = f"in the file {str(source)!r}" if is_file else f"{str(source)!r}, which is no file,"
    try:
        text = path.read_text("utf-8") if is_file else base64.urlsafe_b64decode(str(source)).decode()
        config = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(
            f"The DeepSpeed configuration {where} cannot be read: {error}. {expected}"
        ) from None
    if not isinstance(config, dict):
        raise SettingsError(f"The DeepSpeed configuration {where} is {config!r}; it must be one object.")
    return cast("dict[str, Any]", config)


class DummyOptim(FromConfiguration):
    """Placeholder for the optimizer that the DeepSpeed configuration describes.

    Args:
        params: Parameters, or groups of parameters, as for any optimizer.
        lr: Learning rate, used if the configuration's is `"auto"`.
        weight_decay: Weight decay, used if the configuration's is `"auto"`.
        **kwargs: Other hyperparameters, such as `betas`, used if the configuration's are `"auto"`.

    Example:
        >>> import torch
        >>> DummyOptim(torch.nn.Linear(1, 1).parameters(), lr=0.01).lr
        0.01
    """

    kind = "optimizers"
    feature = Feature.OPTIMIZER_FROM_CONFIGURATION

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.001,
        weight_decay: float = 0,
        **kwargs: Any,
    ) -> None:
        # An iterator would be exhausted when the model is prepared.
        self.params: list[Any] = [*params]
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler(FromConfiguration):
    """Placeholder for the learning rate scheduler that the DeepSpeed configuration describes.

    Args:
        optimizer: The optimizer, or its `DummyOptim`.
        total_num_steps: Steps of the schedule, in batches of one rank.
        warmup_num_steps: Steps of the warm-up, in batches of one rank.
        lr_scheduler_callable: Builds a scheduler from the optimizer, instead of the configuration's.
        **kwargs: Stored in the attribute `kwargs`.
    """

    kind = "schedulers"
    feature = Feature.OPTIMIZER_FROM_CONFIGURATION

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


Known: TypeAlias = Mapping[str, tuple[Any, str]]
"""Values known outside of a configuration by dotted key, each with its source; without one, they only replace
`"auto"`."""


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of a configuration."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from leaves(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            yield prefix + name, value


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a value by its dotted key, adding missing dictionaries."""
    *above, last = key.split(".")
    for name in above:
        config = config.setdefault(name, {})
    config[last] = value


def fill(config: dict[str, Any], known: Known) -> list[str]:
    """Replace every `"auto"` whose value is known, and return phrases for the values that contradict.

    Keys that the configuration lacks are not added.

    Example:
        >>> config = {"a": "auto", "b": {"c": 3}}
        >>> fill(config, {"a": (1, "us"), "b.c": (2, "us")}), config["a"]
        (['b.c is 3 in the configuration, but 2 by us'], 1)
    """
    mismatches: list[str] = []
    for key, value in [*leaves(config)]:
        ours, source = known.get(key, (value, ""))
        if value == AUTO:
            put(config, key, ours)
        # JSON has one kind of number: 2 is 2.0, but true is not 1.
        elif source and (value != ours or isinstance(value, bool) != isinstance(ours, bool)):
            mismatches.append(f"{key} is {value!r} in the configuration, but {ours!r} by {source}")
    return mismatches


def open_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys whose value is `"auto"`."""
    return [key for key, value in leaves(config) if value == AUTO]


def refuse_mismatches(mismatches: Sequence[str]) -> None:
    """Raise one error that lists all contradictions, if any."""
    if mismatches:
        raise SettingsError(
            "The DeepSpeed configuration contradicts other settings: "
            + "; ".join(mismatches)
            + ". Set each in one place only, or to 'auto' in the configuration."
        )


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


def check_offload(config: HfDeepSpeedConfig) -> None:
    """Refuse offload that DeepSpeed would not do at the stage, and an accumulation boundary of its own."""
    problems: list[str] = []
    stage = config.get_value(KEYS["zero_stage"], 0)
    is_known = not config.is_auto(KEYS["zero_stage"])
    if is_known and stage not in range(4):
        raise SettingsError(f"zero_optimization.stage={stage!r}: expected 0, 1, 2 or 3.")
    for what, least in (("optimizer", 1), ("param", 3)) if is_known else ():
        device = config.get_value(KEYS[f"offload_{what}_device"]) or "none"
        needed = 3 if device == "nvme" else least
        if device != "none" and stage < needed:
            problems.append(
                f"offload_{what} to {device!r} needs ZeRO stage {needed}, but the stage is {stage}"
            )
        if device == "nvme" and not config.get_value(KEYS[f"offload_{what}_nvme_path"]):
            problems.append(f"offload_{what} to 'nvme' needs offload_{what}_nvme_path, a folder on the disk")
    if config.get_value("managed_gradient_accumulation") is False:
        problems.append(
            "managed_gradient_accumulation=False: accel sets the engine's accumulation boundary itself; "
            "remove it"
        )
    if problems:
        raise SettingsError(f"The DeepSpeed configuration is invalid: {'; '.join(problems)}.")


def autofill(
    config: Mapping[str, Any],
    *,
    world_size: int = 1,
    micro_batch: int | None = None,
    accumulation: tuple[int, str] = (1, ""),
    hidden_size: int | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    schedule_shards: int = 1,
) -> dict[str, Any]:
    """Return a configuration from which an engine can be built.

    `world_size` is data-parallel, `micro_batch` has the samples per rank, `accumulation` the micro-batches
    of an optimizer step with their source (empty for a default), and `schedule_shards` its scheduler steps.

    Example:
        >>> config = {"train_batch_size": "auto", "zero_optimization": {"stage": 2}}
        >>> autofill(config, world_size=2, micro_batch=4)["train_batch_size"]
        8
    """
    # 1. The three batch sizes, of which any two determine the third.
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (None if config.get(name) == AUTO else config.get(name) for name in names)
    steps = accumulation[0] if steps is None else steps
    if micro is None:
        micro = micro_batch or (None if total is None else max(1, total // (world_size * steps)))
    if micro is None:
        micro = 1
        logger.warning_once(
            "No data loader was prepared together with the model, so the batch size is unknown to DeepSpeed: "
            "train_micro_batch_size_per_gpu=1. Only its report of samples per second depends on it; set "
            "train_micro_batch_size_per_gpu for a correct one."
        )
    source = f"{micro} samples of a batch x {steps} micro-batches of a step x {world_size} process(es)"
    sizes = {names[0]: (micro * steps * world_size, source), names[1]: (micro, ""), names[2]: accumulation}
    # 2. The values of the model and of the placeholders, by default only.
    others: dict[str, Any] = {}
    if hidden_size is not None:
        # The formulas of transformers: https://huggingface.co/docs/transformers/deepspeed
        others["zero_optimization.reduce_bucket_size"] = hidden_size * hidden_size
        others["zero_optimization.stage3_prefetch_bucket_size"] = int(0.9 * hidden_size * hidden_size)
        others["zero_optimization.stage3_param_persistence_threshold"] = 10 * hidden_size
    rate = getattr(optimizer, "defaults", {}).get("lr")
    if isinstance(optimizer, DummyOptim):
        rate = optimizer.lr
        values = {"lr": rate, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
        others |= {f"optimizer.params.{name}": value for name, value in values.items()}
    if isinstance(scheduler, DummyScheduler):
        others["scheduler.params.warmup_min_lr"] = 0
        others["scheduler.params.warmup_num_steps"] = math.ceil(scheduler.warmup_num_steps / schedule_shards)
        if rate is not None:
            others["scheduler.params.warmup_max_lr"] = rate
        if scheduler.total_num_steps is not None:
            steps_in_all = math.ceil(scheduler.total_num_steps / schedule_shards)
            others["scheduler.params.total_num_steps"] = steps_in_all
    # 3. Fill the configuration; of what is still "auto", DeepSpeed has a default for some.
    filled = HfDeepSpeedConfig(config)
    result = filled.config
    refuse_mismatches(fill(result, {**sizes, **{key: (value, "") for key, value in others.items()}}))
    for key in open_keys(result):
        if key == "gradient_clipping" or key.startswith("zero_optimization."):
            filled.del_config_sub_tree(key)
    if unknown := open_keys(result):
        raise SettingsError(
            "The DeepSpeed configuration has 'auto' for keys whose value is not known: "
            + ", ".join(f"{key}='auto'" for key in unknown)
            + ". Set a value, or remove the key to use DeepSpeed's default."
        )
    # DeepSpeed's own default would clip to 1.
    return {"gradient_clipping": 0.0, **{name: value for name, (value, _) in sizes.items()}, **result}


def batch_size_of(loaders: Sequence[Any], *, smallest: bool, split_into: int) -> int | None:
    """Return the smallest or largest number of samples per batch of a rank; `split_into` ranks share one."""
    sizes: list[int] = []
    for loader in loaders:
        size = getattr(loader, "batch_size", None)  # None if there is a batch sampler
        if size is None:
            size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        if isinstance(size, int) and size > 0:
            sizes.append(max(1, size // split_into))
    return (min if smallest else max)(sizes, default=None)


def hidden_size_of(model: Any) -> int | None:
    """Return the hidden size of a model of transformers, the largest of several; `None` if unknown."""
    config = getattr(model, "config", None)
    for owner in (config, getattr(config, "text_config", None)):
        sizes = [getattr(owner, "hidden_size", None), *(getattr(owner, "hidden_sizes", None) or ())]
        if known := [size for size in sizes if isinstance(size, int)]:
            return known[0] if isinstance(sizes[0], int) else max(known)
    return None
