"""Place one tensor of a module on a device, with a value and a dtype; tied tensors stay tied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_ops.weights.tensors import get_non_persistent_buffers
from accel_state.errors import CheckpointError, some_of

if TYPE_CHECKING:
    TiedMap = MutableMapping[int, MutableMapping[torch.device, Tensor]]

_HOST = ("cpu", "meta")


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: TiedMap | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Set a parameter or buffer of a module to a device, value and dtype.

    `param.to(device)` returns a new tensor; this function replaces the module's tensor. A value that already
    has the device and dtype is used without a copy.

    Args:
        module: The module that holds the tensor, at any depth.
        tensor_name: Its dotted name.
        device: The target device.
        value: The new value; required if the tensor is on the meta device.
        dtype: Cast floating-point values to this dtype; by default to the current dtype of the tensor.
        fp16_statistics: The row statistics of an int8 weight, stored as `weight.SCB`.
        tied_params_map: Address of a tensor to its existing copies by device: a tied weight is copied once
            per device.
        non_blocking: Copy from pinned memory asynchronously.
        clear_cache: Release cached memory of the accelerator that the tensor leaves.

    Raises:
        CheckpointError: The value's shape is not the tensor's.
        ValueError: The tensor does not exist, or it is on the meta device and `value` is missing.

    Example:
        >>> from torch import nn
        >>> layer = nn.Linear(2, 2, device="meta")
        >>> set_module_tensor_to_device(layer, "weight", "cpu", value=torch.eye(2))
        >>> layer.weight.device
        device(type='cpu')
    """
    owner, leaf = owner_of(module, tensor_name)
    parameters, buffers = owner._parameters, owner._buffers
    old = parameters[leaf] if leaf in parameters else buffers[leaf]
    if old is None and value is None:
        return
    # Checked before the device, which may be missing. Quantised classes change their shape when they load.
    is_plain = type(old) in (nn.Parameter, OffloadedParameter, torch.Tensor)
    if value is not None and old is not None and is_plain and old.shape != value.shape:
        raise CheckpointError(
            f'Trying to set a tensor of shape {value.shape} in "{tensor_name}" (which has shape '
            f"{old.shape}), this looks incorrect."
        )
    target = torch.device(device)
    if value is None and old is not None and old.is_meta and target.type != "meta":
        raise ValueError(f"{tensor_name!r} is on the meta device: it needs a `value` to be put on {target}")
    source: Tensor = value if value is not None else old  # pyright: ignore[reportAssignmentType] - one is there
    new = None
    if tied_params_map and not source.is_meta:
        new = tied_params_map.get(source.data_ptr(), {}).get(target)
    if new is None:
        wanted = torch_dtype(dtype)
        if value is not None and dtype is None:
            wanted = None if old is None else old.dtype
        elif value is not None and not value.is_floating_point():
            wanted = None
        new = source.to(device=target, dtype=wanted, non_blocking=non_blocking)
        if new.device == source.device and new.dtype == source.dtype:
            # `to` of bitsandbytes' 8-bit weight returns another, without the scales that its layer took over.
            new = source
        if tied_params_map is not None and source.data_ptr() in tied_params_map:
            tied_params_map[source.data_ptr()][target] = new
    if leaf in parameters:
        parameters[leaf] = as_parameter(new, old)
    else:
        buffers[leaf] = new
    if fp16_statistics is not None:
        held: Any = parameters[leaf]
        held.SCB = fp16_statistics.to(target)
    if clear_cache and old is not None and old.device.type not in _HOST and old.device != target:
        torch.accelerator.empty_cache()


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Map every name of every parameter and persistent buffer of a model to its tensor.

    Example:
        >>> sorted(model_tensors(nn.Sequential(nn.Linear(1, 1))))
        ['0.bias', '0.weight']
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    passing = get_non_persistent_buffers(model, recurse=True, fqns=True)
    buffers = model.named_buffers(remove_duplicate=False)
    return tensors | {name: buffer for name, buffer in buffers if name not in passing}


