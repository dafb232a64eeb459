"""Unwrap models, compile their repeated blocks, and find modules by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import singledispatch, wraps
from operator import attrgetter
from types import MethodType
from typing import Any, Literal, TypeVar, cast, overload

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accel_ops.tree import is_dtensor

M = TypeVar("M", bound="nn.Module")

_ORIGINAL = "_original_forward"


def extract_model_from_parallel(
    model: M, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> M:
    """Return a model without its distributed wrappers.

    Args:
        model: The model, wrapped or not; it stays usable.
        keep_fp32_wrapper: Keep the mixed-precision wrapper of its `forward`. Otherwise the `forward` of the
            model is restored, which also affects the wrapped model.
        keep_torch_compile: Return a compiled model compiled again, else the module inside. Modules compiled
            in place, such as regions, have no wrapper and stay compiled.
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
            # The compiled wrapper that was passed must not change.
            compiled = type(compiled)(core, compiled.dynamo_ctx)
        core = compiled
    return cast("M", core)  # wrappers have the type of the wrapped model


@singledispatch
def unwrap_once(model: nn.Module) -> nn.Module | None:
    """Return the module inside a distributed wrapper; `None` if a module is no such wrapper.

    A strategy that wraps models registers the type of its wrapper: `unwrap_once.register(Wrapper, …)`.
    """
    del model
    return None


@unwrap_once.register(DataParallel)
@unwrap_once.register(DistributedDataParallel)
def _(model: Any) -> nn.Module:
    return model.module


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether a module is a result of `torch.compile`.

    Example:
        >>> import torch
        >>> is_compiled_module(torch.nn.Linear(1, 1))
        False
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def without_compiler(model: nn.Module) -> nn.Module:
    """Return the module inside the result of `torch.compile`; return any other module unchanged."""
    inner: Any = model
    while is_compiled_module(inner):
        inner = inner._orig_mod
    return inner


def compiled_in_place(model: nn.Module) -> nn.Module:
    """Return the module inside a `torch.compile` result, compiled in place; any other module unchanged."""
    if not is_compiled_module(model):
        return model
    compiled: Any = model
    inner = without_compiler(model)
    inner._compiled_call_impl = compiled.dynamo_ctx(inner._call_impl)  # as `Module.compile` does
    return inner


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether a module or any submodule is compiled, in place or by `torch.compile`."""
    return any(is_compiled_module(part) or part._compiled_call_impl for part in module.modules())


def size_at_load(model: nn.Module, name: str) -> int | None:
    """Return a parallel size of the `distributed_config` with which transformers sharded a model, if any."""
    at_load: Any = getattr(getattr(model, "config", None), "distributed_config", None)
    return at_load.get(name) if isinstance(at_load, dict) else getattr(at_load, name, None)


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether any parameter of a model is a `DTensor`, that is, sharded or replicated."""
    return any(map(is_dtensor, model.parameters()))


def replace_forward(model: nn.Module, call: Callable[..., Any]) -> None:
    """Wrap a model's current `forward`, as `wrap_forward` does; `restore_forward` undoes all.

    A deep copy of the model has its own wrapped `forward`; a pickled copy has the `forward` of its class.
    """
    target = without_compiler(model)
    if not has_wrapped_forward(target):
        vars(target)[_ORIGINAL] = target.forward
    wrap_forward(target, call)


