"""A model as columns of plain data: the layers that are never split, and the modules above them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from accel_ops.weights.tensors import tables_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    ByteCount = Callable[[str, str, Tensor], int]
    """Bytes of a tensor by the prefix of its module (with a trailing dot), its own name there, and itself."""
    _Table = tuple[str, Mapping[str, Tensor | None], int]
    """Tensors of one module: the prefix of their names, themselves, and 1 for buffers."""

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules of these classes, and those above them, are no blocks that are streamed: their children are."""


def class_names(classes: str | Iterable[str] | None) -> frozenset[str]:
    """Read the documented argument: one class name, several, or none.

    Example:
        >>> class_names("Block") == class_names(["Block"])
        True
    """
    return frozenset([classes] if isinstance(classes, str) else classes or ())


@dataclass(slots=True)
class Layers:
    """The layers of a model in order of registration, as columns; tensors beside children come before them.

    A layer is a module of a class that stays whole, a module without children, or a tensor beside children.

    Attributes:
        names: Full names.
        sizes: Bytes, each tied tensor counted in the first layer that has it.
        totals: Bytes with tied tensors: what running a layer alone takes.
        buffers: How many of `sizes` belong to buffers.
        blocks: Bytes of the largest module that begins with a layer and is streamed as one block, or that is
            in it: a module without containers below it.
        ties: Pairs of layers that share a tensor.
        modules: The modules above the layers, in preorder: name, first layer, end of layers, index of the
            next module that is not below.
    """

    names: list[str] = field(default_factory=list[str])
    sizes: list[int] = field(default_factory=list[int])
    totals: list[int] = field(default_factory=list[int])
    buffers: list[int] = field(default_factory=list[int])
    blocks: list[int] = field(default_factory=list[int])
    ties: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    modules: list[tuple[str, int, int, int]] = field(default_factory=list[tuple[str, int, int, int]])


def read_layers(model: nn.Module, unsplit: frozenset[str], count: ByteCount | None) -> Layers:
    """Read a model once, in time linear in its modules and tensors."""
    reader = _Reader(unsplit, count)
    reader.visit(model, "", "")
    return reader.layers


class _Reader:
    """The one pass; written for speed, since models of 200,000 tensors come by."""

    def __init__(self, unsplit: frozenset[str], count: ByteCount | None) -> None:
        self.layers = Layers()
        self._unsplit = unsplit
        self._count = count
        self._owner: dict[int, int] = {}
        self._total = 0
        self._has_containers = False

    def visit(self, module: nn.Module, name: str, prefix: str) -> bool:
        """Read a module; return whether there are containers with tensors in it, so that it is no block."""
        parameters, buffers, children = tables_of(module)
        if not children:
            self._add_layer(name, ((prefix, parameters, 0), (prefix, buffers, 1)))
            return False
        layers = self.layers
        if type(module).__name__ in self._unsplit:
            self._has_containers = False
            self._add_layer(name, self._tables_below(module, prefix))
            if self._has_containers:
                layers.blocks[-1] = self._block_below(module, prefix)[1]
            return self._has_containers
        index, first, before = len(layers.modules), len(layers.names), self._total
        layers.modules.append((name, 0, 0, 0))
        for is_buffer, table in enumerate((parameters, buffers)):
            for leaf, tensor in table.items():
                if tensor is not None:
                    self._add_layer(prefix + leaf, [(prefix, {leaf: tensor}, is_buffer)])
        has_containers = isinstance(module, CONTAINERS)
        for leaf, child in children.items():
            if child is not None:
                path = prefix + leaf
                has_containers |= self.visit(child, path, path + ".")
        total = self._total - before
        if total and not has_containers:
            layers.blocks[first] = max(layers.blocks[first], total)
        layers.modules[index] = (name, first, len(layers.names), len(layers.modules))
        return has_containers and total > 0

    def _add_layer(self, name: str, tables: Iterable[_Table]) -> None:
        layers, owners, count = self.layers, self._owner, self._count
        layer = len(layers.names)
        size = total = buffers = 0
        for prefix, table, is_buffer in tables:
            for leaf, tensor in table.items():
                if tensor is None:
                    continue
                identity = id(tensor)
                owner = owners.get(identity)
                if owner == layer:
                    continue
                taken = tensor.nbytes if count is None else count(prefix, leaf, tensor)
                total += taken
                if owner is None:
                    owners[identity] = layer
                    size += taken
                    if is_buffer:
                        buffers += taken
                else:
                    layers.ties.append((owner, layer))
        layers.names.append(name)
        layers.sizes.append(size)
        layers.totals.append(total)
        layers.buffers.append(buffers)
        layers.blocks.append(total)
        self._total += total

    def _tables_below(self, module: nn.Module, prefix: str) -> Iterator[_Table]:
        """The tables of tensors of a module and of all below it."""
        parameters, buffers, children = tables_of(module)
        self._has_containers |= isinstance(module, CONTAINERS)
        yield prefix, parameters, 0
        yield prefix, buffers, 1
        for leaf, child in children.items():
            if child is not None:
                yield from self._tables_below(child, f"{prefix}{leaf}.")

    def _block_below(self, module: nn.Module, prefix: str) -> tuple[int, int, bool]:
        """Return the bytes of a module, those of the largest block in it, and whether it has containers."""
        parameters, buffers, children = tables_of(module)
        tensors = ((leaf, tensor) for table in (parameters, buffers) for leaf, tensor in table.items())
        count = self._count
        total = sum(
            tensor.nbytes if count is None else count(prefix, leaf, tensor)
            for leaf, tensor in tensors
            if tensor is not None
        )
        largest, has_containers = 0, isinstance(module, CONTAINERS)
        for leaf, child in children.items():
            if child is not None:
                size, inside, split = self._block_below(child, f"{prefix}{leaf}.")
                total, largest, has_containers = total + size, max(largest, inside), has_containers or split
        return total, largest if has_containers else total, has_containers and total > 0
