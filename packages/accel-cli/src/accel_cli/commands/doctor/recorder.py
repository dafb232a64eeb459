"""Record what a script does with the objects that `prepare` returns, on real tensors."""

from __future__ import annotations

import functools
import gc
import hashlib
import math
import random
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from accel_cli.commands.check.recorder import source_line
from accel_cli.commands.doctor.record import (
    ONE,
    PLAIN,
    RANKS,
    RESCALED,
    RESUMED,
    Backward,
    Digest,
    DoctorTask,
    Gathered,
    LoaderPass,
    ReadBatch,
    RunRecord,
    Schedule,
    Step,
)
from accel_ops.modules import extract_model_from_parallel
from accel_ops.tree import local_part, walk
from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_state.accelerator_state import GradientState
from accel_train import Accelerator
from accel_train.accelerator.build import PreparedObjects
from accel_train.data.adapter import PreparedLoader
from accel_train.data.dispatcher import DataLoaderDispatcher
from accel_train.data.samplers import innermost_sampler

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel_train.data.shards import BatchSamplerShard

LOSSES_ONLY = frozenset({"deepspeed", "fsdp1", "megatron", "pipeline", "xla", "xla_fsdp"})
"""Strategies that keep gradients and weights in a layout of their own."""

_PASSES = 2
"""Passes over a training loader, after which the script ends."""

_END: Any = object()


