"""Record collectives, memory; fake values."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_cli.commands.check.record import File, LoaderRecord, RecordedCollective, SelectedStrategy
from accel_cli.commands.estimate.memory import ADAM, Buckets
from accel_cli.commands.estimate.trace import LiveStorageTracker, storage_key, wraps_tensors
from accel_ops.tree import local_part
from accel_plugins.fp8.recipe import plain_tensor
from accel_state.rank_status import call_site, source_location
from accel_state.torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    active_fake_mode,
    disable_current_modes,
    storage_address,
    tree_leaves,
    tree_map,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer


KINDS = ("parameters", "gradients", "optimizer", "working")
"""What is counted on its own; `working` is the rest: activations, what is gathered, what communicates."""

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_DEVICE = torch.ops.prim.device.default


class RankMemoryTracker(TorchDispatchMode):
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

    def __enter__(self) -> RankMemoryTracker:
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
            entry = self._alive.get(storage_address(storage))
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


_ATEN: Any = torch.ops.aten
_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
_LOCAL = frozenset({"wait_tensor", "wait_tensors"})

_NEVER = frozenset({_ATEN.isnan.default, _ATEN.isinf.default, _ATEN.isposinf.default, _ATEN.isneginf.default})
"""What asks whether something has gone wrong: it has not."""

_STILL = frozenset(
    {
        _ATEN.any.default, _ATEN.any.dim, _ATEN.any.dims, _ATEN.all.default, _ATEN.all.dim, _ATEN.sum.default,
        _ATEN.logical_or.default, _ATEN.bitwise_or.Tensor, _ATEN.alias.default, _ATEN.detach.default,
        _ATEN.view.default, _ATEN.clone.default, _ATEN._to_copy.default, _ATEN.select.int,
    }
)  # fmt: skip
"""What keeps a no a no, if all that it is computed from is one."""


class FakeValueMode(TorchDispatchMode):
    """Mode that returns values for fake tensors, and calls `saw` with the script's own collectives."""

    def __init__(self, saw: Callable[[str], None]) -> None:
        super().__init__()
        self._saw = saw

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and is_without_values(args[0]):
            return args[0].device
        answer = ANSWERS.get(func)
        if answer is not None and is_without_values(args[0]):
            return answer(*args, **(kwargs or {}))
        if any(map(wraps_tensors, types)):
            return NotImplemented  # it is dispatched again with the tensors inside
        if func.namespace in _COMMUNICATION:
            name = func.__name__.partition(".")[0].strip("_")
            if name not in _LOCAL:
                self._saw(name.removesuffix("_base"))
        if func is _ATEN.index.Tensor:
            args = (args[0], _without_masks(args[1]))
        result = func(*args, **(kwargs or {}))
        if _defaults_to_false(func, args):
            result.is_made_up_no = True
        return result


def fake_value(tensor: Any) -> bool | int | float:
    """Return a value for a fake tensor: one; False where it indicates an error.

    Example:
        >>> fake_value(torch.zeros(1)), fake_value(torch.zeros(1, dtype=torch.bool))
        (1.0, True)
    """
    is_yes = not getattr(tensor, "is_made_up_no", False)
    if tensor.dtype == torch.bool:
        return is_yes
    return float(is_yes) if tensor.is_floating_point() else int(is_yes)


def is_without_values(tensor: Any) -> bool:
    """Return whether a tensor is fake."""
    return isinstance(tensor, FakeTensor)


def _defaults_to_false(func: Any, args: tuple[Any, ...]) -> bool:
    if func in _NEVER:
        return is_without_values(args[0])
    if func is _ATEN.ne.Tensor:  # how a value is tested for being a number
        return args[0] is args[1]
    if func not in _STILL:
        return False
    found = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return all(getattr(leaf, "is_made_up_no", False) for leaf in found)


