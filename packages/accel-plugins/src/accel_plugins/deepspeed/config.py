"""Read DeepSpeed's configuration, fill its `"auto"` values, check it, register it with transformers."""

from __future__ import annotations

import base64
import copy
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accel_plugins.strategy import Feature, FromConfiguration
from accel_state.errors import SettingsError
from accel_state.frozen import frozen
from accel_state.libraries import is_installed
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
    """Read a DeepSpeed configuration.

    Args:
        source: A mapping, the path of a JSON file, or the JSON text in URL-safe base64.

    Returns:
        A deep copy, so that filling it does not change the caller's.

    Raises:
        SettingsError: The source is none of these, or not one JSON object.

    Example:
        >>> read_config({"zero_optimization": {"stage": 2}})
        {'zero_optimization': {'stage': 2}}
    """
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    expected = "Pass a dictionary, the path of a JSON file, or JSON in base64."
    try:
        path = Path(source).expanduser()
    except TypeError:
        raise SettingsError(f"The DeepSpeed configuration is {source!r}. {expected}") from None
    try:
        is_file = path.is_file()
    except OSError:  # The text is too long for a name: it is base64.
        is_file = False
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

    def groups(self) -> list[list[Tensor]]:
        """Return the parameters, group by group."""
        if self.params and isinstance(self.params[0], dict):
            return [[*group["params"]] for group in self.params]
        return [[*self.params]]


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


def link(config: Mapping[str, Any], *, asked: bool) -> HfDeepSpeedConfig | None:
    """Register a configuration with transformers, if the program has imported it.

    The returned object stays registered while it is referenced; `None` if models are built unsharded.
    """
    if "transformers" not in sys.modules or not is_installed("deepspeed"):
        return None
    integration = importlib.import_module("transformers.integrations.deepspeed")
    if not asked:
        integration.unset_hf_deepspeed_config()
        return None
    linked = HfDeepSpeedConfig(config_for_models(config))
    integration.set_hf_deepspeed_config(linked)
    return linked


