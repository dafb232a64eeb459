"""Record a rank's collectives, files, loaders and memory, on fake tensors whose values are made up."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from accel_inspect.check.record import File, LoaderRecord, RecordedCollective
from accel_inspect.check.strategy import FAKES, REAL, EngineStates, FakeStrategy
from accel_inspect.estimate.trace import MemoryTracker, storage_key, wraps_tensors
from accel_inspect.trial import source_line
from accel_ops.modules import replaced_attributes
from accel_ops.tree import local_part
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_plugins.sharding.state import local_metadata_file
from accel_plugins.strategy import Bundle, Strategy, StrategySpec
from accel_state.torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    disable_current_modes,
    tree_leaves,
    tree_map,
)
from accel_train.observing import Observer

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_state.remote import AnyPath
    from accel_train.checkpoint.context import CheckpointContext

_MOST_INDICES = 2**20
"""Indices of a sampler that are compared at most."""


class CollectiveRecorder(Observer):
    """Recorder of one rank. It replaces strategies that are not `REAL` by fakes, and reads few batches.

    Attributes:
        models: The prepared models.
        strategy: The name of the strategy, with its axes.
        counted_as: The name of its estimate, if its own code does not run; empty if there is none.
        setup: What the estimate needs to know of it.
        is_sharded: Whether models are sharded as in training, so that their tracked memory is the rank's.
        is_offloaded: Whether parameters, gradients and optimizer states are on the host.
        tracker: Tracks the memory of the rank, from the first prepared model on.
        is_on_real_tensors: Whether tensors are currently real.
        is_silent: Whether collectives belong to one that is recorded already.
        stage: The stage of the pipeline whose ranks alone take part.
    """

    def __init__(self, batches: int = 0) -> None:
        self._num_batches = batches
        self.events: list[RecordedCollective] = []
        self.files: list[File] = []
        self.loaders: dict[int, LoaderRecord] = {}
        self.models: list[nn.Module] = []
        self.strategy = self.counted_as = ""
        self.setup: dict[str, Any] = {}
        self.is_sharded = self.is_offloaded = self.is_on_real_tensors = self.is_silent = False
        self.stage: int | None = None
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.tracker = MemoryTracker(self._fakes)
        self.tracker.is_paused = True

    @contextlib.contextmanager
    def on_fake_tensors(self) -> Generator[None]:
        """Run the block on fake tensors."""
        with self._fakes, FakeValueMode(self.record), self.tracker:
            yield

    @contextlib.contextmanager
    def on_real_tensors(self) -> Generator[None]:
        """Run the block on real tensors; earlier ones are fake."""
        with self.having(is_on_real_tensors=True), disable_current_modes(), FakeValueMode(self.record):
            yield

    def having(self, **attributes: Any) -> AbstractContextManager[None]:
        """Set attributes within the block."""
        return replaced_attributes(self, attributes)

    def paused(self) -> AbstractContextManager[None]:
        """Do not count tensors that are created and freed within the block."""
        return replaced_attributes(self.tracker, {"is_paused": True})

    def track(self, models: Sequence[nn.Module]) -> None:
        """Track the memory of prepared models."""
        self.models += models
        self.tracker.is_paused = False
        for model in models:
            self.tracker.add(model)

    def record(self, kind: str, peer: int | None = None, transferred: int = 0) -> None:
        """Record a collective, or with a `peer` that many bytes sent to it or received from it."""
        if not (self.is_on_real_tensors or self.is_silent):
            self.events.append(
                RecordedCollective(
                    kind=kind, where=source_line(), stage=self.stage, peer=peer, transferred=transferred
                )
            )

    def record_file(self, name: str, nbytes: int) -> None:
        """Record a file."""
        self.files.append(File(name=name, nbytes=nbytes, where=source_line()))

    def prepare_loader(self, real: Any, *args: Any, **options: Any) -> Any:
        """Prepare a loader, and record it."""
        with self.on_real_tensors():
            loader = real(*args, **{**options, "dispatch_batches": False})
            sampler, indices = loader.get_sampler(), ""
            # The indices of torch's samplers do not depend on the rank.
            is_custom = loader.is_sharded and not type(sampler).__module__.startswith("torch.")
            if is_custom and isinstance(sampler, Sized) and len(sampler) <= _MOST_INDICES:
                indices = repr(sorted(copy.deepcopy(sampler)))  # pyright: ignore[reportArgumentType] - it iterates
            shard = options.get("process_index") or 0
            self.loaders[id(loader)] = LoaderRecord(where=source_line(), shard=shard, indices=indices)
        return loader

    def record_batch(self, loader: Any, batch: Any) -> None:
        """Record a batch of a prepared loader, if its tensors have values of several kinds."""
        known = self.loaders.get(id(loader))
        leaves = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.numel() > 1)
        tensors = [leaf.contiguous().flatten() for leaf in leaves if not is_fake(leaf)]
        if known is not None and any(bool((leaf != leaf[0]).any()) for leaf in tensors):
            values = b"".join(leaf.view(torch.uint8).numpy().tobytes() for leaf in tensors)
            batches = (*known.batches, hashlib.sha256(values).hexdigest())
            self.loaders[id(loader)] = replace(known, batches=batches)

    def build(self, spec: StrategySpec, *arguments: Any) -> Strategy:
        """Build a strategy, or its fake, whose models and steps are recorded."""
        handlers, name = arguments[-1], spec.name
        self.is_sharded = name in REAL
        with self.on_real_tensors():  # Meshes need real values.
            if self.is_sharded:
                built = super().build(spec, *arguments)
            else:
                built = FAKES.get(name, FakeStrategy)(self, name, *arguments)
        if built.mesh is not None:
            axes = dict(zip(built.mesh.mesh_dim_names or (), built.mesh.shape, strict=True))
            if (config := handlers.get(ParallelismConfig)) is not None and config.ep_enabled:
                axes["ep"] = config.ep_size
            sizes = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
            name = f"{name}: {sizes}" if sizes else name
        self.strategy = name
        self.setup["width"] = 4 if built.precision.name == "no" else 2
        offload = getattr(handlers.get(FullyShardedDataParallelPlugin), "cpu_offload", None)
        self.is_offloaded = spec.name == "fsdp2" and isinstance(offload, CPUOffloadPolicy)
        wrap, step = built.wrap, built.step

        def wrap_recorded(bundle: Bundle, *, evaluation: bool = False, **options: Any) -> Bundle:
            is_trained = bool(bundle.models) and not evaluation
            if is_trained:
                with self.having(is_silent=False):
                    self.record("prepare")
            wrapped = wrap(bundle, evaluation=evaluation, **options)
            if is_trained:
                self.track(wrapped.models)
            return wrapped

        def step_recorded(optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
            with self.tracker.stepping(optimizer):
                return step(optimizer, closure)

        built.wrap, built.step = wrap_recorded, step_recorded
        return built

    def prepare(self, accelerator: Any, bundle: Bundle, run: Callable[[], Bundle]) -> Bundle:
        """Prepare objects; of models, what this sends is recorded as one operation."""
        del accelerator
        with self.having(is_silent=bool(bundle.models)):
            return run()

    def iterate(self, real: Any, loader: Any) -> Iterator[Any]:
        """Read a loader that is not prepared as a prepared one."""
        return real(loader) if self.is_on_real_tensors else self.batches(loader, lambda: real(loader))

    def batches(self, loader: Any, read: Callable[[], Iterator[Any]]) -> Generator[Any]:
        """Yield the first batches as fake tensors, read outside of fake mode; mark the last one."""

        def fake_like(leaf: Any) -> Any:
            return torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf

        vars(loader).update(num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False)
        with self.on_real_tensors():
            real_batches = read()
        for number in range(1, self._num_batches + 1):
            with self.on_real_tensors():
                upcoming = [*itertools.islice(real_batches, 1)]
                self.record_batch(loader, upcoming)
            if not upcoming:
                return
            if number == self._num_batches:
                vars(loader)["end_of_dataloader"] = True
            yield tree_map(fake_like, upcoming[0])
        with self.on_real_tensors():
            del real_batches

    def saved(self, run: CheckpointContext, target: AnyPath, parts: Callable[[Path], list[Any]]) -> bool:
        """Record the files that this rank would write, and write none."""
        self.record("save_state")
        folder = Path(str(target))
        with suppress(FileExistsError):  # another rank was first
            folder.mkdir(parents=True)  # a copy, for hooks
        is_engine = isinstance(run.strategy.states, EngineStates)
        with self.having(is_silent=True), self.paused() if is_engine else nullcontext():
            for part in parts(folder):
                # The metadata of shards are there while others are written.
                if Path(part.name).name != local_metadata_file(run.rank):
                    self.record_file(str(folder / part.name), nbytes_of(part.state))
        return False


def nbytes_of(data: Any) -> int:
    """Sum the bytes of all fake tensors in nested data, each storage once."""
    tensors = (local_part(leaf) for leaf in tree_leaves(data) if isinstance(leaf, Tensor))
    storages = {
        storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors if is_fake(tensor)
    }
    return sum(storages.values())


_ATEN: Any = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
_LOCAL = frozenset({"wait_tensor", "wait_tensors"})
_TRANSFERS = {"send": "send", "recv": "receive"}


_ERROR_TESTS = frozenset(
    {_ATEN.isnan.default, _ATEN.isinf.default, _ATEN.isposinf.default, _ATEN.isneginf.default}
)
"""Operations that test for an error: their fake value is False."""

_KEEP_FALSE = frozenset(
    {
        _ATEN.any.default, _ATEN.any.dim, _ATEN.any.dims, _ATEN.all.default, _ATEN.all.dim, _ATEN.sum.default,
        _ATEN.logical_or.default, _ATEN.bitwise_or.Tensor, _ATEN.alias.default, _ATEN.detach.default,
        _ATEN.view.default, _ATEN.clone.default, _ATEN._to_copy.default, _ATEN.select.int,
    }
)  # fmt: skip
"""Operations whose result is False if all that it is computed from is."""


class FakeValueMode(TorchDispatchMode):
    """Mode that returns values for fake tensors, and calls `record` with the script's own collectives.

    Of what a rank sends or receives, `record` also gets the other rank and the number of bytes.
    """

    def __init__(self, record: Callable[..., None]) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and is_fake(args[0]):
            return args[0].device
        answer = ANSWERS.get(func)
        if answer is not None and is_fake(args[0]):
            return answer(*args, **(kwargs or {}))
        if any(map(wraps_tensors, types)):
            return NotImplemented  # It is dispatched again with the tensors inside.
        if func.namespace in _COMMUNICATION:
            name = func.__name__.partition(".")[0].strip("_")
            if name in _TRANSFERS:
                tensors, group, peer = args[:3]
                ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
                self._record(_TRANSFERS[name], ranks[peer], nbytes_of(tensors))
            elif name not in _LOCAL:
                self._record(name.removesuffix("_base"))
        if func is _ATEN.index.Tensor:
            args = (args[0], _without_masks(args[1]))
        result = func(*args, **(kwargs or {}))
        if _defaults_to_false(func, args):
            result.is_fake_no = True
        return result


def fake_value(tensor: Any) -> bool | int | float:
    """Return the value of a fake tensor: one, or False where True would indicate an error.

    Example:
        >>> fake_value(torch.zeros(1)), fake_value(torch.zeros(1, dtype=torch.bool))
        (1.0, True)
    """
    is_yes = not getattr(tensor, "is_fake_no", False)
    if tensor.dtype == torch.bool:
        return is_yes
    return float(is_yes) if tensor.is_floating_point() else int(is_yes)


def is_fake(tensor: Any) -> bool:
    """Return whether a tensor is fake."""
    return isinstance(tensor, FakeTensor)


def _defaults_to_false(func: Any, args: tuple[Any, ...]) -> bool:
    if func in _ERROR_TESTS:
        return is_fake(args[0])
    if func is _ATEN.ne.Tensor:  # A value that differs from itself is no number.
        return args[0] is args[1]
    if func not in _KEEP_FALSE:
        return False
    tensors = (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
    return all(getattr(tensor, "is_fake_no", False) for tensor in tensors)


def _without_masks(indices: Any) -> list[Any]:
    """Replace masks by the indices that they select."""
    replaced: list[Any] = []
    for index in indices:
        if is_fake(index) and index.dtype in {torch.bool, torch.uint8}:
            replaced += [index.new_empty(index.numel(), dtype=torch.int64)] * max(1, index.ndim)
        else:
            replaced.append(index)
    return replaced


def _unique(
    tensor: Tensor, ordered: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    del ordered
    positions = tensor.new_empty(tensor.shape if return_inverse else 0, dtype=torch.int64)
    counts = tensor.new_empty(tensor.numel() if return_counts else 0, dtype=torch.int64)
    return tensor.reshape(-1).clone(), positions, counts


ANSWERS: Mapping[Any, Callable[..., Any]] = {
    _ATEN._local_scalar_dense.default: fake_value,
    _ATEN.is_nonzero.default: lambda tensor: bool(fake_value(tensor)),
    _ATEN.equal.default: lambda *_: True,
    _ATEN.allclose.default: lambda *_, **__: True,
    _ATEN.nonzero.default: lambda x: x.new_empty((x.numel(), x.ndim), dtype=torch.int64),
    _ATEN.masked_select.default: lambda x, mask: torch.broadcast_tensors(x, mask)[0].reshape(-1).clone(),
    _ATEN._unique2.default: _unique,
}
"""The functions that answer for fake tensors, by operation."""
