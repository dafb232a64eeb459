"""Megatron's process groups: made when a model is prepared, given up with it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from accel_plugins.megatron.check import data_parallel_size
from accel_plugins.megatron.library import core
from accel_state import group_end
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_plugins.megatron.plugin import MegatronLMPlugin

_LARGEST_SEED = 2**31
_made: list[Any] = []  # megatron-core keeps its groups in globals, and destroys none
_leases: weakref.WeakSet[Lease] = weakref.WeakSet()
_seeds: list[int] = []  # of the random states of tensor parallelism, the last one in use


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Sizes of Megatron's groups, and this rank in each."""

    tensor: int
    pipeline: int
    data: int
    rank: int
    context: int = 1

    @property
    def tensor_rank(self) -> int:
        """The rank in the tensor-parallel group: neighbours share a node."""
        return self.rank % self.tensor

    @property
    def context_rank(self) -> int:
        """The rank in the context-parallel group."""
        return self.rank // self.tensor % self.context

    @property
    def data_rank(self) -> int:
        """The rank in the data-parallel group."""
        return self.rank // (self.tensor * self.context) % self.data

    @property
    def pipeline_rank(self) -> int:
        """The pipeline stage."""
        return self.rank // (self.tensor * self.context * self.data)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pipeline_rank == self.pipeline - 1

    @property
    def repeats(self) -> bool:
        """Whether another rank computes the same with the same batches."""
        return self.tensor_rank > 0 or self.context_rank > 0 or self.pipeline_rank > 0

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the axes of a mesh of all ranks, the outermost first."""
        context = {"cp": self.context} if self.context > 1 else {}
        return {"pp": self.pipeline, "dp_replicate": self.data, **context, "tp": self.tensor}


class Lease:
    """The groups of one strategy, which shares them with others of the same sizes."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    def end(self) -> None:
        """Give up the groups; the last destroys them."""
        _leases.discard(self)
        if not _leases:
            _stop()


def groups_of(plugin: MegatronLMPlugin, world_size: int, rank: int) -> Groups:
    """Return the sizes of the groups of a run, and a rank in them.

    Example:
        >>> from accel_plugins.megatron.plugin import MegatronLMPlugin
        >>> groups_of(MegatronLMPlugin(tp_degree=2), 4, 3).axes
        {'pp': 1, 'dp_replicate': 2, 'tp': 2}
    """
    tensor, pipeline = plugin.tp_degree or 1, plugin.pp_degree or 1
    context = plugin.context_parallel_size or 1
    data = data_parallel_size(tensor, pipeline, context, world_size)
    return Groups(tensor=tensor, pipeline=pipeline, data=data, context=context, rank=rank)


def check_shared(groups: Groups) -> None:
    """Refuse groups beside those of other sizes that are in use: megatron-core has one set per process."""
    if _leases and not core("parallel_state").model_parallel_is_initialized():
        _leases.clear()  # of a process group that was destroyed
    if _leases:
        gc.collect()  # which may find strategies that nobody has
    other = next((one.groups for one in _leases if one.groups != groups), None)
    if other is not None:
        raise SettingsError(
            f"Another Accelerator trains by Megatron with groups of {_sizes(other)}, here they are of "
            f"{_sizes(groups)}, but megatron-core has one set per process: call free_memory() on it first."
        )


def _sizes(groups: Groups) -> str:
    return ", ".join(f"{name} {size}" for name, size in groups.axes.items())


def start(groups: Groups) -> Lease:
    """Make the process groups, and seed the random states of tensor parallelism. A collective of all ranks.

    Groups of the same sizes that another strategy has are shared.
    """
    check_shared(groups)
    lease = Lease(groups)
    if not _leases:
        _make(groups)
    _leases.add(lease)
    return lease


def _make(groups: Groups) -> None:
    _stop()
    state = core("parallel_state")
    before = set(c10d._world.pg_map)  # pyright: ignore[reportPrivateUsage] - no public list
    state.initialize_model_parallel(
        tensor_model_parallel_size=groups.tensor,
        pipeline_model_parallel_size=groups.pipeline,
        context_parallel_size=groups.context,
        create_gloo_process_groups=False,
    )
    _made.extend(group for group in c10d._world.pg_map if group not in before)  # pyright: ignore[reportPrivateUsage]
    seeds = [torch.initial_seed() % _LARGEST_SEED]
    dist.broadcast_object_list(seeds, src=0)  # ranks that share a tensor drop out the same of it
    _seed(seeds[0])


def _seed(seed: int) -> None:
    """Seed the random states of tensor parallelism, and the device's own, which ranks of a group share."""
    _seeds[:] = [seed]
    core("tensor_parallel.random").model_parallel_cuda_manual_seed(seed)


@dataclass(frozen=True, slots=True)
class Generators:
    """Random states of tensor parallelism: dropout of sharded tensors draws from one of each rank's own."""

    groups: Groups

    def state_dict(self) -> dict[str, Any]:
        """Return the states on this rank; empty before groups are made."""
        if not _leases:
            return {}
        states = core("tensor_parallel.random").get_cuda_rng_tracker().get_states()
        return {"sizes": self.groups.axes, "seed": _seeds[-1], "states": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Resume; seed all anew if the state is that of other sizes, or there is none."""
        if not _leases:
            return None
        if state.get("sizes") == self.groups.axes:
            _seeds[:] = [state["seed"]]
            core("tensor_parallel.random").get_cuda_rng_tracker().set_states(dict(state["states"]))
            return None
        _seed((state.get("seed", _seeds[-1]) + 1) % _LARGEST_SEED)
        origin = f"those of groups of {state['sizes']}" if state else "absent"
        return f"Megatron's, for groups of {self.groups.axes}, are {origin}, and are seeded anew"


def _stop() -> None:
    state = core("parallel_state")
    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    for group in _made:
        if group in c10d._world.pg_map:  # pyright: ignore[reportPrivateUsage]
            group_end.destroy(group)
    _made.clear()
