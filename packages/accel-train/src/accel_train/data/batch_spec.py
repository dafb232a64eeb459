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
    """Where a leaf of a batch was: a tensor of some type, or any other object."""

    dtype: torch.dtype | None = None
    dims: int = 0


def is_plain(leaf: Any) -> bool:
    """Whether this is a tensor that travels as bytes: not sparse, nested, or with a meaning of its own."""
    return type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested


class BatchSpec:
    """Batches of one structure, element types and numbers of dimensions.

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
        return cls(recursively_apply(_dig, batch, test_type=lambda data: not is_dataclass_instance(data)))

    def take(self, batch: Any) -> list[Any] | None:
        """Return the leaves of a batch in order, or None if it does not fit."""
        leaves: list[Any] = []
        return leaves if self._take(batch, leaves) else None

    def build(self, leaves: Iterator[Any]) -> Any:
        """Make a batch of leaves."""
        return self._build(leaves)


def _dig(leaf: Any) -> TensorSpec:
    return TensorSpec(leaf.dtype, leaf.dim()) if is_plain(leaf) else TensorSpec()


def _compile(layout: Any, tensor_specs: list[TensorSpec]) -> tuple[Take, Build]:
    if type(layout) is TensorSpec:
        tensor_specs.append(layout)
        return _leaf_taker(layout), next
    inside = children(layout)
    if inside is None:
        raise TypeError(f"{layout!r} is neither a hole nor a container")
    keys = [key for key, _ in inside]
    parts = [_compile(value, tensor_specs) for _, value in inside]
    builds = [build for _, build in parts]
    values, build = _access(layout, keys, builds)

    def take(data: Any, leaves: list[Any]) -> bool:
        found = values(data)
        if found is None:
            return False
        return all(part(value, leaves) for (part, _), value in zip(parts, found, strict=True))

    return take, build


def _access(layout: Any, keys: list[Any], builds: list[Build]) -> tuple[Callable[[Any], Any], Build]:
    """Return what gives the values of a container, `None` of one that does not fit; and what builds one."""
    kind = type(layout)
    if kind is dict:
        return (
            lambda data: data.values() if type(data) is dict and list(data) == keys else None,
            lambda leaves: {key: build(leaves) for key, build in zip(keys, builds, strict=True)},
        )
    if kind is list or kind is tuple:
        return (
            lambda data: data if type(data) is kind and len(data) == len(builds) else None,
            lambda leaves: kind([build(leaves) for build in builds]),
        )

    def values(data: Any) -> list[Any] | None:
        inside = children(data) if type(data) is kind else None
        fits = inside is not None and [key for key, _ in inside] == keys
        return [value for _, value in inside or ()] if fits else None

    return values, lambda leaves: rebuild(layout, [build(leaves) for build in builds])


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
