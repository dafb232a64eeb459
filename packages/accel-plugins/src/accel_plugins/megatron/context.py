"""Context parallelism: every rank of the group computes two chunks of each sequence, one from either end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_plugins.megatron.library import core

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def own_chunks(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return this rank's chunks of a batch, cut by megatron-core."""
    group = core("parallel_state").get_context_parallel_group()
    parts = core("utils").get_batch_on_this_cp_rank(dict(zip(_NAMES, batch, strict=True)), group)
    return tuple(parts.values())


def gather_chunks(tensor: Tensor) -> Tensor:
    """Return the whole sequences of chunks, `[sequence, ...]`; gradients of all ranks are summed up."""
    group = core("parallel_state").get_context_parallel_group()
    if group.size() == 1:
        return tensor
    gather = core("tensor_parallel.mappings").gather_from_sequence_parallel_region
    chunks = gather(tensor.contiguous(), group=group).chunk(2 * group.size())
    return torch.cat([chunks[position] for position in positions(group.size())])


def positions(size: int) -> list[int]:
    """Return where each chunk of a sequence is among those of all ranks, one rank after another.

    Example:
        >>> positions(2)  # rank 0 has the first and the last
        [0, 2, 3, 1]
    """
    return [2 * chunk for chunk in range(size)] + [2 * chunk + 1 for chunk in reversed(range(size))]


def sum_over_context(value: Tensor) -> Tensor:
    """Return the sum of a number over the ranks that share sequences, without a gradient."""
    group = core("parallel_state").get_context_parallel_group()
    total = value.detach().clone()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total
