"""How weights of transformers become those of megatron-core, and back: pure functions on tensors.

A packed weight is one in which tensor-parallel ranks split one dim evenly; megatron-core's own parameter is
the part of a rank with its leading dims flattened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from torch import Tensor

Pack: TypeAlias = Callable[[Sequence["Tensor"]], "Tensor"]
Unpack: TypeAlias = Callable[["Tensor"], Sequence["Tensor"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How the weights of transformers that make one parameter of megatron-core are packed and split.

    Args:
        pack: Makes the packed weight from those of transformers.
        unpack: Undoes it.
        dim: Dim of the packed weight that tensor-parallel ranks split; `None` if each has all of it.
        leading: Leading dims of a rank's part of the packed weight, -1 for the one that is split, where the
            parameter has one dim for all of them.
    """

    pack: Pack
    unpack: Unpack
    dim: int | None = None
    leading: tuple[int, ...] = ()

    def shard(self, packed: Tensor, rank: int, size: int) -> Tensor:
        """Return the parameter of one tensor-parallel rank."""
        if self.dim == 0:  # ranks may be more than leading rows: key-value heads are split between some
            packed = self._flat(packed)
        if self.dim is not None:
            packed = _padded(packed, self.dim, size).chunk(size, dim=self.dim)[rank]
        return packed if self.dim == 0 else self._flat(packed)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the packed weight from the parameters of all tensor-parallel ranks."""
        if self.dim == 0:
            return self._shaped(torch.cat([*shards]))
        parts = [self._shaped(one) for one in shards]
        return parts[0] if self.dim is None else torch.cat(parts, dim=self.dim)

    def joined_shape(self, own: torch.Size, size: int) -> torch.Size:
        """Return the shape of the packed weight."""
        part = torch.empty(own, device="meta")
        return self.join([part] * (1 if self.dim is None else size)).shape

    def _flat(self, packed: Tensor) -> Tensor:
        return packed.reshape(-1, *packed.shape[len(self.leading) :]) if self.leading else packed

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.reshape(*self.leading, *flat.shape[1:]) if self.leading else flat


def same(dim: int | None = None) -> Packing:
    """Return the packing of a weight that is the same in both libraries.

    Example:
        >>> same(0).shard(torch.arange(4), 1, 2)
        tensor([2, 3])
    """
    return Packing(pack=lambda tensors: tensors[0], unpack=lambda packed: [packed], dim=dim)


def vocabulary(rows: int) -> Packing:
    """Return the packing of an embedding or output layer, padded with rows of zeros until ranks can split it.

    Example:
        >>> vocabulary(3).shard(torch.ones(3), 1, 2)
        tensor([1., 0.])
    """
    return Packing(pack=lambda tensors: tensors[0], unpack=lambda packed: [packed[:rows]], dim=0)


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    missing = -tensor.shape[dim] % size
    if not missing:
        return tensor
    return torch.nn.functional.pad(tensor, [0, 0] * (tensor.ndim - 1 - dim) + [0, missing])


def transposed(dim: int) -> Packing:
    """Return the packing of a weight that one of the two libraries has transposed, as `Conv1D` does."""
    return Packing(pack=lambda tensors: tensors[0].T, unpack=lambda packed: [packed.T], dim=dim)


def gated() -> Packing:
    """Return the packing of the gate and up projections, whose parts every rank has one after another."""
    return Packing(
        pack=lambda tensors: torch.stack([*tensors]), unpack=lambda packed: [*packed], dim=1, leading=(2, -1)
    )


def attention(heads: int, groups: int, size: int) -> Packing:
    """Return the packing of query, key and value projections: by groups, queries before their key and value.

    Example:
        >>> tensors = torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6]), torch.tensor([7, 8])
        >>> packed = attention(2, 1, 2).pack(tensors)
        >>> packed.tolist()
        [[[1, 2], [3, 4], [5, 6], [7, 8]]]
    """
    queries = heads // groups

    def pack(tensors: Sequence[Tensor]) -> Tensor:
        parts = [
            one.reshape(groups, number, size, *one.shape[1:])
            for one, number in zip(tensors, (queries, 1, 1), strict=True)
        ]
        return torch.cat(parts, dim=1)

    def unpack(packed: Tensor) -> list[Tensor]:
        parts = packed.split([queries, 1, 1], dim=1)
        return [part.reshape(-1, *part.shape[3:]) for part in parts]

    return Packing(pack=pack, unpack=unpack, dim=0, leading=(-1, queries + 2, size))


def keys_values(heads: int, size: int) -> Packing:
    """Return the packing of key and value projections of cross-attention: by heads, keys before values.

    Example:
        >>> keys_values(2, 1).pack([torch.tensor([1, 2]), torch.tensor([3, 4])]).tolist()
        [[[1], [3]], [[2], [4]]]
    """

    def pack(tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([one.reshape(heads, size, *one.shape[1:]) for one in tensors], dim=1)

    def unpack(packed: Tensor) -> list[Tensor]:
        return [part.flatten(0, 1) for part in packed.unbind(1)]

    return Packing(pack=pack, unpack=unpack, dim=0, leading=(-1, 2, size))


def attention_in_one(heads: int, size: int, *, transpose: bool) -> Packing:
    """Return the packing of projections in one weight of transformers: queries, then keys, then values."""
    separate = attention(heads, heads, size)

    def pack(tensors: Sequence[Tensor]) -> Tensor:
        full = tensors[0].T if transpose else tensors[0]
        return separate.pack(full.chunk(3))

    def unpack(packed: Tensor) -> list[Tensor]:
        full = torch.cat([*separate.unpack(packed)])
        return [full.T if transpose else full]

    return Packing(pack=pack, unpack=unpack, dim=0, leading=separate.leading)