@dataclass(kw_only=True)
class TrainingRecorder:
    """Recorder of one process.

    Args:
        shards: The number of ranks with batches of their own, whose batches a single process gets at once.
    """

    task: DoctorTask
    save_state: Callable[..., Any] = Accelerator.save_state
    load_state: Callable[..., Any] = Accelerator.load_state
    shards: int = 1
    shard: int = 0
    strategy: str = ""
    precision: str = "no"
    clock: str | None = None
    differs_by: str = ""
    accelerator: Any = None
    batches: list[ReadBatch] = field(default_factory=list[ReadBatch])
    backwards: list[Backward] = field(default_factory=list[Backward])
    steps: list[Step] = field(default_factory=list[Step])
    passes: list[LoaderPass] = field(default_factory=list[LoaderPass])
    gathered: list[Gathered] = field(default_factory=list[Gathered])
    modules: dict[str, None] = field(default_factory=dict[str, None])
    norms: dict[str, int] = field(default_factory=dict[str, int])
    events: dict[tuple[str, str], None] = field(default_factory=dict[tuple[str, str], None])
    waits: dict[str, int] = field(default_factory=dict[str, int])
    is_reading: bool = False
    """Whether a prepared loader reads, so that the loaders of torch within are its own."""
    is_paused: bool = False
    """Whether steps of optimizers are the library's own."""
    has_saved: bool = False
    """Whether the script has called `save_state`."""
    draws: str = ""
    """Where a backward pass begins before which the script has drawn random numbers, if there is one."""
    _loaders: list[Any] = field(default_factory=list[Any])
    _optimizers: list[Optimizer] = field(default_factory=list[Optimizer])
    _training: set[int] = field(default_factory=set[int])
    _plans: dict[int, list[tuple[int, ...]]] = field(default_factory=dict[int, "list[tuple[int, ...]]"])
    _retained: dict[int, list[list[int]]] = field(default_factory=dict[int, "list[list[int]]"])
    _is_saved: bool = False
    _started: float = field(default_factory=time.perf_counter)
    _idle_since: float = field(default_factory=time.perf_counter)
    _schedulers: list[LRScheduler] | None = None
    _per_round: dict[int, int] = field(default_factory=dict[int, int])
    _open_passes: int = 0
    _random: str = ""

    @property
    def joins(self) -> bool:
        """Whether this process gets the batches of all ranks at once."""
        return self.task.run in {ONE, RESCALED}

    @property
    def limit(self) -> int:
        """The number of batches of a pass."""
        limit = self.task.steps * GradientState().num_steps
        return limit * self.shards if self.task.run == PLAIN else limit

    @property
    def _prepared(self) -> PreparedObjects:
        return PreparedObjects() if self.accelerator is None else self.accelerator._parts.prepared

    def finish(self, stopped: str) -> RunRecord:
        """Return the record."""
        return RunRecord(
            run=self.task.run,
            rank=self.task.rank,
            world=self.task.world,
            shards=self.shards,
            shard=self.shard,
            strategy=self.strategy,
            precision=self.precision,
            clock=self.clock,
            batches=tuple(self.batches),
            backwards=tuple(self.backwards),
            steps=tuple(self.steps),
            passes=tuple(self.passes),
            gathered=tuple(self.gathered),
            modules=tuple(self.modules),
            tied=self._tied(),
            norms=self.norms,
            events=tuple(self.events),
            waits=self.waits,
            draws=self.draws,
            nbytes=sum(
                parameter.numel() * parameter.element_size()
                for model in self._prepared.models
                for parameter in model.parameters()
                if parameter.requires_grad
            ),
            differs_by=self.differs_by,
            losses=self.strategy in LOSSES_ONLY,
            seconds=time.perf_counter() - self._started,
            stopped=stopped,
        )

    # 1. What is prepared.

    def record_strategy(self, strategy: Any) -> None:
        """Record the strategy of the ranks, which all processes read."""
        path = Path(self.task.folder) / "shards"
        self.strategy = strategy.name
        if self.task.run in {RANKS, RESUMED}:
            self.shards, self.shard = strategy.sharding.num_shards, strategy.sharding.shard_index
            if self.task.rank == 0:
                path.write_text(str(self.shards))
        else:
            self.shards = int(path.read_text()) if path.is_file() else self.shards

    def record_prepared(self, accelerator: Any, models: Sequence[nn.Module]) -> None:
        """Record the order in which the modules of prepared models are executed."""
        self.accelerator = accelerator
        parts = accelerator._parts
        self.precision = accelerator.mixed_precision
        self.clock = parts.step_scheduler_per
        handler = parts.handlers.get(DistributedDataParallelKwargs)
        if handler is not None and handler.comm_hook.value != "no":
            self.differs_by = f"the communication hook {handler.comm_hook.value!r} rounds gradients"
        for loader in self._prepared.dataloaders:
            if isinstance(loader, DataLoaderDispatcher) and not parts.dataloading.split_batches:
                self._per_round[id(_shard_of(loader))] = self.shards
        for model in models:
            for name, module in extract_model_from_parallel(model).named_modules():
                if any(True for _ in module.parameters(recurse=False)):
                    module.register_forward_pre_hook(functools.partial(self._record_module, name))
                if isinstance(module, nn.RNNBase):
                    module.dropout = 0.0

    def _record_module(self, name: str, *_: Any) -> None:
        self.modules.setdefault(name)

    # 2. What loaders yield.

    def plan_epoch(
        self, iterate: Callable[..., Iterator[list[int]]], shard: BatchSamplerShard, position: int, order: Any
    ) -> Iterator[list[int]]:
        """Yield the first batches of an epoch, and the last one.

        A single process that stands for all ranks gets the batches of all of them at once.
        """
        parts = self.shards if self.joins and shard.num_processes == self.shards else 1
        batches = [*iterate(shard, position, order)]
        padded = dict(shard.padded)
        if parts > 1:
            others = [copy(shard) for _ in range(1, parts)]
            by_rank = [batches]
            reals = [padded]
            for index, other in enumerate(others, 1):
                other.process_index = index
                by_rank.append([*iterate(other, position, shard.order)])
                reals.append(other.padded)
            batches = [
                [sample for batch in together for sample in batch]
                for together in zip_longest(*by_rank, fillvalue=())
            ]
            padded = {}
            for number, together in enumerate(zip_longest(*by_rank, fillvalue=())):
                real = sum(
                    of_rank.get(number, len(batch)) for of_rank, batch in zip(reals, together, strict=True)
                )
                if real != len(batches[number]):
                    padded[number] = real
                    shard.padded_rows = len(batches[number])
        first = position // (shard.stride or 1)
        per_round = self._per_round.get(id(shard), 1)
        last = (len(batches) - 1) // per_round * per_round
        retained = [
            number
            for number in range(len(batches))
            if number >= last or first + number < (self.limit - 1) * per_round
        ]
        shard.padded.clear()
        shard.padded.update(
            {retained.index(number): real for number, real in padded.items() if number in retained}
        )
        self._plans[id(shard)] = [
            tuple(batch[: padded.get(number, len(batch))]) for number, batch in enumerate(batches)
        ]
        self._retained[id(shard)] = [batches[number] for number in retained]
        yield from self._retained[id(shard)]

    def watch(self, loader: Any, make: Callable[[], Iterator[Any]]) -> Generator[Any]:
        """Yield the batches of a pass, and record them."""
        if not any(loader is known for known in self._loaders):
            self._loaders.append(loader)
            at_save = self._loaders_at_save
            if self.resumes and at_save.is_file() and len(self._loaders) >= int(at_save.read_text()):
                self._resume()
        number = next(index for index, known in enumerate(self._loaders) if known is loader)
        epoch = sum(of_loader.loader == number for of_loader in self.passes)
        where = source_line()
        if number in self._training and epoch >= _PASSES:
            raise SystemExit(0)
        is_prepared = isinstance(loader, PreparedLoader)
        shard = _shard_of(loader)
        retained: list[list[int]] | None = None
        limit = self.limit
        inner: Any = None
        position = len(self.passes)
        self.passes.append(
            LoaderPass(
                loader=number,
                epoch=epoch,
                where=where,
                is_prepared=is_prepared,
                shuffles=_shuffles(loader),
                plan=None,
                states=_generators(loader.dataset) if loader.num_workers else (),
            )
        )
        count = 0
        self._open_passes += 1
        try:
            inner = self._reading(make)
            while (batch := self._reading(lambda: next(inner, _END))) is not _END:
                if not count and is_prepared and shard and not isinstance(loader, DataLoaderDispatcher):
                    retained = self._retained.get(id(shard))
                    self._set_plan(position, loader, self._plans.get(id(shard)))
                indices = retained[count] if retained is not None and count < len(retained) else ()
                self._record_batch(loader, number, epoch, batch, indices)
                count += 1
                is_cut = retained is None and count == limit
                if is_cut and is_prepared:
                    vars(loader).update(end_of_dataloader=True, remainder=0)
                self._random = _digest_of_generators()
                yield batch
                self._save()
                if is_cut:
                    break
        finally:
            self._open_passes -= 1
            if hasattr(inner, "close"):
                inner.close()

    def _reading(self, read: Callable[[], Any]) -> Any:
        before, self.is_reading = self.is_reading, True
        try:
            return read()
        finally:
            self.is_reading = before

    def _set_plan(self, position: int, loader: Any, plan: Sequence[tuple[int, ...]] | None) -> None:
        if plan is None:
            return
        resolve = _original_indices(loader.dataset)
        self.passes[position] = replace(
            self.passes[position], plan=tuple(tuple(map(resolve, batch)) for batch in plan)
        )

    def _record_batch(self, loader: Any, number: int, epoch: int, batch: Any, indices: Sequence[int]) -> None:
        tensors = {name: leaf for name, leaf in _named_tensors(batch).items() if leaf.dim() > 0}
        rows = max((len(leaf) for leaf in tensors.values()), default=len(indices))
        columns = [leaf for leaf in tensors.values() if len(leaf) == rows]
        real = getattr(loader, "real_in_batch", None)
        resolve = _original_indices(loader.dataset)
        self.batches.append(
            ReadBatch(
                loader=number,
                epoch=epoch,
                indices=tuple(map(resolve, indices)),
                rows=tuple(_digest_of_rows(columns, rows)),
                real=rows if real is None else real,
                counts=_counts(tensors),
                shape=tuple(tuple(leaf.shape[1:]) for leaf in columns),
            )
        )

    def _save(self) -> None:
        """Write a checkpoint after the first optimizer step of the run on the ranks."""
        if not self.task.saves or self._is_saved or not self.steps or self.accelerator is None:
            return
        self._is_saved = True
        for loader in self._prepared.dataloaders:
            loader.resume_mid_epoch = True
        if self.task.rank == 0:
            self._loaders_at_save.write_text(str(len(self._loaders)))
        with _without_numbers(self.accelerator), self.paused():
            self.save_state(self.accelerator, str(Path(self.task.folder) / "checkpoint"))

    @property
    def resumes(self) -> bool:
        """Whether this is a resumed run."""
        return self.task.run in {RESUMED, RESCALED}

    @property
    def _save_within_epoch(self) -> Path:
        """The file that is there if the script itself saves within an epoch."""
        return Path(self.task.folder) / "saves-within-epoch"

    @property
    def _loaders_at_save(self) -> Path:
        """The file with the number of loaders that were read before the checkpoint."""
        return Path(self.task.folder) / "loaders-at-save"

    def record_save(self) -> None:
        """Record that the script calls `save_state`."""
        self.has_saved = True
        if self._open_passes and self.task.run == RANKS:
            self._save_within_epoch.touch()

    def resume_by_script(self) -> None:
        """Load the checkpoint of the run on the ranks where a resumed script loads its own.

        The position in the epoch is restored as the script does it, if it saves within an epoch.
        """
        self._resume(restores_position=not self._save_within_epoch.exists())

    def _resume(self, *, restores_position: bool = True) -> None:
        """Load the checkpoint of the run on the ranks before the pass that it was saved in."""
        if not self.resumes or self._is_saved or self.accelerator is None:
            return
        self._is_saved = True
        for loader in self._prepared.dataloaders if restores_position else ():
            loader.resume_mid_epoch = True
        with _without_numbers(self.accelerator), self.paused():
            self.load_state(self.accelerator, str(Path(self.task.folder) / "checkpoint"))

    # 3. What is computed.

    @contextmanager
    def paused(self) -> Generator[None]:
        """Record no steps: prepare() tries optimizers out, and loading a state makes an empty step."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def record_backward(self, loss: Any, items: Any) -> None:
        """Record a backward pass."""
        if self._random and self._random != _digest_of_generators():
            self.draws = self.draws or source_line()
        self._random = ""
        if self.batches:
            self._training.add(self.batches[-1].loader)
        self.backwards.append(
            Backward(
                batch=len(self.batches) - 1,
                loss=float(local_part(loss.detach()).float().mean())
                if isinstance(loss, Tensor)
                else math.nan,
                dtype=str(getattr(loss, "dtype", "")).removeprefix("torch."),
                items=None if items is None else float(items),
                reduces=any(
                    model.require_backward_grad_sync
                    for model in self._prepared.models
                    if isinstance(model, DistributedDataParallel)
                ),
                seconds=time.perf_counter() - self._idle_since,
                where=source_line(),
            )
        )

    def end_backward(self) -> None:
        """Begin to measure what the rank does until the next backward pass."""
        self._random = _digest_of_generators()
        self._idle_since = time.perf_counter()

    def record_wait(self, code: CodeType) -> None:
        """Record that the host waits for a value of the device, if the script asks for it in training."""
        if self.backwards and torch.is_grad_enabled() and Path(code.co_filename) == Path(self.task.script):
            where = source_line()
            self.waits[where] = self.waits.get(where, 0) + 1

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Record the gradients that an optimizer is about to use."""
        if self.is_paused:
            return
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        number = next(index for index, known in enumerate(self._optimizers) if known is optimizer)
        names = self._names()
        gradients: dict[str, Digest | None] = {}
        before: dict[str, Digest] = {}
        if self.strategy not in LOSSES_ONLY:
            for position, parameter in enumerate(_parameters(optimizer)):
                name = names.get(id(parameter), f"parameter {position} of {type(optimizer).__name__}")
                gradients[name] = None if parameter.grad is None else digest(parameter.grad)
                before[name] = digest(parameter.detach())
        self.steps.append(
            Step(
                optimizer=number,
                name=type(optimizer).__name__,
                is_prepared=self._is_prepared(optimizer),
                backwards=len(self.backwards),
                rates=tuple(float(group["lr"]) for group in optimizer.param_groups),
                gradients=gradients,
                before=before,
                weights={},
                random=_digest_of_generators(),
                schedules=self._schedules(),
                seconds=time.perf_counter() - self._started,
            )
        )

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Record the weights after the step."""
        if self.is_paused or self.strategy in LOSSES_ONLY:
            return
        names = self._names()
        weights: Any = self.steps[-1].weights
        for position, parameter in enumerate(_parameters(optimizer)):
            name = names.get(id(parameter), f"parameter {position} of {type(optimizer).__name__}")
            weights[name] = digest(parameter.detach())
        self.end_backward()

    def record_gathered(self, function: str, result: Any) -> None:
        """Record a call of `gather` or `gather_for_metrics`."""
        tensors = [leaf for _, leaf in walk(result) if isinstance(leaf, Tensor)]
        rows = (
            len(tensors[0])
            if tensors and tensors[0].dim() > 0
            else len(result)
            if isinstance(result, list)
            else 1
        )
        padding = 0
        loader = GradientState().active_dataloader
        if loader is not None and loader.end_of_dataloader and self.batches:
            last = self.batches[-1]
            in_all = len(last.rows) * (1 if self.joins else self.shards)
            real = loader.remainder if loader.remainder > 0 else in_all
            padding = rows - real if rows == in_all else 0
        self.gathered.append(
            Gathered(
                function=function,
                where=source_line(),
                rows=rows,
                padding=padding,
                batch=len(self.batches) - 1,
            )
        )

    def record_clipping(self) -> None:
        """Record a call of torch's own function, which knows neither loss scales nor accumulation."""
        scaler = None if self.accelerator is None else self.accelerator.scaler
        if scaler is not None and scaler.is_enabled():
            self.events[("clip-before-unscale", source_line())] = None
        elif not GradientState().sync_gradients:
            self.events[("clip-within-window", source_line())] = None

    def record_norm(self, module: nn.Module, tensor: Tensor) -> None:
        """Record with how many values a BatchNorm normalises."""
        name = type(module).__name__
        models = map(extract_model_from_parallel, self._prepared.models)
        names = (path for model in models for path, part in model.named_modules() if part is module)
        name = next(names, name)
        values = tensor.numel() // tensor.shape[1] if tensor.dim() > 1 else len(tensor)
        self.norms[name] = min(values, self.norms.get(name, values))

    def _names(self) -> dict[int, str]:
        models = self._prepared.models
        names: dict[int, str] = {}
        for index, model in enumerate(models):
            prefix = f"model {index}: " if len(models) > 1 else ""
            for name, parameter in extract_model_from_parallel(model).named_parameters():
                names[id(parameter)] = prefix + name
        return names

    def _is_prepared(self, optimizer: Optimizer) -> bool:
        owned = {id(parameter) for known in self._prepared.optimizers for parameter in _parameters(known)}
        trained = {*self._names()}
        return all(
            id(parameter) in owned or id(parameter) not in trained for parameter in _parameters(optimizer)
        )

    def _schedules(self) -> tuple[Schedule, ...]:
        known = [schedule.scheduler for schedule in self._prepared.schedulers]
        if self._schedulers is None:
            self._schedulers = [
                schedule for schedule in gc.get_objects() if isinstance(schedule, LRScheduler)
            ]
        return tuple(
            Schedule(
                name=type(schedule).__name__,
                is_prepared=any(schedule is prepared for prepared in known),
                position=int(getattr(schedule, "last_epoch", 0)),
            )
            for schedule in self._schedulers
        )

    def _tied(self) -> tuple[tuple[str, ...], ...]:
        names: dict[int, list[str]] = {}
        for model in self._prepared.models:
            inner = extract_model_from_parallel(model)
            for name, parameter in inner.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), []).append(name)
        return tuple(sorted(tuple(same) for same in names.values() if len(same) > 1))


