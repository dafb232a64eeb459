"""Track live storages by kind, and find the memory peaks of a forward and backward pass without computing it.

The passes run on fake tensors (`FakeTensorMode`). `accel check` extends the tracker by optimizer steps.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel_inspect.estimate.memory import MemoryPeak
from accel_ops.modules import replaced_attributes
from accel_ops.tree import local_part
from accel_plugins.fp8.recipe import plain_tensor
from accel_state.torch_private import FakeTensorMode, TorchDispatchMode, active_fake_mode, tree_leaves

_DEVICE_KINDS = ("parameters", "casts", "gradients", "optimizer", "working")
"""The kinds of device memory: `casts` are parameters in the autocast dtype, `working` is everything else."""

_HOST = "host"
_CAST = torch.ops.aten._to_copy.default


@dataclass(slots=True)
class LiveStorage:
    """A live storage.

    Args:
        elements: Elements of the parameter, if the storage is its complete gradient.
    """

    kind: str
    nbytes: int
    reference: weakref.ref[torch.UntypedStorage]
    elements: int = 0


class LiveStorageTracker(TorchDispatchMode):
    """Tracks live storages that are created within it by kind, and the memory peaks of passes.

    Operations on wrapper tensors, such as `DTensor`, are tracked as operations on their shards.

    Args:
        fakes: The mode of the tensors to track; None to track real tensors. DTensor may use another mode,
            which does not allocate.

    Attributes:
        is_paused: Whether new tensors are ignored.
        host: Peak of host bytes: of tensors that were moved to the host, and of tensors computed from them.
    """

    def __init__(self, fakes: FakeTensorMode | None) -> None:
        super().__init__()
        self._fakes = fakes
        self._alive: dict[int, LiveStorage] = {}
        self._bytes: dict[str, int] = dict.fromkeys((*_DEVICE_KINDS, _HOST), 0)
        self._moved_to: str | None = None
        self._complete_elements = 0
        self._peaks: dict[int, tuple[MemoryPeak, MemoryPeak]] = {}
        self.is_paused = False
        self.host = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(wraps_tensors, types)):
            return NotImplemented  # It is dispatched again with the tensors inside.
        result = func(*args, **(kwargs or {}))
        if active_fake_mode() is self._fakes and not self.is_paused:
            self._track(func, args, result)
        return result

    @property
    def moments(self) -> tuple[MemoryPeak, ...]:
        """The memory peaks for every number of complete gradients, with and without casts."""
        return tuple(dict.fromkeys(moment for pair in self._peaks.values() for moment in pair))

    @property
    def device_bytes(self) -> int:
        """Bytes that are currently live on the device."""
        return sum(self._bytes[kind] for kind in _DEVICE_KINDS)

    def add(self, model: nn.Module) -> None:
        """Start to track the parameters, buffers and gradients of a model."""
        for tensor in [*model.parameters(), *model.buffers()]:
            self._mark(tensor, "parameters")
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._complete_gradient)

    def has_on_host(self, value: object) -> bool:
        """Return whether a value is a tensor that was moved to the host, or computed from such tensors."""
        return isinstance(value, Tensor) and self._kind_of(value) == _HOST

    def moving(self, *, to_host: bool) -> AbstractContextManager[None]:
        """Place tensors that are created within the block on the host, or on the device."""
        return replaced_attributes(self, {"_moved_to": _HOST if to_host else "working"})

    def _track(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Track the new storages among the results of an operation."""
        kind = self._moved_to
        if kind is None:
            kind = "working"
            if func is _CAST and self._kind_of(args[0]) == "parameters":
                kind = "casts"
            elif self._bytes[_HOST] and any(map(self.has_on_host, tree_leaves(args))):
                kind = _HOST
        known = len(self._alive)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, kind)
        if len(self._alive) > known:
            self._update_peaks()

    def _see(self, tensor: Tensor, kind: str) -> None:
        key = storage_key(tensor)
        if key in self._alive or tensor.is_meta:
            return

        def on_free(_: object) -> None:
            entry = self._alive.pop(key, None)
            if entry is not None:
                self._bytes[entry.kind] -= entry.nbytes
                self._complete_elements -= entry.elements

        storage = tensor.untyped_storage()
        entry = LiveStorage(kind, storage.nbytes(), weakref.ref(storage, on_free))
        self._alive[key] = entry
        self._bytes[kind] += entry.nbytes
        self.host = max(self.host, self._bytes[_HOST])

    def _mark(self, tensor: Tensor, kind: str) -> LiveStorage | None:
        """Attribute the storage of a tensor (for a sharded tensor, of its shard) to a kind."""
        shard = plain_tensor(local_part(tensor))
        self._see(shard, kind)
        entry = self._alive.get(storage_key(shard))
        if entry is not None:
            self._bytes[entry.kind] -= entry.nbytes
            self._bytes[kind] += entry.nbytes
            entry.kind = kind
        return entry

    def _complete_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        entry = self._mark(parameter.grad, "gradients")
        if entry is not None and not entry.elements:
            entry.elements = parameter.numel()
            self._complete_elements += entry.elements
        self._update_peaks()

    def _kind_of(self, tensor: Tensor) -> str | None:
        entry = self._alive.get(storage_key(tensor))
        return None if entry is None else entry.kind

    def _update_peaks(self) -> None:
        elements = self._complete_elements
        now = MemoryPeak(activations=self._bytes["working"], casts=self._bytes["casts"], gradients=elements)
        most, widest = self._peaks.get(elements, (now, now))
        if now.activations + now.casts > most.activations + most.casts:
            most = now
        if now.activations > widest.activations:
            widest = now
        self._peaks[elements] = (most, widest)


def moments_of(
    model: nn.Module,
    passes: Callable[[nn.Module], Tensor | tuple[Any, ...]],
    *,
    dtype: torch.dtype | None = None,
) -> tuple[MemoryPeak, ...]:
    """Find the memory peaks during a forward and backward pass of a model.

    Args:
        model: A model on any device, including meta. Its weights do not change.
        passes: Creates the inputs, runs the model that it is passed, and returns the scalar loss; or a tuple
            of the loss and all tensors that a script keeps alive during the backward pass.
        dtype: The autocast dtype; None without autocast.

    Example:
        >>> model = nn.Linear(1000, 10, device="meta")
        >>> moments = moments_of(model, lambda model: model(torch.ones(2, 1000)).sum())
        >>> max(moment.gradients for moment in moments)
        10010
    """
    precision = contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as fakes,
        _fake_parameters(model),
        LiveStorageTracker(fakes) as tracker,
    ):
        tracker.add(model)
        with precision:
            held = passes(model)
        (held if isinstance(held, Tensor) else held[0]).backward()
        del held
    return tracker.moments


@contextlib.contextmanager
def _fake_parameters(model: nn.Module) -> Generator[None]:
    """Replace every parameter by a fake one on the CPU; tied parameters stay tied."""
    fakes: dict[int, nn.Parameter] = {}
    replaced: list[tuple[Any, str, nn.Parameter]] = []
    for module in model.modules():
        table: Any = module._parameters
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
    """Return a key of a tensor's storage, even for fake tensors, which have no address."""
    return tensor.untyped_storage()._cdata


def wraps_tensors(kind: type) -> bool:
    """Return whether tensors of a type wrap other tensors, as `DTensor` and types of libraries do.

    Example:
        >>> wraps_tensors(torch.nn.Parameter)
        False
    """
    return hasattr(kind, "__tensor_flatten__")