def _without_masks(indices: Any) -> list[Any]:
    """Replace masks by the indices that they select."""
    found: list[Any] = []
    for index in indices:
        if (
            isinstance(index, Tensor)
            and is_without_values(index)
            and index.dtype in {torch.bool, torch.uint8}
        ):
            found += [index.new_empty(index.numel(), dtype=torch.int64)] * max(1, index.ndim)
        else:
            found.append(index)
    return found


def _nonzero(tensor: Tensor) -> Tensor:
    return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)


def _selected(tensor: Tensor, mask: Tensor) -> Tensor:
    return torch.broadcast_tensors(tensor, mask)[0].reshape(-1).clone()


def _unique(
    tensor: Tensor, ordered: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    del ordered
    positions = tensor.new_empty(tensor.shape if return_inverse else 0, dtype=torch.int64)
    counts = tensor.new_empty(tensor.numel() if return_counts else 0, dtype=torch.int64)
    return tensor.reshape(-1).clone(), positions, counts


def _yes(*tensors: Any) -> bool:
    return bool(fake_value(tensors[0]))


ANSWERS: Mapping[Any, Callable[..., Any]] = {
    _ATEN._local_scalar_dense.default: fake_value,
    _ATEN.is_nonzero.default: _yes,
    _ATEN.equal.default: lambda *_: True,
    _ATEN.nonzero.default: _nonzero,
    _ATEN.masked_select.default: _selected,
    _ATEN._unique2.default: _unique,
}
"""By the operation that asks."""


_MOST_INDICES = 2**20


@dataclass(kw_only=True)
class CollectiveRecorder:
    """Recorder of one rank.

    Args:
        fakes: The mode of fake tensors.
        ledger: Tracks the memory of passes of unsharded models.
        meter: Tracks the memory of sharded models and everything else.
        buckets: The buckets that DeepSpeed would allocate.
        on_rank: Elements of parameters that Megatron would keep on the rank.
        fp8: The title of the library that would multiply matrices in 8 bits.
    """

    events: list[RecordedCollective] = field(default_factory=list[RecordedCollective])
    files: list[File] = field(default_factory=list[File])
    loaders: dict[int, LoaderRecord] = field(default_factory=dict[int, LoaderRecord])
    models: list[nn.Module] = field(default_factory=list["nn.Module"])
    strategy: SelectedStrategy = field(default_factory=SelectedStrategy)
    fakes: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    ledger: LiveStorageTracker | None = None
    meter: RankMemoryTracker | None = None
    buckets: Buckets = field(default_factory=Buckets)
    on_rank: int = 0
    fp8: str = ""
    _outside: int = 0
    _silent: int = 0
    _held: int = 0

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Run the block on fake tensors."""
        with contextlib.ExitStack() as stack:
            self._stack = stack
            stack.enter_context(self.fakes)
            stack.enter_context(FakeValueMode(self.saw))
            yield

    def prepared(self, models: Sequence[nn.Module], *, sharded: bool = False) -> None:
        """Track the memory of prepared models."""
        self.models += models
        if sharded:
            if self.meter is None:
                self.meter = self._stack.enter_context(RankMemoryTracker(self.fakes))
            for model in models:
                self.meter.add(model)
            return
        if self.ledger is None:
            self.ledger = self._stack.enter_context(LiveStorageTracker(models[0]))
        for model in models:
            self.ledger.add_weights(model)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self.ledger.finish)

    @contextlib.contextmanager
    def stepping(self, optimizer: Optimizer) -> Generator[None]:
        """Attribute tensors that are created within the block to the optimizer."""
        with contextlib.ExitStack() as stack:
            if self.ledger is not None:
                stack.enter_context(self.ledger.stepping())
            if self.meter is not None:
                stack.enter_context(self.meter.stepping(optimizer))
            yield

    @contextlib.contextmanager
    def uncounted(self) -> Generator[None]:
        """Leave tensors that are created and freed within the block uncounted."""
        meter = self.meter
        if meter is None:
            yield
            return
        before, meter.is_paused = meter.is_paused, True
        try:
            yield
        finally:
            meter.is_paused = before

    @contextlib.contextmanager
    def silence(self) -> Generator[None]:
        """Record no collectives within the block: they belong to one that is recorded already."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    def saw(self, kind: str) -> None:
        """Record a collective."""
        if not (self.is_outside or self._silent):
            counters = [one for one in (self.ledger, self.meter) if one is not None]
            nbytes = sum(one.device_bytes for one in counters)
            self.events.append(RecordedCollective(kind=kind, where=source_line(), nbytes=nbytes))

    def wrote(self, name: str, nbytes: int, *, form: str = "", full_nbytes: int | None = None) -> None:
        """Record a file."""
        size = nbytes if full_nbytes is None else full_nbytes
        self.files.append(File(name=name, nbytes=nbytes, where=source_line(), form=form, full_nbytes=size))

    def made_loader(self, loader: Any, shard: int) -> None:
        """Record a prepared loader."""
        sampler = loader.get_sampler()
        # The indices of torch's samplers do not depend on the rank.
        is_custom = loader.is_sharded and not type(sampler).__module__.startswith("torch.")
        indices = ""
        if is_custom and isinstance(sampler, Sized) and len(sampler) <= _MOST_INDICES:
            indices = _digest(repr(sorted(copy.deepcopy(sampler))).encode())  # pyright: ignore[reportArgumentType] - it iterates
        self.loaders[id(loader)] = LoaderRecord(where=source_line(), shard=shard, indices=indices)

    def read_batch(self, loader: Any, batch: Any) -> None:
        """Record a batch of a prepared loader, if its tensors have values of several kinds."""
        known = self.loaders.get(id(loader))
        leaves = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.numel() > 1)
        tensors = [leaf.contiguous().flatten() for leaf in leaves if not is_without_values(leaf)]
        if known is not None and any(bool((leaf != leaf[0]).any()) for leaf in tensors):
            values = b"".join(leaf.view(torch.uint8).numpy().tobytes() for leaf in tensors)
            self.loaders[id(loader)] = replace(known, batches=(*known.batches, _digest(values)))

    @property
    def is_outside(self) -> bool:
        """Whether tensors are real at present."""
        return self._outside > 0

    @contextlib.contextmanager
    def outside(self) -> Generator[None]:
        """Run the block on real tensors."""
        self._outside += 1
        try:
            with disable_current_modes(), FakeValueMode(self.saw):  # tensors of before are fake
                yield
        finally:
            self._outside -= 1

    def moved(self, tensor: Tensor, *, to_host: bool) -> Tensor:
        """Copy a tensor to the host, as `Tensor.cpu` does, or to the device."""
        counters = [one for one in (self.ledger, self.meter) if one is not None]
        if not counters or any(one.has_on_host(tensor) for one in counters) == to_host:
            return tensor
        with contextlib.ExitStack() as stack:
            for one in counters:
                stack.enter_context(one.moving(to_host=to_host))
            return tensor.clone()

    def holds_on_host(self, nbytes: int) -> None:
        """Record a temporary use of host memory for which no tensor exists in the check."""
        self._held = max(self._held, nbytes)

    @property
    def host(self) -> int:
        """Peak of the bytes that were moved to the host."""
        counters = [one.host for one in (self.ledger, self.meter) if one is not None]
        return max([self._held, *counters])

    def without_values(self, data: Any) -> Any:
        """Replace the tensors of nested data by fake ones on the CPU."""
        return tree_map(
            lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf, data
        )


def _digest(values: bytes) -> str:
    return hashlib.sha256(values).hexdigest()


def source_line() -> str:
    """Return file and line of the script that is running."""
    return source_location(call_site(sys._getframe(1)))[0]  # pyright: ignore[reportPrivateUsage] - public in all but name


def nbytes_of(data: Any) -> int:
    """Sum the bytes of all tensors in nested data, each storage once."""
    storages: dict[int, int] = {}

    def add(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            storages[storage_key(leaf)] = leaf.untyped_storage().nbytes()
        return leaf

    tree_map(add, data)
    return sum(storages.values())
