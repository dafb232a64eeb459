"""Track live storages by kind, and find the memory peaks of passes and steps without computing them.

They run on fake tensors (`FakeTensorMode`). `accel estimate-memory` follows one forward and backward pass,
and `accel check` a script, whose models may be sharded.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_inspect.estimate.memory import ADAM, MemoryPeak
from accel_ops.modules import replaced_attributes
from accel_ops.tree import local_part
from accel_plugins.fp8.recipe import plain_tensor
from accel_state.torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    active_fake_mode,
    tree_leaves,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

_DEVICE_KINDS = ("parameters", "casts", "gradients", "optimizer", "working")
"""The kinds of device memory: `casts` are parameters in the autocast dtype, `working` is everything else."""

_HOST = "host"
_CAST = torch.ops.aten._to_copy.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_DEVICE = torch.ops.prim.device.default


@dataclass(slots=True)
class LiveStorage:
    """A live storage; with the elements of its parameter, if it is a complete gradient."""

    kind: str
    nbytes: int
    reference: weakref.ref[torch.UntypedStorage]
    elements: int = 0


class MemoryTracker(TorchDispatchMode):
    """Tracks live storages that are created within it by kind, and the memory peaks of passes and steps.

    Operations on wrapper tensors, such as `DTensor`, are tracked as operations on their shards. As in
    `torch.distributed._tools.mem_tracker`, which supports one device only, sizes follow
    `UntypedStorage.resize_`, by which FSDP frees gathered parameters.

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
        self._models: list[nn.Module] = []
        self._alive: dict[int, LiveStorage] = {}
        self._bytes: dict[str, int] = dict.fromkeys((*_DEVICE_KINDS, _HOST), 0)
        self._moved_to: str | None = None
        self._complete_elements = 0
        self._peaks: dict[int, tuple[MemoryPeak, MemoryPeak]] = {}
        self._peak_of_passes = self._peak_of_steps = self._by_part()
        self._is_stepping = False
        self._state_bytes = 0
        self.is_paused = False
        self.host = 0

    def __enter__(self) -> MemoryTracker:
        self._resize: Any = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            entry = self._alive.get(storage._cdata)
            if entry is not None:
                self._bytes[entry.kind] += storage.nbytes() - entry.nbytes
                entry.nbytes = storage.nbytes()
                self._update_peaks()
            return result

        torch.UntypedStorage.resize_ = resize_  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)  # pyright: ignore[reportArgumentType]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device  # Four of five calls are this one.
        if any(map(wraps_tensors, types)):
            return NotImplemented  # It is dispatched again with the tensors inside.
        if func is _WAIT:
            return args[0]  # On fake tensors, waiting would create another tensor.
        result = func(*args, **(kwargs or {}))
        if active_fake_mode() is self._fakes and not self.is_paused:
            self._track(func, args, result)
        return result

    @property
    def moments(self) -> tuple[MemoryPeak, ...]:
        """The memory peaks for every number of complete gradients, with and without casts."""
        return tuple(dict.fromkeys(moment for pair in self._peaks.values() for moment in pair))

    @property
    def parts(self) -> dict[str, int]:
        """Bytes at the peak: parameters, gradients, optimizer, and the remaining ones as working.

        The optimizer's state counts in every pass but the first; if no step was tracked, that of Adam.
        """
        parameters = (parameter for model in self._models for parameter in model.parameters())
        state = self._state_bytes or ADAM * sum(
            local_part(parameter).numel() for parameter in parameters if parameter.requires_grad
        )
        in_passes = {**self._peak_of_passes, "optimizer": state}
        return max(in_passes, self._peak_of_steps, key=lambda parts: sum(parts.values()))

    def add(self, model: nn.Module) -> None:
        """Start to track the parameters, buffers and gradients of a model; of sharded ones, the shards."""
        self._models.append(model)
        for tensor in [*model.parameters(), *model.buffers()]:
            self._mark(tensor, "parameters")
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._complete_gradient)

    def has_on_host(self, value: object) -> bool:
        """Return whether a value is a tensor that was moved to the host, or computed from such tensors."""
        return isinstance(value, Tensor) and self._kind_of(value) == _HOST

    def move(self, tensor: Tensor, *, to_host: bool) -> Tensor:
        """Copy a tensor to the host, as `Tensor.cpu` does, or to the device."""
        if self.is_paused or self.has_on_host(tensor) == to_host:
            return tensor
        with replaced_attributes(self, {"_moved_to": _HOST if to_host else "working"}):
            return tensor.clone()

    @contextlib.contextmanager
    def stepping(self, optimizer: Optimizer) -> Generator[None]:
        """Attribute new tensors that stay to the optimizer's state within the block."""
        self._is_stepping = True
        try:
            yield
        finally:
            for leaf in tree_leaves([*optimizer.state.values()]):
                if isinstance(leaf, Tensor) and not self.has_on_host(plain_tensor(local_part(leaf))):
                    self._mark(leaf, "optimizer")
            for model in self._models:
                for parameter in model.parameters():  # FSDP may have replaced it in its first forward pass.
                    self._mark(parameter, "parameters")
            self._state_bytes = self._bytes["optimizer"]
            self._update_peaks()
            self._is_stepping = False

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

    def _by_part(self) -> dict[str, int]:
        parts = {kind: self._bytes[kind] for kind in ("parameters", "gradients", "optimizer", "working")}
        parts["working"] += self._bytes["casts"]
        return parts

    def _update_peaks(self) -> None:
        parts = self._by_part()
        if self._is_stepping:
            self._peak_of_steps = max(parts, self._peak_of_steps, key=lambda parts: sum(parts.values()))
            return
        elements = self._complete_elements
        now = MemoryPeak(activations=self._bytes["working"], casts=self._bytes["casts"], gradients=elements)
        most, widest = self._peaks.get(elements, (now, now))
        if now.activations + now.casts > most.activations + most.casts:
            most = now
        if now.activations > widest.activations:
            widest = now
        self._peaks[elements] = (most, widest)
        # The state is added to the passes at the end.
        before = self._peak_of_passes
        if sum(parts.values()) - parts["optimizer"] > sum(before.values()) - before["optimizer"]:
            self._peak_of_passes = parts


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
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        parameters = {
            id(parameter): nn.Parameter(
                torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=parameter.requires_grad
            )
            for parameter in model.parameters()
        }
    model = copy.deepcopy(model, parameters)  # with the fakes in place of its parameters
    with fakes, MemoryTracker(fakes) as tracker:
        tracker.add(model)
        with precision:
            held = passes(model)
        (held if isinstance(held, Tensor) else held[0]).backward()
        del held
    return tracker.moments


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