def wrap_forward(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let a module call `call(forward, module, *args, **kwargs)` with its current `forward`, as a function.

    Deep copies of the module use their own parameters.
    """
    forward = unbound_forward(module)

    @wraps(forward)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(forward, self, *args, **kwargs)

    wrapped.__name__ = "forward"  # a method is pickled by its name
    vars(module)["forward"] = MethodType(wrapped, module)


def unbound_forward(model: nn.Module) -> Callable[..., Any]:
    """Return a model's current `forward` as a function of the model: deep copies use their parameters."""
    forward = model.forward
    if isinstance(forward, MethodType) and forward.__self__ is model:
        return forward.__func__

    def function(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        del self
        return forward(*args, **kwargs)

    return function


def has_wrapped_forward(model: nn.Module) -> bool:
    """Return whether `replace_forward` has wrapped the forward."""
    inside = vars(without_compiler(model))
    forward = getattr(inside.get("forward"), "__func__", None)
    return _ORIGINAL in inside and forward is not type(without_compiler(model)).forward


def restore_forward(model: nn.Module) -> None:
    """Undo `replace_forward`; any other model stays unchanged."""
    target = without_compiler(model)
    original = vars(target).pop(_ORIGINAL, None)
    if original is None:
        return
    if getattr(original, "__func__", None) is type(target).forward:
        del vars(target)["forward"]
    else:
        vars(target)["forward"] = original


@contextmanager
def replaced_attributes(owner: Any, values: Mapping[str, Any]) -> Generator[None]:
    """Set attributes of a module, an object or a Python module within the block.

    They are set in its `__dict__`, which takes precedence over methods of the class and over parameters and
    submodules of an `nn.Module`.
    """
    own = vars(owner)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            del own[name]
        own.update(before)


def _inside(model: Any) -> nn.Module | None:
    return model._orig_mod if is_compiled_module(model) else unwrap_once(model)


def _unwrap_children(model: nn.Module) -> nn.Module:
    inside = dict(model.named_children()).get("module")
    if inside is not None:
        return _unwrap_children(inside)
    for name, child in model.named_children():
        setattr(model, name, _unwrap_children(child))
    return model


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class with a name among the classes of a module and its submodules; None if there is none.

    Example:
        >>> import torch
        >>> get_module_class_from_name(torch.nn.Sequential(torch.nn.ReLU()), "ReLU")
        <class 'torch.nn.modules.activation.ReLU'>
    """
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute by its dotted name.

    Raises:
        AttributeError: An attribute does not exist.

    Example:
        >>> import torch
        >>> recursive_getattr(torch.nn.Sequential(torch.nn.Linear(1, 2)), "0.out_features")
        2
    """
    return attrgetter(attr)(obj)


def get_pretty_name(obj: Any) -> str:
    """Return the qualified name of an object, or the name of its class.

    Example:
        >>> get_pretty_name(dict.get), get_pretty_name({})
        ('dict.get', 'dict')
    """
    for attribute in ("__qualname__", "__name__"):
        name = getattr(obj, attribute, None)
        if isinstance(name, str):
            return name
    return type(obj).__qualname__


def merge_dicts(source: Mapping[Any, Any], destination: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """Merge one mapping into another, in place; mappings in both are merged recursively.

    Args:
        source: The mapping whose entries take precedence.
        destination: The mapping that is changed.

    Example:
        >>> merge_dicts({"a": {"y": 2}, "b": 3}, {"a": {"x": 1}})
        {'a': {'x': 1, 'y': 2}, 'b': 3}
    """
    for key, value in source.items():
        if isinstance(value, dict):
            inside = destination.get(key)
            destination[key] = merge_dicts(value, inside if isinstance(inside, dict) else {})
        else:
            destination[key] = value
    return destination


@overload
def get_module_children_bottom_up(model: nn.Module, return_fqns: Literal[False] = ...) -> list[nn.Module]: ...
@overload
def get_module_children_bottom_up(
    model: nn.Module, return_fqns: Literal[True]
) -> list[tuple[str, nn.Module]]: ...
def get_module_children_bottom_up(
    model: nn.Module, return_fqns: bool = False
) -> list[nn.Module] | list[tuple[str, nn.Module]]:
    """Return all modules of a model, children before their parents, the model last.

    Args:
        model: The model. A module that is used in two places occurs twice.
        return_fqns: Return pairs of a module's full name, `""` for the model, and the module.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.ReLU()), torch.nn.Tanh())
        >>> [name for name, _ in get_module_children_bottom_up(model, return_fqns=True)]
        ['0.0', '0', '1', '']
    """
    named: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        below = get_module_children_bottom_up(child, return_fqns=True)
        named += [(f"{name}.{inner}" if inner else name, module) for inner, module in below]
    named.append(("", model))
    return named if return_fqns else [module for _, module in named]


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model is a `peft` model, possibly in a distributed wrapper.

    Example:
        >>> import torch
        >>> is_peft_model(torch.nn.Linear(1, 1))
        False
    """
    peft = sys.modules.get("peft")  # there is no peft model before this import
    return peft is not None and isinstance(
        extract_model_from_parallel(model, keep_torch_compile=False), peft.PeftModel
    )


Module = TypeVar("Module", bound=nn.Module)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def compile_regions(module: Module, **compile_kwargs: Any) -> Module:
    """Compile the repeated blocks of a model, and the parts between them, instead of the whole model.

    The first block of each class is compiled; the others run the same code. Regions are compiled in place, so
    that names of parameters, classes and references between modules do not change. A model without repeated
    blocks is one region.

    Example:
        >>> blocks = [nn.TransformerEncoderLayer(8, 2, batch_first=True) for _ in range(3)]
        >>> model = compile_regions(nn.Sequential(nn.Linear(4, 8), *blocks), backend="eager")
        >>> [name for name, _ in model.named_parameters()][:2]
        ['0.weight', '0.bias']
    """
    for region in regions(module):
        region.compile(**compile_kwargs)
    return module


compile_regions_deepspeed = compile_regions_fsdp2 = compile_regions
"""The same for models of these engines."""


def regions(module: nn.Module) -> list[nn.Module]:
    """Return the regions to compile, in the order of `module.modules()`.

    Regions are the outermost repeated modules, that is, modules of the same class in one container; and, of
    the other modules, the largest ones without repeated blocks. Single layers of `torch.nn` are skipped: they
    do not get faster, and count towards the compiler's limit of variants.
    """
    blocks = {id(block) for container in module.modules() for block in _repeated(container)}
    if not blocks:
        return [module]
    around = {id(outer) for outer in module.modules() if any(id(part) in blocks for part in outer.modules())}
    return [*_walk(module, around - blocks)]


def _walk(module: nn.Module, around: set[int]) -> Iterator[nn.Module]:
    if id(module) in around:
        for child in dict.fromkeys(module.children()):
            yield from _walk(child, around)
    elif not _is_single_layer(module) and type(module) not in _CONTAINERS[:2]:
        yield module


def _repeated(container: nn.Module) -> list[nn.Module]:
    if not isinstance(container, _CONTAINERS):
        return []
    candidates = [child for child in container.children() if not _is_single_layer(child)]
    kinds = [type(child) for child in candidates]
    return [child for child in candidates if kinds.count(type(child)) > 1]


def _is_single_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())
