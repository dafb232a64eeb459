"""Fill the `"auto"` values of a DeepSpeed configuration from what is known when a model is prepared."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_plugins.deepspeed.dummy import DummyOptim, DummyScheduler
from accel_plugins.deepspeed.fill import (
    Filled,
    KnownValue,
    Mismatch,
    fill,
    put,
    refuse_mismatches,
)
from accel_plugins.deepspeed.hf_config import AUTO
from accel_state.errors import SettingsError
from accel_state.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = get_logger(__name__)

_FROM_HIDDEN_SIZE = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)


@dataclass(frozen=True, slots=True, kw_only=True)
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
    known = {**batches, **_sizes(facts), **_optimizer(facts), **_schedule(facts)}
    filled = fill(config, known)
    refuse_mismatches([*mismatches, *filled.mismatches])
    result = _without_optional(filled)
    for key, one in batches.items():
        put(result, key, one.value)
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
    if not sizes:
        return None
    return min(sizes) if smallest else max(sizes)


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
        several = getattr(owner, "hidden_sizes", None)
        if isinstance(several, (list, tuple)) and several:
            return max(several)
    return None


def _batches(config: Mapping[str, Any], facts: RunFacts) -> tuple[dict[str, KnownValue], list[Mismatch]]:
    """Return the three batch sizes, of which any two determine the third, and their contradictions."""
    configured = {
        name: _configured(config, name) for name in ("train_batch_size", "train_micro_batch_size_per_gpu")
    }
    mismatches: list[Mismatch] = []
    steps = _configured(config, "gradient_accumulation_steps")
    accumulation = facts.accumulation
    if steps is not None and accumulation.binding and accumulation.value != steps:
        mismatches.append(Mismatch(key="gradient_accumulation_steps", found=steps, known=accumulation))
    steps = accumulation.value if steps is None else steps
    total, micro = configured["train_batch_size"], configured["train_micro_batch_size_per_gpu"]
    if micro is None and total is not None and facts.micro_batch is None:
        micro = max(1, total // (facts.world_size * steps))
    if micro is None:
        micro = facts.micro_batch
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
        mismatches.append(Mismatch(key="train_batch_size", found=total, known=known))
    values = {
        "train_batch_size": product,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    return {
        key: KnownValue(value=value, source="", binding=False) for key, value in values.items()
    }, mismatches


def _configured(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return None if value == AUTO else value


def _sizes(facts: RunFacts) -> dict[str, KnownValue]:
    # The formulas of transformers: https://huggingface.co/docs/transformers/deepspeed
    size = facts.hidden_size
    if size is None:
        return {}
    values = (size * size, int(0.9 * size * size), 10 * size)
    return {
        key: KnownValue(value=value, source="the model", binding=False)
        for key, value in zip(_FROM_HIDDEN_SIZE, values, strict=True)
    }


def _optimizer(facts: RunFacts) -> dict[str, KnownValue]:
    one = facts.optimizer
    if not isinstance(one, DummyOptim):
        return {}
    values = {"lr": one.lr, "weight_decay": one.weight_decay, **one.kwargs}
    return {
        f"optimizer.params.{name}": KnownValue(
            value=value, source=f"DummyOptim({name}={value!r})", binding=False
        )
        for name, value in values.items()
    }


def _schedule(facts: RunFacts) -> dict[str, KnownValue]:
    one = facts.scheduler
    if not isinstance(one, DummyScheduler):
        return {}
    values: dict[str, Any] = {
        "warmup_min_lr": 0,
        "warmup_num_steps": math.ceil(one.warmup_num_steps / facts.schedule_shards),
    }
    rate = _rate(facts.optimizer)
    if rate is not None:
        values["warmup_max_lr"] = rate
    if one.total_num_steps is not None:
        values["total_num_steps"] = math.ceil(one.total_num_steps / facts.schedule_shards)
    return {
        f"scheduler.params.{name}": KnownValue(value=value, source="DummyScheduler", binding=False)
        for name, value in values.items()
    }


def _rate(optimizer: Any) -> float | None:
    if isinstance(optimizer, DummyOptim):
        return optimizer.lr
    return None if optimizer is None else optimizer.defaults.get("lr")


def _without_optional(filled: Filled) -> dict[str, Any]:
    """Drop keys that are still `"auto"` and for which DeepSpeed has a default; refuse the others."""
    result = filled.config
    open_keys: list[str] = []
    for key in filled.open_keys:
        if key == "gradient_clipping" or key.startswith("zero_optimization."):
            *above, last = key.split(".")
            node = result
            for name in above:
                node = node[name]
            del node[last]
        else:
            open_keys.append(key)
    if open_keys:
        raise SettingsError(
            "The DeepSpeed configuration has 'auto' for keys whose value is not known: "
            + ", ".join(f"{key}='auto'" for key in open_keys)
            + ". Give a value, or leave the key out for DeepSpeed's own default."
        )
    return result
