"""Memory of a model in bytes: its layers and modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from accel_bigmodel.placement import torch_dtype
from accel_ops.weights.layout import dtype_byte_size
from accel_state.labels import CustomDtype

if TYPE_CHECKING:
    # Bytes of a tensor, from the prefix of its module (with a trailing dot), its name there, and the tensor.
    ByteCount = Callable[[str, str, Tensor], int]
    ElementType = str | torch.dtype | CustomDtype

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules of these classes and their ancestors are not offloaded as one block: their children are."""


def class_names(classes: str | Iterable[str] | None) -> frozenset[str]:
    """Normalise an argument that is one class name, several, or none.

    Example:
        >>> class_names("Block") == class_names(["Block"])
        True
    """
    return frozenset([classes] if isinstance(classes, str) else classes or ())


@dataclass(slots=True)
class Layers:
    """The layers of a model in registration order, as columns; a module's tensors precede its children.

    A layer is a module of an unsplit class, a module without children, or a direct tensor of another module.

    Attributes:
        names: Full names.
        sizes: Bytes; each tied tensor counts in the first layer that has it.
        totals: Bytes with tied tensors, as needed to run a layer on its own.
        buffers: The bytes of buffers among `sizes`.
        blocks: Bytes of the largest offloaded block (a module without containers) that begins with a layer or
            is inside of it.
        ties: Pairs of layers that share a tensor.
        modules: The ancestors of layers, in preorder: name, first layer, end of layers, index of the next
            module that is not a descendant.
    """

    names: list[str] = field(default_factory=list[str])
    sizes: list[int] = field(default_factory=list[int])
    totals: list[int] = field(default_factory=list[int])
    buffers: list[int] = field(default_factory=list[int])
    blocks: list[int] = field(default_factory=list[int])
    ties: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    modules: list[tuple[str, int, int, int]] = field(default_factory=list[tuple[str, int, int, int]])


def read_layers(model: nn.Module, unsplit: frozenset[str], count: ByteCount | None) -> Layers:
    """Collect the layers of a model in time linear in its modules and tensors."""
    reader = _Reader(unsplit, count)
    reader.visit(model, "", "")
    return reader.layers


class _Reader:
    """Collects layers in one traversal; written for speed, since models may have 200,000 tensors."""

    def __init__(self, unsplit: frozenset[str], count: ByteCount | None) -> None:
        self.layers = Layers()
        self._unsplit = unsplit
        self._count = count
        self._owner: dict[int, int] = {}

    def visit(self, module: nn.Module, name: str, prefix: str, inside: int = -1) -> tuple[int, int, bool]:
        """Read a module, whose tensors belong to the layer `inside` if there is one.

        Returns:
            Its bytes, those of the largest block in it, and whether it has containers with tensors, so that
            it is not a block itself.
        """
        parameters, buffers, children = module._parameters, module._buffers, module._modules
        layers = self.layers
        if inside >= 0 or not children or type(module).__name__ in self._unsplit:
            layer = inside if inside >= 0 else len(layers.names)
            total = self._read(layer, name, prefix, (parameters, buffers))
            if not children:
                return total, total, False
            largest, has_containers = 0, isinstance(module, CONTAINERS)
            for leaf, child in children.items():
                if child is not None:
                    size, block, is_split = self.visit(child, "", f"{prefix}{leaf}.", layer)
                    total, largest = total + size, max(largest, block)
                    has_containers = has_containers or is_split
            has_containers = has_containers and total > 0
            block = largest if has_containers else total
            if inside < 0:
                layers.blocks[layer] = block
            return total, block, has_containers
        index, first, total = len(layers.modules), len(layers.names), 0
        layers.modules.append((name, 0, 0, 0))
        for position, table in enumerate((parameters, buffers)):
            for leaf, tensor in table.items():
                if tensor is not None:
                    tables = ({}, {leaf: tensor}) if position else ({leaf: tensor}, {})
                    total += self._read(len(layers.names), prefix + leaf, prefix, tables)
        has_containers = isinstance(module, CONTAINERS)
        for leaf, child in children.items():
            if child is not None:
                path = prefix + leaf
                size, _, is_split = self.visit(child, path, path + ".")
                total, has_containers = total + size, has_containers or is_split
        if total and not has_containers:
            layers.blocks[first] = max(layers.blocks[first], total)
        layers.modules[index] = (name, first, len(layers.names), len(layers.modules))
        return total, 0, has_containers and total > 0

    def _read(
        self, layer: int, name: str, prefix: str, tables: tuple[Mapping[str, Tensor | None], ...]
    ) -> int:
        """Count parameters and buffers of a module in a layer, which is added with its name if it is new.

        Returns:
            The bytes of those that the layer did not have.
        """
        layers, owners, count = self.layers, self._owner, self._count
        size = total = before = 0
        for table in tables:
            before = size
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
                else:
                    layers.ties.append((owner, layer))
        buffers = size - before  # the last table has them
        if layer == len(layers.names):
            layers.names.append(name)
            layers.sizes.append(size)
            layers.totals.append(total)
            layers.buffers.append(buffers)
            layers.blocks.append(total)
        else:
            layers.sizes[layer] += size
            layers.totals[layer] += total
            layers.buffers[layer] += buffers
        return total


