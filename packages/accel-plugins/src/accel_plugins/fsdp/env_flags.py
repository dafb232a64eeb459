"""The variables by which other libraries know that only rank 0 has to read a model."""

from __future__ import annotations

from accel_state import environ

SWITCH = "ACCELERATE_USE_FSDP"
_RAM_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def enable_fsdp_ram_efficient_loading() -> None:
    """Let `from_pretrained` of transformers read weights on rank 0 only, from now on."""
    environ.publish({SWITCH: "true", _RAM_EFFICIENT: "true"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Let `from_pretrained` of transformers read weights on every rank, from now on."""
    environ.publish({_RAM_EFFICIENT: "false"})
