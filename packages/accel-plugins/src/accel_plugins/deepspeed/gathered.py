"""Looking at, or changing, parameters that stage 3 has divided."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from accel_plugins.deepspeed.library import part

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from torch import nn


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether stage 3 has divided a parameter among the ranks."""
    return "ds_id" in vars(parameter)


@contextmanager
def GatheredParameters(  # noqa: N802 - the documented name
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Generator[None]:
    """A block in which every rank has parameters whole, where stage 3 of DeepSpeed has divided them.

    Parameters that are not divided are as they are. Enter it on all ranks.

    Args:
        params: One or several.
        modifier_rank: The rank whose changes hold when the block ends; `None` if nothing is changed.
        fwd_module: The module that uses parameters of another one in its forward pass.
        enabled: Whether to do anything.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> with GatheredParameters(weight, modifier_rank=0):
        ...     weight.data += 1
        >>> weight.tolist()
        [1.0, 1.0]
    """
    several = [params] if isinstance(params, torch.Tensor) else [*params]
    sharded = [one for one in several if is_sharded(one)]
    if not enabled or not sharded:
        yield
        return
    gather = part("runtime.zero").GatheredParameters
    with gather(sharded, modifier_rank=modifier_rank, fwd_module=fwd_module):
        yield
