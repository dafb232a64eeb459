"""Hooks around the forward of a module; CPU offload; layerwise casting."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterable
from typing import Any, TypeVar, cast

import torch
from torch import nn

from accel_ops.tree import send_to_device

M = TypeVar("M", bound=nn.Module)


class ModelHook:
    """Base class of hooks around a module's forward. Unlike PyTorch's hooks they receive keyword arguments.

    Attributes:
        no_grad: Whether the forward runs under `torch.no_grad`.
    """

    no_grad: bool = False

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
        """Undo `pre_forward` after the forward, or the `pre_forward` of a later hook, raised."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo `init_hook` when the hook is removed, and return the module."""
        return module


class SequentialHook(ModelHook):
    """Chain several hooks: each event is passed to them in order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.no_grad = any(hook.no_grad for hook in hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for index, hook in enumerate(self.hooks):
            try:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
            except BaseException:
                for before in self.hooks[:index]:
                    before.forward_failed(module)
                raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        for hook in self.hooks:
            hook.forward_failed(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: M, hook: ModelHook, append: bool = False) -> M:
    """Wrap a module's forward in a hook.

    Args:
        module: The module; it is changed in place.
        hook: The hook.
        append: Chain the hook after the module's existing hook; otherwise replace that hook.

    Example:
        >>> class Double(ModelHook):
        ...     def post_forward(self, module, output):
        ...         return 2 * output
        >>> add_hook_to_module(nn.Identity(), Double())(torch.ones(1))
        tensor([2.])
    """
    present = hook_of(module)
    if append and present is not None:
        # Keep the existing chain: its hooks are initialised already.
        prepared = hook.init_hook(module)
        chain = [*(present.hooks if type(present) is SequentialHook else [present]), hook]
        # Weights are cast after they are loaded, regardless of the order of attachment.
        chain.sort(key=lambda hook: isinstance(hook, LayerwiseCastingHook))
        _wrap(prepared, SequentialHook(*chain))
        return cast("M", prepared)
    if present is not None:
        remove_hook_from_module(module)
    prepared = hook.init_hook(module)
    _wrap(prepared, hook)
    return cast("M", prepared)


def remove_hook_from_module(module: M, recurse: bool = False) -> M:
    """Remove a module's hook, and restore its original forward."""
    hook = hook_of(module)
    if hook is not None:
        hook.detach_hook(module)
        del vars(module)["_hf_hook"]
    table = vars(module)
    if "_old_forward" in table:
        original = table.pop("_old_forward")
        # The forward of the class needs no restoring; only a patched one does.
        if getattr(original, "__func__", None) is getattr(type(module), "forward", None):
            table.pop("forward", None)
        else:
            table["forward"] = original
    if recurse:
        remove_hook_from_submodules(module)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of all its submodules."""
    for part in list(module.modules()):
        remove_hook_from_module(part)


def hook_of(module: nn.Module) -> ModelHook | None:
    """Return the hook of a module, if it has one."""
    return vars(module).get("_hf_hook")


def _wrap(module: nn.Module, hook: ModelHook) -> None:
    table = vars(module)
    table["_hf_hook"] = hook  # names that other libraries look up
    if "_old_forward" not in table:
        table["_old_forward"] = module.forward
    # A partial, not a closure: a deep copy of the module then calls the copy.
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


class CpuOffload(ModelHook):
    """Move a model from the CPU to a device when its forward is called; it then stays there.

    Args:
        execution_device: The execution device; by default the accelerator, if there is one.
        prev_module_hook: The hook of the previous model, which is moved back to the CPU first.
    """

    def __init__(
        self,
        execution_device: str | int | torch.device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = default_device() if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        previous = self.prev_module_hook
        if previous is not None and previous.model is not module:
            frees_memory = not _is_on_cpu(previous.model)
            previous.offload()
            if frees_memory and torch.accelerator.is_available():
                torch.accelerator.empty_cache()
        module.to(self.execution_device)
        return send_to_device((args, kwargs), self.execution_device, reuse_containers=True)


def _is_on_cpu(model: nn.Module) -> bool:
    return all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))


class UserCpuOffloadHook:
    """The handle of `cpu_offload_with_hook`: moves a model back to the CPU, or removes its hook."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model back to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook from the model."""
        remove_hook_from_module(self.model)


def default_device() -> torch.device:
    """Return the default device: the accelerator, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
"""The layers whose weights are stored in one dtype and cast to another for their forward."""


_lock = threading.Lock()
"""One lock for all hooks: a hook with a lock could not be deep-copied with its model."""


class LayerwiseCastingHook(ModelHook):
    """Cast a module's weights to the compute dtype for its forward, and back. Several threads may run it."""

    _is_stateful = False

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking
        self._users = 0

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with _lock:
            if not self._users:
                module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
            self._users += 1
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.forward_failed(module)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        with _lock:
            self._users -= 1
            if not self._users:
                module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | list[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | type[nn.Module] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers in a small dtype, and cast them per forward.

    Args:
        module: The model.
        storage_dtype: The dtype between forwards, such as `torch.float8_e4m3fn`.
        compute_dtype: The dtype during a forward.
        skip_modules_pattern: Regular expressions; modules whose dotted name matches are skipped, with
            their submodules.
        skip_modules_classes: Classes that are skipped, with their submodules.
        non_blocking: Cast weights in pinned memory asynchronously.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        >>> attach_layerwise_casting_hooks(model, torch.float16, torch.float32, ["norm"])
        >>> model[0].weight.dtype, model[1].weight.dtype, model(torch.ones(1, 2)).dtype
        (torch.float16, torch.float32, torch.float32)
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    for layer in _castable(module, "", patterns, skip_modules_classes or ()):
        hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
        add_hook_to_module(layer, hook, append=True)


def _castable(
    module: nn.Module,
    name: str,
    patterns: Iterable[str],
    skipped: type[nn.Module] | tuple[type[nn.Module], ...],
) -> list[nn.Module]:
    if isinstance(module, skipped) or any(re.search(pattern, name) for pattern in patterns):
        return []
    if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        return [module]
    return [
        layer
        for leaf, child in module.named_children()
        for layer in _castable(child, f"{name}.{leaf}" if name else leaf, patterns, skipped)
    ]
