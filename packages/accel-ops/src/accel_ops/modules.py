"""Wrap and unwrap models: distributed wrappers, compilers, replaced forward methods."""

from __future__ import annotations

import sys
from functools import singledispatch
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch.nn.parallel import DataParallel, DistributedDataParallel

from accel_ops.dtensors import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

M = TypeVar("M", bound="nn.Module")

_ORIGINAL = "_original_forward"


def extract_model_from_parallel(
    model: M,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> M:
    """Return a model without its distributed wrappers.

    Args:
        model: The model, wrapped or not; it stays usable as it is.
        keep_fp32_wrapper: Keep the mixed precision that was put around its `forward`. Without it the
            model itself, the wrapped one included, computes as it did before.
        keep_torch_compile: Return a compiled model compiled again, else the model inside. What was compiled
            in place, as regions are, has nothing around it and stays so.
        recursive: Also replace, in place, every module that has a child `module` by that child, at any
            depth.

    Example:
        >>> import torch
        >>> inner = torch.nn.Linear(1, 1)
        >>> extract_model_from_parallel(torch.nn.DataParallel(inner)) is inner
        True
    """
    innermost: nn.Module = model
    compiled: Any = None
    while (inside := _inside(innermost)) is not None:
        if is_compiled_module(innermost):
            compiled = innermost
        innermost = inside
    core = _unwrap_children(innermost) if recursive else innermost
    if not keep_fp32_wrapper:
        restore_forward(core)
    if compiled is not None and keep_torch_compile:
        if _inside(compiled) is not core:
            # The compiled wrapper that was given must stay around what it is around.
            compiled = type(compiled)(core, compiled.dynamo_ctx)
        core = compiled
    return cast("M", core)  # wrappers are typed as what they wrap


@singledispatch
def unwrap_once(model: nn.Module) -> nn.Module | None:
    """Return the module that a distributed wrapper holds, `None` if a module is no such wrapper.

    A strategy that wraps models registers the type of its wrapper: `unwrap_once.register(Wrapper, …)`.
    """
    del model
    return None


@unwrap_once.register(DataParallel)
@unwrap_once.register(DistributedDataParallel)
def _(model: Any) -> nn.Module:
    return model.module


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether `torch.compile` returned a module.

    Example:
        >>> import torch
        >>> is_compiled_module(torch.nn.Linear(1, 1))
        False
    """
    # Where nobody has imported torch's compiler nothing is compiled; importing it takes seconds.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def without_compiler(model: nn.Module) -> nn.Module:
    """Return the module inside the result of `torch.compile`; any other module as it is."""
    while is_compiled_module(model):
        model = _compiled_module(model)
    return model


def compiled_in_place(model: nn.Module) -> nn.Module:
    """Return the module inside the result of `torch.compile`, compiled in place; another module as it is."""
    if not is_compiled_module(model):
        return model
    inner = without_compiler(model)
    inner._compiled_call_impl = cast("Any", model).dynamo_ctx(inner._call_impl)  # pyright: ignore[reportPrivateUsage] - as Module.compile does, by the options of this one
    return inner


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether a module, or any module in it, is compiled, in place or by `torch.compile`."""
    return any(
        is_compiled_module(one) or one._compiled_call_impl is not None  # pyright: ignore[reportPrivateUsage]
        for one in module.modules()
    )


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether any parameter of a model is a `DTensor`, that is, sharded or replicated across ranks."""
    return any(map(is_dtensor, model.parameters()))


def wrap_forward(model: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a model's `forward`, which `restore_forward` restores; only once per model.

    A deep copy of the model has a `forward` of its own; a pickled copy has that of its class.

    Example:
        >>> import torch
        >>> model = torch.nn.Identity()
        >>> wrap_forward(model, lambda forward: lambda self, x: forward(self, x) + 1)
        >>> model(1)
        2
        >>> restore_forward(model)
        >>> model(1)
        1
    """
    if not has_wrapped_forward(model):
        replace_forward(model, around)


def replace_forward(model: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a model's present `forward`, also that of `wrap_forward`; `restore_forward` undoes both.

    Example:
        >>> import torch
        >>> model = torch.nn.Identity()
        >>> for number in (1, 2):
        ...     replace_forward(model, lambda forward: lambda self, x: forward(self, x) + 1)
        >>> model(1)
        3
        >>> restore_forward(model)
        >>> model(1)
        1
    """
    target = without_compiler(model)
    if not has_wrapped_forward(target):
        vars(target)[_ORIGINAL] = target.forward
    changed = around(unbound_forward(target))
    changed.__name__ = "forward"  # a method is pickled by its name
    vars(target)["forward"] = MethodType(changed, target)


def unbound_forward(model: nn.Module) -> Callable[..., Any]:
    """Return a model's present `forward` as a function of the model: a deep copy uses its own parameters."""
    forward = model.forward
    if isinstance(forward, MethodType) and forward.__self__ is model:
        return forward.__func__

    def function(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        del self
        return forward(*args, **kwargs)

    return function


def has_wrapped_forward(model: nn.Module) -> bool:
    """Return whether `wrap_forward` has replaced the forward."""
    inside = vars(without_compiler(model))
    forward = getattr(inside.get("forward"), "__func__", None)
    return _ORIGINAL in inside and forward is not type(without_compiler(model)).forward


def restore_forward(model: nn.Module) -> None:
    """Undo `wrap_forward`; any other model is left as it is."""
    target = without_compiler(model)
    original = vars(target).pop(_ORIGINAL, None)
    if original is None:
        return
    if getattr(original, "__func__", None) is type(target).forward:
        del vars(target)["forward"]
    else:
        vars(target)["forward"] = original


def _inside(model: nn.Module) -> nn.Module | None:
    return _compiled_module(model) if is_compiled_module(model) else unwrap_once(model)


def _compiled_module(model: Any) -> nn.Module:
    return model._orig_mod


def _unwrap_children(model: nn.Module) -> nn.Module:
    inside = dict(model.named_children()).get("module")
    if inside is not None:
        return _unwrap_children(inside)
    for name, child in model.named_children():
        setattr(model, name, _unwrap_children(child))
    return model


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Find the class of a module, or of the first one inside it, by its name; None if no module has it.

    Example:
        >>> import torch
        >>> get_module_class_from_name(torch.nn.Sequential(torch.nn.ReLU()), "ReLU")
        <class 'torch.nn.modules.activation.ReLU'>
    """
    return next((type(found) for found in module.modules() if type(found).__name__ == name), None)