def compute_module_sizes(
    model: nn.Module,
    dtype: ElementType | None = None,
    special_dtypes: Mapping[str, ElementType] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Compute the size in bytes of every module and tensor of a model.

    Args:
        model: The model, on any device, including the meta device.
        dtype: The dtype of floating-point weights once loaded; by default their current dtype.
        special_dtypes: Dtypes of individual tensors, by name; they take precedence over `dtype`.
        buffers_only: Count only buffers.

    Returns:
        Bytes by name of each module and tensor; `""` is the model. A tied tensor counts at its first name.

    Example:
        >>> from torch import nn
        >>> compute_module_sizes(nn.Linear(2, 3), dtype=torch.float16)
        {'': 18, 'weight': 12, 'bias': 6}
    """
    count = byte_count(dtype, special_dtypes)
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        sizes[name] = total = 0
        for table in (module._parameters, module._buffers):
            for leaf, tensor in table.items():
                skipped = buffers_only and table is not module._buffers
                if tensor is None or skipped or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                sizes[prefix + leaf] = size = tensor.nbytes if count is None else count(prefix, leaf, tensor)
                total += size
        sizes[name] = total
        above = name
        while above:
            above = above.rpartition(".")[0]
            sizes[above] += total
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: ElementType | None = None,
    special_dtypes: Mapping[str, ElementType] | None = None,
) -> int:
    """Compute the size in bytes of all buffers of a model.

    Example:
        >>> from torch import nn
        >>> compute_module_total_buffer_size(nn.BatchNorm1d(3))
        32
    """
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_module_size_with_ties(
    tied_params: Iterable[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, nn.Module]],
) -> tuple[int, list[str], list[nn.Module]]:
    """Compute the size in bytes of a module together with the modules that hold weights tied to it.

    Args:
        tied_params: Names of the tied weights outside of the module.
        module_size: Bytes of the module.
        module_sizes: Bytes by name, from `compute_module_sizes`.
        modules_to_treat: The named modules that contain the tied weights.

    Returns:
        The bytes, with each tied weight counted once; the names of the modules that hold them; these modules.
    """
    named = dict(modules_to_treat)
    total, names = module_size, list[str]()
    for weight in tied_params:
        name = next((name for name in named if weight == name or weight.startswith(f"{name}.")), None)
        if name is None:
            continue
        if name not in names:
            names.append(name)
            total += module_sizes[name]
        total -= module_sizes.get(weight, 0)  # 0 if another name has counted it
    return total, names, [named[name] for name in names]


def byte_count(
    dtype: ElementType | None, special_dtypes: Mapping[str, ElementType] | None
) -> ByteCount | None:
    """Create a function that returns the bytes of a tensor once loaded; `None` if its dtype stays."""
    if dtype is None and not special_dtypes:
        return None
    width = None if dtype is None else _width(dtype)
    special = {name: _width(kind) for name, kind in (special_dtypes or {}).items()}

    def count(prefix: str, leaf: str, tensor: Tensor) -> int:
        if prefix + leaf in special:
            return -int(-tensor.numel() * special[prefix + leaf] // 1)
        if width is None or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor.numel() * tensor.itemsize
        return -int(-tensor.numel() * width // 1)

    return count


def get_max_layer_size(
    modules: Iterable[tuple[str, nn.Module]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: str | Sequence[str] | None,
) -> tuple[int, list[str]]:
    """Return the size of the largest layer (no children, or an unsplit class), and the layers of that size.

    Args:
        modules: The named modules to search, with their descendants.
        module_sizes: Bytes by name, from `compute_module_sizes`.
        no_split_module_classes: Names of classes that count as one layer.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(4, 4))
        >>> get_max_layer_size(list(model.named_children()), compute_module_sizes(model), [])
        (80, ['1'])
    """
    unsplit = class_names(no_split_module_classes)
    largest, names = 0, list[str]()
    for name, module in modules:
        for path in _layers(name, module, unsplit):
            size = module_sizes.get(path, 0)
            if size > largest:
                largest, names = size, [path]
            elif size == largest:
                names.append(path)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of a model, and the bytes of its largest layer with the layers of that size.

    Example:
        >>> from torch import nn
        >>> calculate_maximum_sizes(nn.Sequential(nn.Linear(2, 2)))
        (24, (24, ['0']))
    """
    sizes = compute_module_sizes(model)
    unsplit = class_names(getattr(model, "_no_split_modules", None))
    return sizes[""], get_max_layer_size(list(model.named_children()), sizes, sorted(unsplit))


def _width(dtype: ElementType) -> float:
    if isinstance(dtype, CustomDtype):
        return dtype_byte_size(dtype)
    if isinstance(dtype, str) and dtype in {kind.value for kind in CustomDtype}:
        return dtype_byte_size(CustomDtype(dtype))
    return (torch_dtype(dtype) or torch.float32).itemsize


def _layers(name: str, module: nn.Module, unsplit: frozenset[str]) -> Iterable[str]:
    children = list(module.named_children())
    if not children or type(module).__name__ in unsplit:
        yield name
        return
    for child_name, child in children:
        yield from _layers(f"{name}.{child_name}" if name else child_name, child, unsplit)
