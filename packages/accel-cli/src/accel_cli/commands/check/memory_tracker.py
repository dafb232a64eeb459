"""Track the memory of a rank while its strategy's code runs on fake tensors."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel_cli.commands.estimate.memory import ADAM
from accel_cli.commands.estimate.trace import storage_key, wraps_tensors
from accel_ops.dtensors import local_part
from accel_plugins.fp8.weights import plain_tensor

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.optim import Optimizer

KINDS = ("parameters", "gradients", "optimizer", "working")
"""What is counted on its own; `working` is the rest: activations, what is gathered, what communicates."""

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_DEVICE = torch.ops.prim.device.default


class Meter(TorchDispatchMode):
    """Tracks the live storages of a rank, and the moments of its peaks.

    Sharded parameters, gradients and states count with the rank's shard. As in
    `torch.distributed._tools.mem_tracker`, which supports one device only, operations on DTensors are seen as
    those on their shards, and sizes follow `UntypedStorage.resize_`, by which FSDP frees gathered parameters.

    Args:
        fakes: The mode of fake tensors. DTensor may have another one, which allocates nothing.

    Attributes:
        is_paused: Whether new tensors take no memory of the rank.
        host: Peak of host bytes: of tensors that were moved there, and of all computed from them.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self._fakes = fakes
        self._alive: dict[int, list[Any]] = {}
        self._bytes: dict[str, int] = dict.fromkeys((*KINDS, "host"), 0)
        self._in_passes: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._in_steps: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._kind = "working"
        self._models: list[nn.Module] = []
        self._is_stepping = False
        self._state = 0
        self.is_paused = False
        self.host = 0

    def __enter__(self) -> Meter:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resized()  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)  # pyright: ignore[reportArgumentType]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device  # four of five calls are this one
        if any(map(wraps_tensors, types)):
            return NotImplemented  # it is dispatched again with the tensors inside
        # On fake tensors, waiting would create another tensor.
        result = args[0] if func is _WAIT else func(*args, **(kwargs or {}))
        if active_fake_mode() is self._fakes and not self.is_paused:
            kind = self._kind
            if kind == "working" and self._bytes["host"] and any(map(self.has_on_host, tree_leaves(args))):
                kind = "host"
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._see(leaf, kind)
            self._update_peak()
        return result

    def has_on_host(self, leaf: object) -> bool:
        """Return whether a value is a tensor that was moved to the host, or computed from one there."""
        return isinstance(leaf, Tensor) and self._alive.get(storage_key(leaf), ("",))[0] == "host"

    @contextlib.contextmanager
    def moving(self, *, to_host: bool) -> Generator[None]:
        """Place new tensors on the host within the block, or on the device."""
        before, self._kind = self._kind, "host" if to_host else "back"
        try:
            yield
        finally:
            self._kind = before

    def add(self, model: nn.Module) -> None:
        """Track a prepared model, and its gradients from now on."""
        self._models.append(model)
        self._mark([*model.parameters(), *model.buffers()], "parameters")
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._finish)

    @contextlib.contextmanager
    def stepping(self, optimizer: Optimizer) -> Generator[None]:
        """Attribute new tensors that stay to the optimizer's state within the block."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._mark(_tensors_in(optimizer.state.values()), "optimizer")
            for model in self._models:  # FSDP may have replaced them in its first forward pass
                self._mark(model.parameters(), "parameters")
            self._state = self._bytes["optimizer"]
            self._update_peak()
            self._is_stepping = False

    @property
    def device_bytes(self) -> int:
        """Bytes that are alive on the device at present."""
        return sum(self._bytes[kind] for kind in KINDS)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes at the rank's peak, by kind.

        The optimizer's state counts in every pass but the first; if no step was tracked, that of Adam.
        """
        state = self._state or ADAM * sum(
            local_part(one).numel()
            for model in self._models
            for one in model.parameters()
            if one.requires_grad
        )
        in_passes = {**self._in_passes, "optimizer": state}
        return max(in_passes, self._in_steps, key=lambda parts: sum(parts.values()))

    def _finish(self, parameter: Tensor) -> None:
        self._mark([parameter.grad], "gradients")

    def _mark(self, tensors: Iterable[Any], kind: str) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                part = plain_tensor(local_part(tensor))
                self._see(part, kind)
                entry = self._alive.get(storage_key(part))
                if entry is None:
                    continue
                self._bytes[entry[0]] -= entry[1]
                self._bytes[kind] += entry[1]
                entry[0] = kind

    def _see(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key in self._alive or tensor.is_meta:
            return

        def on_free(_: object) -> None:
            entry = self._alive.pop(key, None)
            if entry is not None:
                self._bytes[entry[0]] -= entry[1]

        size = storage.nbytes()
        kind = "working" if kind == "back" else kind
        self._alive[key] = [kind, size, weakref.ref(storage, on_free)]
        self._bytes[kind] += size

    def _resized(self) -> Any:
        real = self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = real(storage, size)
            entry = self._alive.get(storage._cdata)  # pyright: ignore[reportPrivateUsage] - as `storage_key`
            if entry is not None:
                self._bytes[entry[0]] += storage.nbytes() - entry[1]
                entry[1] = storage.nbytes()
                self._update_peak()
            return result

        return resize_

    def _update_peak(self) -> None:
        self.host = max(self.host, self._bytes["host"])
        now: dict[str, int] = {kind: self._bytes[kind] for kind in KINDS}
        if self._is_stepping:
            if sum(now.values()) >= sum(self._in_steps.values()):
                self._in_steps = now
        elif _without_state(now) > _without_state(self._in_passes):
            self._in_passes = now


def _without_state(parts: dict[str, int]) -> int:
    return sum(parts.values()) - parts["optimizer"]


def _tensors_in(states: Iterable[Any]) -> list[Tensor]:
    return [leaf for state in states for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
