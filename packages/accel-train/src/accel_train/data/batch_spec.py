"""The structure of a batch, worked out once: to take batches of it apart, and to put them together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from accel_ops.tree import children, is_dataclass_instance, rebuild, recursively_apply

Take: TypeAlias = Callable[[Any, list[Any]], bool]
Build: TypeAlias = Callable[[Iterator[Any]], Any]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where a leaf of a batch was: a tensor of some type, or any other object.

    Args:
        dtype: The type of the tensor's elements, or None for an object.
        dims: The number of its dimensions.
    """

    dtype: torch.dtype | None = None
    dims: int = 0


def is_plain(leaf: Any) -> bool:
    """Whether this is a tensor that travels as bytes: not sparse, nested, or with a meaning of its own."""
    return type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested


class BatchSpec:
    """Batches of one structure, element types and numbers of dimensions.

    Args:
        layout: A batch with a `TensorSpec` for every leaf.

    Example:
        >>> template = BatchSpec.of({"ids": torch.zeros(2, 3), "name": "a"})
        >>> leaves = template.take({"ids": torch.ones(1, 1), "name": "b"})
        >>> template.build(iter(leaves))
        {'ids': tensor([[1.]]), 'name': 'b'}
        >>> template.take({"ids": torch.ones(1), "name": "b"}) is None
        True
    """

    __slots__ = ("_build", "_take", "dims", "layout", "tensor_specs")

    def __init__(self, layout: Any) -> None:
        self.layout = layout
        self.tensor_specs: list[TensorSpec] = []
        self._take, self._build = _compile(layout, self.tensor_specs)
        self.dims = sum(tensor_spec.dims for tensor_spec in self.tensor_specs)

    @classmethod
    def of(cls, batch: Any) -> BatchSpec:
        """The template of a batch."""
        return cls(recursively_apply(_dig, batch, test_type=_is_leaf))

    def take(self, batch: Any) -> list[Any] | None:
        """Return the leaves of a batch in order, or None if it does not fit."""
        leaves: list[Any] = []
        return leaves if self._take(batch, leaves) else None

    def build(self, leaves: Iterator[Any]) -> Any:
        """Make a batch of leaves."""
        return self._build(leaves)


def _dig(leaf: Any) -> TensorSpec:
    return TensorSpec(leaf.dtype, leaf.dim()) if is_plain(leaf) else TensorSpec()


def _is_leaf(data: Any) -> bool:
    return not is_dataclass_instance(data)


def _compile(layout: Any, tensor_specs: list[TensorSpec]) -> tuple[Take, Build]:
    if type(layout) is TensorSpec:
        tensor_specs.append(layout)
        return _leaf_taker(layout), next
    inside = children(layout)
    if inside is None:
        raise TypeError(f"{layout!r} is neither a hole nor a container")
    keys = [key for key, _ in inside]
    parts = [_compile(value, tensor_specs) for _, value in inside]
    takes, builds = [take for take, _ in parts], [build for _, build in parts]
    kind = type(layout)
    if kind is dict:
        return _dict_taker(keys, takes), lambda leaves: {
            key: build(leaves) for key, build in zip(keys, builds, strict=True)
        }
    if kind is list or kind is tuple:
        return _sequence_taker(kind, takes), lambda leaves: kind([build(leaves) for build in builds])
    return _container_taker(kind, keys, takes), lambda leaves: rebuild(layout, [b(leaves) for b in builds])


def _leaf_taker(tensor_spec: TensorSpec) -> Take:
    if tensor_spec.dtype is None:

        def collect_object(data: Any, leaves: list[Any]) -> bool:
            leaves.append(data)
            return not is_plain(data) and children(data) is None

        return collect_object

    def collect_tensor(data: Any, leaves: list[Any]) -> bool:
        leaves.append(data)
        return is_plain(data) and data.dtype is tensor_spec.dtype and data.dim() == tensor_spec.dims

    return collect_tensor


def _dict_taker(keys: list[Any], takes: list[Take]) -> Take:
    def take(data: Any, leaves: list[Any]) -> bool:
        return (
            type(data) is dict
            and list(data) == keys
            and all(part(value, leaves) for part, value in zip(takes, data.values(), strict=True))
        )

    return take


def _sequence_taker(kind: type, takes: list[Take]) -> Take:
    def take(data: Any, leaves: list[Any]) -> bool:
        return (
            type(data) is kind
            and len(data) == len(takes)
            and all(part(value, leaves) for part, value in zip(takes, data, strict=True))
        )

    return take


def _container_taker(kind: type, keys: list[Any], takes: list[Take]) -> Take:
    def take(data: Any, leaves: list[Any]) -> bool:
        inside = children(data) if type(data) is kind else None
        return (
            inside is not None
            and [key for key, _ in inside] == keys
            and all(part(value, leaves) for part, (_, value) in zip(takes, inside, strict=True))
        )

    return take
