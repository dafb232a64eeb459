"""A model as columns of plain data: the layers that are never split, and the modules above them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accel_ops.weights.tensors import tables_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor, nn

    ByteCount = Callable[[str, str, Tensor], int]
    """Bytes of a tensor by the prefix of its module (with a trailing dot), its own name there, and itself."""
    _Table = tuple[str, Mapping[str, Tensor | None], int]
    """Tensors of one module: the prefix of their names, themselves, and 1 for buffers."""


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
        ties: Pairs of layers that share a tensor.
        modules: The modules above the layers, in preorder: name, first layer, end of layers, index of the
            next module that is not below.
    """

    names: list[str] = field(default_factory=list[str])
    sizes: list[int] = field(default_factory=list[int])
    totals: list[int] = field(default_factory=list[int])
    buffers: list[int] = field(default_factory=list[int])
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

    def visit(self, module: nn.Module, name: str, prefix: str) -> None:
        parameters, buffers, children = tables_of(module)
        if not children:
            self._add_layer(name, ((prefix, parameters, 0), (prefix, buffers, 1)))
            return
        if type(module).__name__ in self._unsplit:
            self._add_layer(name, _tables_below(module, prefix))
            return
        layers = self.layers
        index, first = len(layers.modules), len(layers.names)
        layers.modules.append((name, 0, 0, 0))
        for is_buffer, table in enumerate((parameters, buffers)):
            for leaf, tensor in table.items():
                if tensor is not None:
                    self._add_layer(prefix + leaf, [(prefix, {leaf: tensor}, is_buffer)])
        for leaf, child in children.items():
            if child is not None:
                path = prefix + leaf
                self.visit(child, path, path + ".")
        layers.modules[index] = (name, first, len(layers.names), len(layers.modules))

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


def _tables_below(module: nn.Module, prefix: str) -> Iterator[_Table]:
    """The tables of tensors of a module and of all below it."""
    parameters, buffers, children = tables_of(module)
    yield prefix, parameters, 0
    yield prefix, buffers, 1
    for leaf, child in children.items():
        if child is not None:
            yield from _tables_below(child, f"{prefix}{leaf}.")
