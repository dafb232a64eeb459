"""Store weights in a small type, compute in a larger one, layer by layer."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_bigmodel.hooks.base import ModelHook, add_hook_to_module

if TYPE_CHECKING:
    from collections.abc import Iterable

SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
"""The layers whose weights are stored in one type and cast to another for their forward."""


_lock = threading.Lock()
"""One for all hooks: a hook with a lock of its own could not be copied with its model."""


class LayerwiseCastingHook(ModelHook):
    """Cast a module's weights up for its forward.

    After the forward the stored weights come back bit for bit, unless the forward changed them. Several
    threads may run the module.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking
        self._stored: list[tuple[Tensor, Tensor, int]] = []
        self._users = 0

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast the weights down."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast the weights up, unless another thread did."""
        with _lock:
            if not self._users:
                for tensor in [*module.parameters(), *module.buffers()]:
                    if tensor.is_floating_point() and tensor.dtype != self.compute_dtype:
                        stored = tensor.data
                        tensor.data = stored.to(self.compute_dtype, non_blocking=self.non_blocking)
                        self._stored.append((tensor, stored, tensor._version))
            self._users += 1
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Put the stored weights back, after the last thread."""
        self._restore(module)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Put the stored weights back, after the last thread."""
        self._restore(module)

    def _restore(self, module: nn.Module) -> None:
        with _lock:
            self._users = max(0, self._users - 1)
            if self._users:
                return
            for tensor, stored, version in self._stored:
                if tensor._version == version:
                    tensor.data = stored
            self._stored.clear()
            module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | list[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | type[nn.Module] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers in a small type.

    Args:
        module: The model.
        storage_dtype: The type between forwards, such as `torch.float8_e4m3fn`.
        compute_dtype: The type during one.
        skip_modules_pattern: Regular expressions; modules whose dotted name has a match are left alone, with
            everything below them.
        skip_modules_classes: Classes that are left alone, with everything below them.
        non_blocking: Let the casts of weights in pinned memory run on.

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
