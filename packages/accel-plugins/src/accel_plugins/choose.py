"""The one decision: which strategy a run uses. Pure; made once."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from accel_state.settings.model import Settings
    from accel_state.topology import Topology

_Applies: TypeAlias = "Callable[[Settings, Topology, torch.device], bool]"


def _has_engine(settings: Settings, topology: Topology, device: torch.device) -> bool:
    del topology, device
    return settings.deepspeed is not None


def _shards_flat_parameters(settings: Settings, topology: Topology, device: torch.device) -> bool:
    del topology, device
    return settings.fsdp is not None and settings.fsdp.fsdp_version == 1 and settings.parallelism is None


def _shards_models(settings: Settings, topology: Topology, device: torch.device) -> bool:
    del device
    sizes = settings.parallelism
    if settings.fsdp is not None:
        return True
    if sizes is None:
        return False
    tensor = sizes.tp_size or 1
    copies = tensor > 1 and topology.world_size > tensor  # gradients of divided layers are averaged by FSDP
    return (sizes.dp_shard_size or 1) > 1 or (sizes.cp_size or 1) > 1 or copies


def _divides_layers(settings: Settings, topology: Topology, device: torch.device) -> bool:
    del topology, device
    return settings.parallelism is not None and (settings.parallelism.tp_size or 1) > 1


def _several_processes(settings: Settings, topology: Topology, device: torch.device) -> bool:
    del settings, device
    return topology.world_size > 1


def _always(settings: Settings, topology: Topology, device: torch.device) -> bool:
    del settings, topology, device
    return True


# In order: the first row that applies is chosen.
_RULES: tuple[tuple[str, _Applies], ...] = (
    ("deepspeed", _has_engine),
    ("fsdp1", _shards_flat_parameters),
    ("fsdp2", _shards_models),
    ("tp", _divides_layers),
    ("ddp", _several_processes),
    ("single", _always),
)


def choose(settings: Settings, topology: Topology, device: torch.device) -> str:
    """Name the strategy of a run.

    Args:
        settings: What was asked for.
        topology: Which process this is among how many.
        device: Where this process computes.

    Returns:
        A key of `accel_plugins.registry.available()`; the same on every rank.

    Raises:
        SettingsError: Sequences are to be divided by DeepSpeed, which is not used.
    """
    sequences = settings.parallelism and settings.parallelism.sp_size
    if settings.deepspeed is None and (sequences or 1) > 1:
        raise SettingsError(
            f"ParallelismConfig(sp_size={sequences}): DeepSpeed's Ulysses divides sequences, and it is "
            "not in use: pass a deepspeed_plugin to Accelerator, or start the script with `accel launch "
            "--use_deepspeed`. Context parallelism (cp_size) does without."
        )
    return next(name for name, applies in _RULES if applies(settings, topology, device))