def digest(tensor: Tensor) -> Digest:
    """Return a tensor in brief; a sharded one is gathered.

    Example:
        >>> digest(torch.tensor([3.0, 4.0])).norm
        5.0
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    flat = full.detach().to(torch.float64 if full.dtype == torch.float64 else torch.float32).flatten()
    if not len(flat):
        return Digest(norm=0.0, values=(0.0,), dtype=dtype)
    stride = max(1, len(flat) // 256)
    return Digest(
        norm=float(flat.norm()), values=(float(flat.sum()), *flat[::stride][:256].tolist()), dtype=dtype
    )


@contextmanager
def _without_numbers(accelerator: Any) -> Generator[None]:
    """Save to and load from the folder of the argument, even if the script has its checkpoints numbered."""
    project = accelerator.project_configuration
    numbered, project.automatic_checkpoint_naming = project.automatic_checkpoint_naming, False
    try:
        yield
    finally:
        project.automatic_checkpoint_naming = numbered


def _digest_of_generators() -> str:
    """Return a digest of the state of the default generators that a script draws from."""
    digest_of_all = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    digest_of_all.update(repr(random.getstate()).encode())
    if "numpy" in sys.modules:
        digest_of_all.update(repr(sys.modules["numpy"].random.get_state()).encode())
    for state in torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ():
        digest_of_all.update(state.numpy().tobytes())
    return digest_of_all.hexdigest()


def _shard_of(loader: Any) -> Any:
    """Return the batches of indices that a prepared loader reads; None if it reads a stream."""
    return getattr(getattr(loader, "_indices", None), "shard", None)


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _named_tensors(batch: Any) -> dict[str, Tensor]:
    return {path: leaf for path, leaf in walk(batch, "batch") if isinstance(leaf, Tensor)}


def _digest_of_rows(columns: Sequence[Tensor], rows: int) -> Iterator[str]:
    arrays = [
        column.detach().cpu().contiguous().view(rows, -1).view(torch.uint8).numpy()
        for column in columns
        if column.numel()
    ]
    for row in range(rows):
        yield hashlib.sha256(b"".join(array[row].tobytes() for array in arrays)).hexdigest()


def _counts(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return what losses are commonly divided by."""
    counts: dict[str, float] = {}
    for name, leaf in tensors.items():
        counts[f"elements of {name}, padding included"] = leaf.numel()
        if leaf.is_floating_point() or leaf.is_complex():
            continue
        counts[f"{name} other than -100"] = int((leaf != -100).sum())
        if leaf.dim() > 1:
            counts[f"shifted {name} other than -100"] = int((leaf[..., 1:] != -100).sum())
        counts[f"{name} other than 0"] = int((leaf != 0).sum())
        if leaf.dim() > 1:
            counts[f"shifted {name} other than 0"] = int((leaf[..., 1:] != 0).sum())
    return counts


def _original_indices(dataset: Any) -> Callable[[Any], Any]:
    """Return the function from an index to that of the data set below all subsets."""
    levels: list[Any] = []
    while isinstance(dataset, torch.utils.data.Subset):
        levels.append(dataset.indices)
        dataset = dataset.dataset

    def resolve(index: Any) -> Any:
        for indices in levels:
            index = indices[index]
        return int(index) if isinstance(index, Tensor) else index

    return resolve


def _shuffles(loader: DataLoader[Any]) -> bool:
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return False
    sampler: Any = innermost_sampler(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    return bool(getattr(sampler, "shuffle", isinstance(sampler, _RANDOM)))


_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def _generators(dataset: Any) -> tuple[str, ...]:
    """Return the attributes of a data set that are random generators."""
    kinds = (torch.Generator, random.Random)
    return tuple(
        name
        for name, value in getattr(dataset, "__dict__", {}).items()
        if isinstance(value, kinds) or type(value).__module__.startswith("numpy.random")
    )
