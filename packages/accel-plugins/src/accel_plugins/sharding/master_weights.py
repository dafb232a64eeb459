"""Master weights: train parameters in float32 where models compute in a lower precision."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger(__name__)

_SMALL = frozenset({torch.bfloat16, torch.float16})


def dtype_to_train(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which an optimizer trains a parameter; frozen and quantised ones keep theirs.

    Example:
        >>> dtype_to_train(torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)))
        torch.float32
        >>> dtype_to_train(torch.zeros(1, dtype=torch.bfloat16))
        torch.bfloat16
    """
    return torch.float32 if parameter.requires_grad and parameter.dtype in _SMALL else parameter.dtype


def upcast_flat_parameters(root: FullyShardedDataParallel) -> None:
    """Convert the trained flat parameters of FSDP1 to float32, before the first forward pass.

    torch accepts a dtype that changes between wrapping and the first forward pass.
    """
    for module in FullyShardedDataParallel.fsdp_modules(root):
        handle: Any = module._handle  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType] - has no other name
        if handle is None or dtype_to_train(handle.flat_param) is handle.flat_param.dtype:
            continue
        handle.flat_param.data = handle.flat_param.data.float()
        if module._use_orig_params:  # pyright: ignore[reportPrivateUsage] - as above
            handle._use_sharded_views()


def warn_about_master_weights(model: nn.Module, precision: str) -> None:
    """Warn if parameters of a model will be trained in float32 instead of their own dtype."""
    small = [one for one in model.parameters() if dtype_to_train(one) is not one.dtype]
    if small:
        dtypes = ", ".join(sorted({str(one.dtype) for one in small}))
        logger.warning(
            "%d parameters of %s are in %s; with mixed_precision=%r they are trained and saved in float32, "
            "as small updates would be lost in their own dtype; mixed_precision='no' keeps it.",
            len(small),
            type(model).__name__,
            dtypes,
            precision,
        )
