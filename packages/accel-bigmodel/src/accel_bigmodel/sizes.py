"""The bytes of a model, module by module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from accel_bigmodel.layers import class_names
from accel_bigmodel.placement import torch_dtype
from accel_ops.weights.sizes import dtype_byte_size
from accel_ops.weights.tensors import buffer_table, child_table, parameter_table
from accel_state.labels import CustomDtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor, nn

    from accel_bigmodel.layers import ByteCount

    ElementType = str | torch.dtype | CustomDtype


def compute_module_sizes(
    model: nn.Module,
    dtype: ElementType | None = None,
    special_dtypes: Mapping[str, ElementType] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Sum the bytes of every module of a model.

    Args:
        model: The model, on any device, the meta device too.
        dtype: The type that floating weights will have once loaded; otherwise the type they have.
        special_dtypes: Types of single tensors, by name; they come before `dtype`.
        buffers_only: Count buffers alone.

    Returns:
        Name of each module and tensor to its bytes, `""` for all. A tied tensor counts at its first name.

    Example:
        >>> from torch import nn
        >>> compute_module_sizes(nn.Linear(2, 3), dtype=torch.float16)
        {'': 18, 'weight': 12, 'bias': 6}
    """
    count = byte_count(dtype, special_dtypes)
    sizes: dict[str, int] = {}
    seen: set[int] = set()

    def add(module: nn.Module, name: str, prefix: str) -> int:
        sizes[name] = total = 0  # a parent's entry comes before those of its children
        for table in (parameter_table(module), buffer_table(module)):
            for leaf, tensor in table.items():
                skipped = buffers_only and table is not buffer_table(module)
                if tensor is None or skipped or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                sizes[prefix + leaf] = size = tensor.nbytes if count is None else count(prefix, leaf, tensor)
                total += size
        for leaf, child in child_table(module).items():
            if child is not None:
                total += add(child, prefix + leaf, f"{prefix}{leaf}.")
        sizes[name] = total
        return total

    add(model, "", "")
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: ElementType | None = None,
    special_dtypes: Mapping[str, ElementType] | None = None,
) -> int:
    """Sum the bytes of a model's buffers.

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
    """Sum the bytes of a module and of the modules that hold weights tied to its own.

    Args:
        tied_params: Names of the tied weights that lie outside the module.
        module_size: Bytes of the module itself.
        module_sizes: Bytes by name, from `compute_module_sizes`.
        modules_to_treat: The named modules in which the tied weights lie.

    Returns:
        The bytes, each tied weight counted once; the names of the modules that hold them; these modules.
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
        total -= module_sizes[weight]
    return total, names, [named[name] for name in names]


def byte_count(
    dtype: ElementType | None, special_dtypes: Mapping[str, ElementType] | None
) -> ByteCount | None:
    """Make the function that says how many bytes a tensor will take; `None` if those that it has."""
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


def streamed_count(
    count: ByteCount | None, dtype: ElementType | None, stored: Mapping[str, torch.dtype]
) -> ByteCount:
    """Make the function that says how many bytes a tensor takes that is read from a file and cast.

    Args:
        count: Bytes of tensors in the types that they are used in; `None` for those that they have.
        dtype: The type that floating tensors are used in; by default their own.
        stored: Types in the file, by name.
    """
    floating = None if isinstance(dtype, CustomDtype) else torch_dtype(dtype)

    def streamed(prefix: str, leaf: str, tensor: Tensor) -> int:
        used = tensor.nbytes if count is None else count(prefix, leaf, tensor)
        kind = stored.get(prefix + leaf)
        wanted = floating if floating is not None and tensor.is_floating_point() else tensor.dtype
        return used if kind is None or kind == wanted else used + tensor.numel() * kind.itemsize

    return streamed


def get_max_layer_size(
    modules: Iterable[tuple[str, nn.Module]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: str | Sequence[str] | None,
) -> tuple[int, list[str]]:
    """Find the bytes of the largest layer (no children, or a class that is not split), and all of that size.

    Args:
        modules: The named modules to look through, with everything below them.
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
    """Return a model's total bytes, and those of its largest layer with the layers of that size.

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
