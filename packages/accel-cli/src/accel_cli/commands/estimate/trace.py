"""Find the memory peaks of a forward and backward pass without computing it.

The passes run on fake tensors (`FakeTensorMode`), while a ledger tracks the live storages.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from accel_cli.commands.estimate.memory import MemoryPeak
from accel_state.torch_private import (
    FakeTensorMode,
    TorchDispatchMode,
    parameter_table,
    storage_address,
    tree_leaves,
)

_CAST = torch.ops.aten._to_copy.default


class LiveStorageTracker(TorchDispatchMode):
    """Tracker of the storages that are created within it and alive; weights of a module are not counted.

    Args:
        module: Its parameters and buffers are weights; copies of them in another dtype are casts.

    Attributes:
        host: Peak of host bytes: of tensors that were moved there, and of all computed from them.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._weights: set[int] = set()
        self._weight_bytes = 0
        self._alive: dict[int, tuple[str, int, Any]] = {}
        self._bytes: dict[str, int] = dict.fromkeys(("activations", "casts", "gradients", "state", "host"), 0)
        self._lengths: dict[int, int] = {}
        self._elements = 0
        self._kind = "activations"
        self._tops: dict[int, tuple[MemoryPeak, MemoryPeak]] = {}
        self.host = 0
        self.add_weights(module)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(wraps_tensors, types)):
            return NotImplemented  # it is dispatched again with the tensors inside
        result = func(*args, **(kwargs or {}))
        kind = "casts" if func is _CAST and storage_key(args[0]) in self._weights else self._kind
        if kind == "activations" and self._bytes["host"] and any(map(self.has_on_host, tree_leaves(args))):
            kind = "host"
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, kind)
        return result

    @property
    def moments(self) -> tuple[MemoryPeak, ...]:
        """The moments of peak memory for every number of finished gradients, with casts and without."""
        return tuple(dict.fromkeys(moment for pair in self._tops.values() for moment in pair))

    @property
    def device_bytes(self) -> int:
        """Bytes that are alive on the device at present, weights included."""
        return self._weight_bytes + sum(size for kind, size in self._bytes.items() if kind != "host")

    def has_on_host(self, leaf: object) -> bool:
        """Whether a value is a tensor that was moved to the host, or computed from one there."""
        return isinstance(leaf, Tensor) and self._alive.get(storage_key(leaf), ("",))[0] == "host"

    def moving(self, *, to_host: bool) -> AbstractContextManager[None]:
        """Place tensors that are created within the block on the host, or on the device."""
        return self._counting("host" if to_host else "back")

    def add_weights(self, module: nn.Module) -> None:
        """Count the parameters and buffers of another module as weights, too."""
        for tensor in [*module.parameters(), *module.buffers()]:
            key = storage_key(tensor)
            if key not in self._weights:
                self._weight_bytes += tensor.untyped_storage().nbytes()
            self._weights.add(key)
            if key in self._alive:
                kind, size, _ = self._alive.pop(key)
                self._bytes[kind] -= size

    def finish(self, parameter: Tensor) -> None:
        """Count the gradient of a parameter as complete; for `register_post_accumulate_grad_hook`."""
        key = storage_key(parameter.grad)
        kind, size, reference = self._alive.get(key, ("gradients", 0, None))
        if kind != "gradients":
            self._bytes[kind] -= size
            self._bytes["gradients"] += size
            self._alive[key] = ("gradients", size, reference)
            self._lengths[key] = parameter.numel()
            self._elements += parameter.numel()
            self._update_peak()

    def stepping(self) -> AbstractContextManager[None]:
        """Leave tensors that are created within the block uncounted: they are optimizer state."""
        return self._counting("state")

    @contextlib.contextmanager
    def _counting(self, kind: str) -> Generator[None]:
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def _see(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key in self._alive or key in self._weights:
            return
        size = storage.nbytes()

        def on_free(_: object) -> None:
            if key in self._alive:
                was, _, _ = self._alive.pop(key)
                self._bytes[was] -= size
                self._elements -= self._lengths.pop(key, 0)

        kind = "activations" if kind == "back" else kind
        self._alive[key] = (kind, size, weakref.ref(storage, on_free))
        self._bytes[kind] += size
        self._update_peak()

    def _update_peak(self) -> None:
        self.host = max(self.host, self._bytes["host"])
        elements = self._elements
        now = MemoryPeak(
            activations=self._bytes["activations"], casts=self._bytes["casts"], gradients=elements
        )
        most, widest = self._tops.get(elements, (now, now))
        if now.activations + now.casts > most.activations + most.casts:
            most = now
        if now.activations > widest.activations:
            widest = now
        self._tops[elements] = (most, widest)


def moments_of(
    model: nn.Module,
    passes: Callable[[nn.Module], Tensor | tuple[Any, ...]],
    *,
    dtype: torch.dtype | None = None,
) -> tuple[MemoryPeak, ...]:
    """Find the moments of peak memory during a forward and backward pass of a model.

    Args:
        model: A model on any device, also meta. Its weights do not change.
        passes: Makes the inputs, runs the model that it is passed, and returns a scalar, the loss; or a tuple
            of it and all that a script holds on to during the backward pass.
        dtype: The autocast dtype; None without autocast.

    Example:
        >>> model = nn.Linear(1000, 10, device="meta")
        >>> moments = moments_of(model, lambda model: model(torch.ones(2, 1000)).sum())
        >>> max(moment.gradients for moment in moments)
        10010
    """
    precision = contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _placeholders(model),
        LiveStorageTracker(model) as ledger,
    ):
        handles = [
            parameter.register_post_accumulate_grad_hook(ledger.finish)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        with precision:
            held = passes(model)
        (held if isinstance(held, Tensor) else held[0]).backward()
        del held
        for handle in handles:
            handle.remove()
    return ledger.moments


@contextlib.contextmanager
def _placeholders(model: nn.Module) -> Generator[None]:
    """Replace every parameter by a fake one on the CPU; tied parameters stay tied."""
    fakes: dict[int, nn.Parameter] = {}
    replaced: list[tuple[Any, str, nn.Parameter]] = []
    for module in model.modules():
        table: Any = parameter_table(module)
        for name, parameter in list(table.items()):
            if parameter is None:
                continue
            replaced.append((table, name, parameter))
            if id(parameter) not in fakes:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                fakes[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            table[name] = fakes[id(parameter)]
    try:
        yield
    finally:
        for table, name, parameter in replaced:
            table[name] = parameter


def storage_key(tensor: Any) -> int:
    """Return a key of a tensor's storage, also of fake tensors, which have no address."""
    return storage_address(tensor.untyped_storage())


def wraps_tensors(kind: type) -> bool:
    """Return whether tensors of a type have others inside: those of `DTensor`, or of a library.

    Example:
        >>> wraps_tensors(torch.nn.Parameter)
        False
    """
    return hasattr(kind, "__tensor_flatten__")
