"""A hook sees the arguments before a module's forward and its output after it."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import nn


class ModelHook:
    """What a module's forward is wrapped in. Unlike PyTorch's own hooks it receives keyword arguments.

    Attributes:
        no_grad: Whether the forward runs without recording gradients.
    """

    no_grad: ClassVar[bool] = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare the module when the hook is attached, and return it."""
        return module

    def pre_forward(
        self,
        module: nn.Module,  # noqa: ARG002 - for those that override
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run before the forward, and return its arguments, possibly changed."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:  # noqa: ARG002 - for those that override
        """Run after the forward, and return its output, possibly changed."""
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Undo what `pre_forward` did: the forward, or the `pre_forward` of a later hook, raised."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo what `init_hook` did when the hook is removed, and return the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one: each event goes through them in order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare the module for each hook."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let each hook change the arguments in turn."""
        for index, hook in enumerate(self.hooks):
            try:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
            except BaseException:
                for before in self.hooks[:index]:
                    before.forward_failed(module)
                raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Let each hook change the output in turn."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Let each hook undo what it did before the forward."""
        for hook in self.hooks:
            hook.forward_failed(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo each hook."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Wrap a module's forward in a hook.

    Args:
        module: The module; it is changed in place.
        hook: The hook.
        append: Chain the hook after one that the module has; otherwise that one is replaced.

    Example:
        >>> class Double(ModelHook):
        ...     def post_forward(self, module, output):
        ...         return 2 * output
        >>> add_hook_to_module(nn.Identity(), Double())(torch.ones(1))
        tensor([2.])
    """
    present = hook_of(module)
    if append and present is not None:
        # Not a new chain of prepared hooks: the present one keeps what it has prepared.
        prepared = hook.init_hook(module)
        _wrap(prepared, SequentialHook(present, hook))
        return prepared
    if present is not None:
        remove_hook_from_module(module)
    prepared = hook.init_hook(module)
    _wrap(prepared, hook)
    return prepared


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Restore a module's own forward."""
    hook = hook_of(module)
    if hook is not None:
        hook.detach_hook(module)
        del vars(module)["_hf_hook"]
    table = vars(module)
    if "_old_forward" in table:
        original = table.pop("_old_forward")
        # A forward of the class is found again by itself; only a patched one has to be put back.
        if getattr(original, "__func__", None) is getattr(type(module), "forward", None):
            table.pop("forward", None)
        else:
            table["forward"] = original
    if recurse:
        remove_hook_from_submodules(module)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Give a module and everything below it their own forwards back."""
    for part in list(module.modules()):
        remove_hook_from_module(part)


def hook_of(module: nn.Module) -> ModelHook | None:
    """Return the hook of a module, if it has one."""
    return vars(module).get("_hf_hook")


def _wrap(module: nn.Module, hook: ModelHook) -> None:
    table = vars(module)
    table["_hf_hook"] = hook  # the names that other libraries look for
    if "_old_forward" not in table:
        table["_old_forward"] = module.forward
    # A partial, not a closure: a copy of the module then runs the copy.
    table["forward"] = functools.update_wrapper(
        functools.partial(_hooked_forward, module), table["_old_forward"]
    )


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook: ModelHook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    try:
        if hook.no_grad:
            with torch.no_grad():
                output = module._old_forward(*args, **kwargs)
        else:
            output = module._old_forward(*args, **kwargs)
    except BaseException:
        hook.forward_failed(module)
        raise
    return hook.post_forward(module, output)
