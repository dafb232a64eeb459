"""Environment flags by which transformers loads weights on rank 0 only."""

from __future__ import annotations

from accel_state import environ

SWITCH = "ACCELERATE_USE_FSDP"
_RAM_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def enable_fsdp_ram_efficient_loading() -> None:
    """Make `from_pretrained` of transformers read weights on rank 0 only, from now on."""
    environ.publish({SWITCH: "true", _RAM_EFFICIENT: "true"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Make `from_pretrained` of transformers read weights on every rank, from now on."""
    environ.publish({_RAM_EFFICIENT: "false"})
