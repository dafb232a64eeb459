"""Values of fake tensors: numbers are one, masks select everything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel_cli.commands.estimate.trace import wraps_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_ATEN: Any = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
_LOCAL = frozenset({"wait_tensor", "wait_tensors"})

_NEVER = frozenset({_ATEN.isnan.default, _ATEN.isinf.default, _ATEN.isposinf.default, _ATEN.isneginf.default})
"""What asks whether something has gone wrong: it has not."""

_STILL = frozenset(
    {
        _ATEN.any.default, _ATEN.any.dim, _ATEN.any.dims, _ATEN.all.default, _ATEN.all.dim, _ATEN.sum.default,
        _ATEN.logical_or.default, _ATEN.bitwise_or.Tensor, _ATEN.alias.default, _ATEN.detach.default,
        _ATEN.view.default, _ATEN.clone.default, _ATEN._to_copy.default, _ATEN.select.int,
    }
)  # fmt: skip
"""What keeps a no a no, if all that it is computed from is one."""


class MadeUpValues(TorchDispatchMode):
    """Mode that returns values for fake tensors, and calls `saw` with the script's own collectives."""

    def __init__(self, saw: Callable[[str], None]) -> None:
        super().__init__()
        self._saw = saw

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and is_without_values(args[0]):
            return args[0].device
        answer = ANSWERS.get(func)
        if answer is not None and is_without_values(args[0]):
            return answer(*args, **(kwargs or {}))
        if any(map(wraps_tensors, types)):
            return NotImplemented  # it is dispatched again with the tensors inside
        if func.namespace in _COMMUNICATION:
            name = func.__name__.partition(".")[0].strip("_")
            if name not in _LOCAL:
                self._saw(name.removesuffix("_base"))
        if func is _ATEN.index.Tensor:
            args = (args[0], _without_masks(args[1]))
        result = func(*args, **(kwargs or {}))
        if _is_no(func, args):
            result.is_made_up_no = True
        return result


def made_up(tensor: Any) -> bool | int | float:
    """Return a value for a fake tensor: one; False where it indicates an error.

    Example:
        >>> made_up(torch.zeros(1)), made_up(torch.zeros(1, dtype=torch.bool))
        (1.0, True)
    """
    is_yes = not getattr(tensor, "is_made_up_no", False)
    if tensor.dtype == torch.bool:
        return is_yes
    return float(is_yes) if tensor.is_floating_point() else int(is_yes)


def is_without_values(tensor: Any) -> bool:
    """Return whether a tensor is fake."""
    return isinstance(tensor, FakeTensor)


def _is_no(func: Any, args: tuple[Any, ...]) -> bool:
    if func in _NEVER:
        return is_without_values(args[0])
    if func is _ATEN.ne.Tensor:  # how a value is tested for being a number
        return args[0] is args[1]
    if func not in _STILL:
        return False
    found = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return all(getattr(leaf, "is_made_up_no", False) for leaf in found)


def _without_masks(indices: Any) -> list[Any]:
    """Replace masks by the indices that they select."""
    found: list[Any] = []
    for index in indices:
        if (
            isinstance(index, Tensor)
            and is_without_values(index)
            and index.dtype in {torch.bool, torch.uint8}
        ):
            found += [index.new_empty(index.numel(), dtype=torch.int64)] * max(1, index.ndim)
        else:
            found.append(index)
    return found


def _nonzero(tensor: Tensor) -> Tensor:
    return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)


def _selected(tensor: Tensor, mask: Tensor) -> Tensor:
    return torch.broadcast_tensors(tensor, mask)[0].reshape(-1).clone()


def _unique(
    tensor: Tensor, ordered: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    del ordered
    positions = tensor.new_empty(tensor.shape if return_inverse else 0, dtype=torch.int64)
    counts = tensor.new_empty(tensor.numel() if return_counts else 0, dtype=torch.int64)
    return tensor.reshape(-1).clone(), positions, counts


def _yes(*tensors: Any) -> bool:
    return bool(made_up(tensors[0]))


ANSWERS: Mapping[Any, Callable[..., Any]] = {
    _ATEN._local_scalar_dense.default: made_up,
    _ATEN.is_nonzero.default: _yes,
    _ATEN.equal.default: lambda *_: True,
    _ATEN.nonzero.default: _nonzero,
    _ATEN.masked_select.default: _selected,
    _ATEN._unique2.default: _unique,
}
"""By the operation that asks."""
