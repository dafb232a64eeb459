"""Convert outputs of low precision to float32."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.tree import recursively_apply

if TYPE_CHECKING:
    from collections.abc import Callable

_LOW = frozenset({torch.float16, torch.bfloat16})


def convert_to_fp32(tensor: Any) -> Any:
    """Convert the float16 and bfloat16 tensors in nested data to float32; the rest stays as it is.

    Example:
        >>> convert_to_fp32([torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int64)])
        [tensor([1.]), tensor([1])]
    """
    return recursively_apply(torch.Tensor.float, tensor, test_type=_is_low)


class ConvertOutputsToFp32:
    """A function whose float16 and bfloat16 outputs are converted to float32.

    It can be pickled and copied wherever the function can, and shows the function's name and signature.

    Example:
        >>> half = ConvertOutputsToFp32(lambda x: x.half())
        >>> half(torch.ones(1))
        tensor([1.])
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function and convert what it returns."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> Callable[..., Any]:
        return self.model_forward

    def __setstate__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> ConvertOutputsToFp32:
    """Decorate a function so that its low-precision outputs become float32."""
    return ConvertOutputsToFp32(model_forward)


def _is_low(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in _LOW
