"""Losses over the data-parallel group of Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from accel_plugins.megatron.library import core, load_library
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def avg_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Average losses over the data-parallel ranks of a run with Megatron.

    Args:
        losses: Tensors of one element each, as many on every rank of the group.

    Returns:
        A tensor of one dim: the average of each, the same on all ranks of the group.

    Raises:
        SettingsError: Megatron's process groups have not been made.
    """
    load_library("avg_losses_across_data_parallel_group()")
    groups = core("parallel_state")
    if not groups.model_parallel_is_initialized():
        raise SettingsError(
            "avg_losses_across_data_parallel_group() was called before Megatron's process groups were made: "
            "prepare a model with an Accelerator(megatron_lm_plugin=…) first."
        )
    averages = torch.cat([one.detach().reshape(1) for one in losses])
    group = groups.get_data_parallel_group()
    dist.all_reduce(averages, group=group)
    return averages / dist.get_world_size(group)
