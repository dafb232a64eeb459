"""Tensors of a module by name, their storages and ties: `named_module_tensors`, `find_tied_parameters`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeGuard

from accel_state.device_kinds import WITHOUT_STORAGE

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's parameters, then its buffers, by name.

    Args:
        module: The module.
        include_buffers: Whether buffers are included.
        recurse: Whether submodules are visited.
        remove_non_persistent: Skip buffers that are not in the state dict.

    Example:
        >>> from torch import nn
        >>> [name for name, _ in named_module_tensors(nn.Linear(2, 3))]
        ['weight', 'bias']
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    absent = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set[str]()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in absent:
            yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Name the buffers that `module.state_dict()` leaves out.

    Args:
        module: The module.
        recurse: Whether submodules are visited.
        fqns: Whether names of submodules' buffers have their dotted prefix.

    Example:
        >>> import torch
        >>> module = torch.nn.Module()
        >>> module.register_buffer("cache", torch.zeros(1), persistent=False)
        >>> get_non_persistent_buffers(module)
        {'cache'}
    """
    modules = module.named_modules(remove_duplicate=False) if recurse else [("", module)]
    return {
        f"{prefix}.{name}" if fqns and prefix else name
        for prefix, submodule in modules
        for name in submodule._non_persistent_buffers_set
    }


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Identify the memory behind a tensor: device, address, bytes. Equal for views of one storage.

    Example:
        >>> import torch
        >>> base = torch.zeros(4)
        >>> id_tensor_storage(base[:2]) == id_tensor_storage(base[2:])
        True
    """
    storage = tensor.untyped_storage()
    if tensor.device.type in WITHOUT_STORAGE:
        return tensor.device, storage._cdata, storage.nbytes()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def is_dense(value: Any) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor with a storage, unlike sparse tensors."""
    torch = import_module("torch")
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def tensor_memory(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with the same storage, offset, shape and strides."""
    return id_tensor_storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Find the parameters that a model has under several names.

    Args:
        model: The model, on any device, including the meta device.
        **kwargs: Not supported; part of the documented signature.

    Raises:
        TypeError: A keyword argument was passed.

    Example:
        >>> from torch import nn
        >>> model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        >>> model.b.weight = model.a.weight
        >>> find_tied_parameters(model)
        [['a.weight', 'b.weight']]
    """
    if kwargs:
        raise TypeError(f"find_tied_parameters takes the model alone, not {', '.join(sorted(kwargs))}")
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def retie_parameters(model: nn.Module, tied_params: Iterable[Iterable[str]]) -> None:
    """Assign one tensor to every name of a group again.

    It uses the first tensor of the group that is not on the meta device: a meta tensor never replaces a
    loaded one.

    Example:
        >>> from torch import nn
        >>> model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        >>> retie_parameters(model, [["a.weight", "b.weight"]])
        >>> model.a.weight is model.b.weight
        True
    """
    for group in tied_params:
        owners: list[tuple[dict[str, Any], str]] = []
        for name in group:
            prefix, _, leaf = name.rpartition(".")
            module = model.get_submodule(prefix)
            table = module._parameters
            owners.append((table if leaf in table else module._buffers, leaf))
        tensors = [table.get(leaf) for table, leaf in owners]
        loaded = next((tensor for tensor in tensors if tensor is not None and not tensor.is_meta), None)
        if loaded is not None:
            for table, leaf in owners:
                table[leaf] = loaded


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether the model's configuration requests tied input and output embeddings.

    Args:
        model: Any module; without a transformers-like `config` the result is False.

    Example:
        >>> from torch import nn
        >>> check_tied_parameters_in_config(nn.Linear(2, 2))
        False
    """
    config = getattr(model, "config", None)
    inner = getattr(config, "decoder", config) if getattr(config, "is_encoder_decoder", False) else config
    output = getattr(model, "get_output_embeddings", None)
    is_tied = getattr(config, "tie_word_embeddings", False) or getattr(inner, "tie_word_embeddings", False)
    return bool(is_tied and callable(output) and output() is not None)
