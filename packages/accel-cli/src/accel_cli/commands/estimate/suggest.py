"""Suggest the fastest configuration that fits the devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accel_cli.commands.estimate.memory import Estimate, Job, estimate

if TYPE_CHECKING:
    from collections.abc import Mapping

HEADROOM = 0.9
"""The usable share of a device's memory; the rest is for the driver, kernels and fragmentation."""

_MOST_DEVICES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A suggested configuration."""

    estimate: Estimate
    checkpointing: bool
    config: Mapping[str, Any]


def fits(one: Estimate, memory: int, host: int | None = None, per_machine: int = 1) -> bool:
    """Whether an estimate fits.

    Example:
        >>> fits(Estimate(strategy="DDP", parts={"parameters": 90}), 100)
        True
    """
    offloaded = one.host * per_machine
    return one.device <= HEADROOM * memory and (not offloaded or host is None or offloaded <= HEADROOM * host)


def candidates(devices: int) -> tuple[tuple[str, bool], ...]:
    """Return the strategies to try, with and without activation checkpointing, from fast to slow."""
    if devices == 1:
        return (("one device", False), ("one device", True), ("FSDP2, offloaded", True))
    return (
        ("DDP", False),
        ("FSDP2, gathered once", False),
        ("FSDP2", False),
        ("FSDP2, gathered once", True),
        ("FSDP2", True),
        ("FSDP2, offloaded", True),
    )


def suggest(
    job: Job, again: Job, memory: int, *, host: int | None = None, per_machine: int = 8
) -> Suggestion | None:
    """Find the fastest configuration that fits; None if none does. `again` is the job with checkpointing."""
    for strategy, checkpointing in candidates(job.devices):
        one = estimate(strategy, again if checkpointing else job)
        if fits(one, memory, host, min(per_machine, job.devices)):
            config = config_of(strategy, job, checkpointing=checkpointing)
            return Suggestion(estimate=one, checkpointing=checkpointing, config=config)
    return None


def devices_needed(again: Job, memory: int) -> int | None:
    """Return the power of two of devices on which fully sharded training fits; None if none is enough."""
    devices = 1
    while devices <= _MOST_DEVICES:
        if fits(estimate("FSDP2", replace(again, devices=devices)), memory):
            return devices
        devices *= 2
    return None


def config_of(strategy: str, job: Job, *, checkpointing: bool) -> dict[str, Any]:
    """Return the keys and values for a config file.

    Example:
        >>> from accel_cli.commands.estimate.memory import Sizes
        >>> job = Job(sizes=Sizes(parameters=1, trainable=1), devices=2)
        >>> config_of("DDP", job, checkpointing=False)["distributed_type"]
        'MULTI_GPU'
    """
    base: dict[str, Any] = {
        "distributed_type": "NO" if job.devices == 1 else "MULTI_GPU",
        "mixed_precision": "bf16" if job.width == 2 else "no",
        "num_processes": job.devices,
    }
    if not strategy.startswith("FSDP2"):
        return base
    return {
        **base,
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": strategy != "FSDP2, gathered once",
            "fsdp_offload_params": strategy == "FSDP2, offloaded",
            "fsdp_activation_checkpointing": checkpointing,
        },
    }