def shared_names(model: nn.Module) -> list[list[str]]:
    """Group the names of tensors that have several: of tied weights, and of modules with several names."""
    names: dict[int, list[str]] = {}
    for name, tensor in model_tensors(model).items():
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def owner_of(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """Find the module that holds a tensor directly, and the tensor's name there.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> owner_of(model, "0.bias") == (model[0], "bias")
        True
    """
    prefix, _, leaf = tensor_name.rpartition(".")
    try:
        owner = module.get_submodule(prefix)
    except AttributeError as error:
        raise ValueError(f"{type(module).__name__} has no submodule {prefix!r}") from error
    if leaf not in owner._parameters and leaf not in owner._buffers:
        known = some_of([*owner._parameters, *owner._buffers]) or "none"
        raise ValueError(
            f"{type(owner).__name__} has no parameter or buffer named {tensor_name!r}; it has {known}"
        )
    return owner, leaf


def as_parameter(tensor: Tensor, like: Tensor | None) -> nn.Parameter:
    """Wrap a tensor as a parameter with class, attributes and `requires_grad` of the one it replaces."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    if like is None or type(like) in (nn.Parameter, OffloadedParameter, torch.Tensor):
        wanted = like is not None and like.requires_grad
        # Integers cannot require gradients, even if the meta model's parameter does.
        can_require = tensor.is_floating_point() or tensor.is_complex()
        new = nn.Parameter(tensor, requires_grad=wanted and can_require)
        if like is not None and vars(like):
            vars(new).update({key: value for key, value in vars(like).items() if key != "offloaded_name"})
        return new
    rebuild: Any = type(like)
    return rebuild(tensor, requires_grad=like.requires_grad, **vars(like))


class _WithoutValues:
    """Meta tensors of offloaded weights: operations that compute with them raise an error.

    Beside tensors with values, operations of torch return uninitialised memory for a meta tensor, or an error
    that does not name it.
    """

    offloaded_name: str
    """Name and module of the weight, for messages."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation on meta tensors alone.

        Raises:
            NotImplementedError: It reads values, or writes them.
        """
        del cls
        kwargs = kwargs or {}
        nested = (part if isinstance(part, (list, tuple)) else (part,) for part in (*args, *kwargs.values()))
        tensors = [leaf for leaf in chain.from_iterable(nested) if isinstance(leaf, Tensor)]
        offloaded = [leaf for leaf in tensors if isinstance(leaf, _WithoutValues)]
        name = vars(offloaded[0]).get("offloaded_name", "a weight") if offloaded else "a weight"
        # `weight_norm` computes the weight from parameters before the hooks of the forward.
        computes = func.__name__ == "_weight_norm" or any(
            not isinstance(leaf, _WithoutValues) and not leaf.is_meta for leaf in tensors
        )
        if computes and func is Tensor.copy_:
            raise NotImplementedError(
                f"{name} is offloaded, and copying into it has no effect. Assign a new parameter instead, or "
                "copy within align_module_device(module)"
            )
        if computes and func not in _SHAPES:
            raise NotImplementedError(
                f"{name} is offloaded, and {func.__name__} uses it outside of the forward of that module. "
                "Give the module whose forward uses it one entry in the device_map, or add its class to "
                "preload_module_classes"
            )
        result = nn.Parameter.__torch_function__(func, types, args, kwargs)
        if type(result) is Tensor and result.is_meta and func not in _PLAIN:
            result = result.as_subclass(_OffloadedView)
            vars(result)["offloaded_name"] = name
        return result


class OffloadedParameter(_WithoutValues, nn.Parameter):
    """The parameter of a module between its forwards, for which a hook loads the values."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _restore_offloaded, (self.data, self.requires_grad, vars(self))


def _restore_offloaded(
    data: Tensor, requires_grad: bool, attributes: Mapping[str, Any]
) -> OffloadedParameter:
    parameter = OffloadedParameter(data, requires_grad)
    vars(parameter).update(attributes)
    return parameter


class _OffloadedView(_WithoutValues, Tensor):
    """What a program makes of it, such as its transpose."""


_SHAPES = {Tensor.view_as, Tensor.expand_as, Tensor.reshape_as, Tensor.is_same_size, torch.result_type}
"""Operations that read no values of their other tensors."""

_DATA: Any = Tensor.data
_PLAIN = {_DATA.__get__, Tensor.detach, Tensor.clone}
"""Operations whose result is saved or copied."""


def torch_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return a dtype that may be passed as text, `"float16"` or `"torch.float16"`.

    Example:
        >>> torch_dtype("torch.bfloat16"), torch_dtype(None)
        (torch.bfloat16, None)
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    kind = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r} is not a torch dtype: use for example 'float16' or torch.float16")
    return kind


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return whether two devices are the same; a device without an index is the first of its type.

    Example:
        >>> check_device_same(torch.device("cuda"), torch.device("cuda:0"))
        True
    """
    if first_device.type != second_device.type:
        return False
    return first_device.type == "cpu" or (first_device.index or 0) == (second_device.index or 0)