def config_for_models(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration for building models, with its `"auto"` values removed.

    Example:
        >>> config_for_models({"train_batch_size": "auto", "zero_optimization": {"stage": 3}})
        {'zero_optimization': {'stage': 3}, 'train_micro_batch_size_per_gpu': 1}
    """
    known = _without_auto(config)
    for name in ("train_batch_size", "gradient_accumulation_steps"):
        known.pop(name, None)
    return known | {"train_micro_batch_size_per_gpu": 1}


def _without_auto(node: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_auto(value) if isinstance(value, dict) else value
        for name, value in node.items()
        if value != AUTO
    }


@frozen
class KnownValue:
    """A value known outside of the configuration, with its source for messages.

    If it is `binding`, a different value in the configuration is an error; else the configuration wins, and
    no message needs the source.
    """

    value: Any
    source: str = ""
    binding: bool = True

    def contradiction(self, key: str, value: Any) -> str:
        """Describe a different value in the configuration."""
        return f"{key} is {value!r} in the configuration, but {self.value!r} by {self.source}"


@frozen
class Filled:
    """A filled configuration, its contradictions, and the dotted keys whose value is still `"auto"`."""

    config: dict[str, Any]
    mismatches: list[str]
    open_keys: list[str]


def fill(config: Mapping[str, Any], known: Mapping[str, KnownValue]) -> Filled:
    """Replace every `"auto"` whose value is known by its dotted key, and compare the other values.

    Keys that the configuration lacks are not added.

    Example:
        >>> known = {"a": KnownValue(value=1, source="us"), "b.c": KnownValue(value=2, source="us")}
        >>> filled = fill({"a": "auto", "b": {"c": 3}}, known)
        >>> filled.config["a"], filled.mismatches
        (1, ['b.c is 3 in the configuration, but 2 by us'])
    """
    mismatches: list[str] = []
    open_keys: list[str] = []

    def fill_node(node: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in node.items():
            key = prefix + name
            if isinstance(value, dict):
                result[name] = fill_node(cast("dict[str, Any]", value), f"{key}.")
                continue
            other = known.get(key)
            result[name] = other.value if other is not None and value == AUTO else value
            if other is not None and other.binding:
                # JSON has one kind of number: 2 is 2.0, but true is not 1.
                is_bool = isinstance(result[name], bool)
                if is_bool != isinstance(other.value, bool) or result[name] != other.value:
                    mismatches.append(other.contradiction(key, value))
            if result[name] == AUTO:
                open_keys.append(key)
        return result

    return Filled(config=fill_node(config, ""), mismatches=mismatches, open_keys=open_keys)


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
    has_stage = not config.is_auto(KEYS["zero_stage"])
    if has_stage and stage not in range(4):
        raise SettingsError(f"zero_optimization.stage={stage!r}: expected 0, 1, 2 or 3.")
    for what, least in (("optimizer", 1), ("param", 3)) if has_stage else ():
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


@frozen
class RunFacts:
    """Facts about a run from which a configuration is filled; `None` where they are not known.

    `world_size` is data-parallel, `micro_batch` has the samples per rank, and `schedule_shards` are scheduler
    steps per optimizer step.
    """

    world_size: int = 1
    micro_batch: int | None = None
    accumulation: KnownValue = field(
        default_factory=lambda: KnownValue(value=1, source="the default of Accelerator", binding=False)
    )
    hidden_size: int | None = None
    optimizer: Any = None
    scheduler: Any = None
    schedule_shards: int = 1


def autofill(config: Mapping[str, Any], facts: RunFacts) -> dict[str, Any]:
    """Fill a configuration so that an engine can be built from it.

    Example:
        >>> config = {"train_batch_size": "auto", "zero_optimization": {"stage": 2}}
        >>> autofill(config, RunFacts(world_size=2, micro_batch=4))["train_batch_size"]
        8
    """
    batches, mismatches = _batches(config, facts)
    filled = fill(config, {**batches, **_known_values(facts)})
    refuse_mismatches([*mismatches, *filled.mismatches])
    # Of the keys that are still "auto", DeepSpeed has a default for some.
    open_keys: list[str] = []
    for key in filled.open_keys:
        *above, last = key.split(".")
        if key == "gradient_clipping" or above[:1] == ["zero_optimization"]:
            del reduce(getitem, above, filled.config)[last]
        else:
            open_keys.append(key)
    if open_keys:
        raise SettingsError(
            "The DeepSpeed configuration has 'auto' for keys whose value is not known: "
            + ", ".join(f"{key}='auto'" for key in open_keys)
            + ". Set a value, or remove the key to use DeepSpeed's default."
        )
    result = filled.config
    for key, known in batches.items():
        put(result, key, known.value)
    # DeepSpeed's own default would clip to 1.
    result.setdefault("gradient_clipping", 0.0)
    return result


def batch_size_of(loaders: Sequence[Any], *, smallest: bool, split_into: int) -> int | None:
    """Return the smallest or largest number of samples per batch and rank of several loaders.

    `split_into` ranks share a loader's batch.
    """
    sizes: list[int] = []
    for loader in loaders:
        size = getattr(loader, "batch_size", None)  # None if there is a batch sampler
        if size is None:
            size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        if isinstance(size, int) and size > 0:
            sizes.append(max(1, size // split_into))
    return (min if smallest else max)(sizes, default=None)


def hidden_size_of(model: Any) -> int | None:
    """Return the hidden size of a model of transformers; `None` if its configuration has none.

    Example:
        >>> from types import SimpleNamespace
        >>> hidden_size_of(SimpleNamespace(config=SimpleNamespace(hidden_sizes=[8, 32])))
        32
    """
    config = getattr(model, "config", None)
    for owner in (config, getattr(config, "text_config", None)):
        size = getattr(owner, "hidden_size", None)
        if isinstance(size, int):
            return size
        sizes = getattr(owner, "hidden_sizes", None)
        if isinstance(sizes, (list, tuple)) and sizes:
            return max(sizes)
    return None


def _batches(config: Mapping[str, Any], facts: RunFacts) -> tuple[dict[str, KnownValue], list[str]]:
    """Return the three batch sizes, of which any two determine the third, and their contradictions."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    configured = (config.get(name) for name in names)
    total, micro, steps = (None if value == AUTO else value for value in configured)
    mismatches: list[str] = []
    accumulation = facts.accumulation
    if steps is not None and accumulation.binding and accumulation.value != steps:
        mismatches.append(accumulation.contradiction("gradient_accumulation_steps", steps))
    steps = accumulation.value if steps is None else steps
    if micro is None and total is not None and facts.micro_batch is None:
        micro = max(1, total // (facts.world_size * steps))
    micro = facts.micro_batch if micro is None else micro
    if micro is None:
        micro = 1
        logger.warning_once(
            "No data loader was prepared together with the model, so the batch size is unknown to DeepSpeed: "
            "train_micro_batch_size_per_gpu=1. Only its report of samples per second depends on it; set "
            "train_micro_batch_size_per_gpu for a correct one."
        )
    product = micro * steps * facts.world_size
    if total is not None and total != product:
        source = (
            f"{micro} samples of a batch x {steps} micro-batches of a step x {facts.world_size} process(es)"
        )
        known = KnownValue(value=product, source=source)
        mismatches.append(known.contradiction("train_batch_size", total))
    return _defaults("", dict(zip(names, (product, micro, steps), strict=True))), mismatches


def _known_values(facts: RunFacts) -> dict[str, KnownValue]:
    """Return the values set by the model and by the placeholders for optimizer and scheduler."""
    size, optimizer, scheduler = facts.hidden_size, facts.optimizer, facts.scheduler
    shards = facts.schedule_shards
    known: dict[str, KnownValue] = {}
    if size is not None:
        # The formulas of transformers: https://huggingface.co/docs/transformers/deepspeed
        buckets = {
            "reduce_bucket_size": size * size,
            "stage3_prefetch_bucket_size": int(0.9 * size * size),
            "stage3_param_persistence_threshold": 10 * size,
        }
        known |= _defaults("zero_optimization.", buckets)
    if isinstance(optimizer, DummyOptim):
        values = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
        known |= _defaults("optimizer.params.", values)
    if isinstance(scheduler, DummyScheduler):
        has_rate = isinstance(optimizer, DummyOptim)
        rate = optimizer.lr if has_rate else getattr(optimizer, "defaults", {}).get("lr")
        steps = scheduler.total_num_steps
        values = {
            "warmup_min_lr": 0,
            "warmup_max_lr": rate,
            "warmup_num_steps": math.ceil(scheduler.warmup_num_steps / shards),
            "total_num_steps": None if steps is None else math.ceil(steps / shards),
        }
        known |= _defaults(
            "scheduler.params.", {name: value for name, value in values.items() if value is not None}
        )
    return known


def _defaults(prefix: str, values: Mapping[str, Any]) -> dict[str, KnownValue]:
    return {f"{prefix}{name}": KnownValue(value=value, binding=False) for name, value in values.items()}
