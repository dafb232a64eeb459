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
from contextlib import AbstractContextManager
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

from accel_inspect.doctor.record import (
    ONE,
    PLAIN,
    RANKS,
    RESCALED,
    RESUMED,
    Backward,
    Digest,
    Gathered,
    LoaderPass,
    ReadBatch,
    RunRecord,
    Schedule,
    Step,
)
from accel_inspect.trial import RankTask, source_line
from accel_ops.modules import extract_model_from_parallel, replaced_attributes
from accel_ops.tree import local_part, walk
from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.strategy import BatchSharding, Bundle, Strategy, StrategySpec
from accel_state.accelerator_state import GradientState
from accel_train import Accelerator
from accel_train.accelerator.build import PreparedObjects
from accel_train.data.adapter import PreparedLoader
from accel_train.data.dispatcher import DataLoaderDispatcher
from accel_train.data.samplers import innermost_sampler
from accel_train.observing import Observer

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel_train.data.shards import BatchSamplerShard

LOSSES_ONLY = frozenset({"deepspeed", "fsdp1", "megatron", "pipeline", "xla", "xla_fsdp"})
"""Strategies that keep gradients and weights in a layout of their own."""

_PASSES = 2
"""Passes over a training loader, after which the script ends."""

_END: Any = object()


@dataclass(kw_only=True)
class TrainingRecorder(Observer):
    """Recorder of one process."""

    task: RankTask
    save_state: Callable[..., Any] = Accelerator.save_state
    load_state: Callable[..., Any] = Accelerator.load_state
    accelerator: Any = None
    is_reading: bool = False
    """Whether a prepared loader reads, so that the loaders of torch within are its own."""
    is_paused: bool = False
    """Whether steps of optimizers are the library's own."""
    has_saved: bool = False
    """Whether the script has called `save_state`."""
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

    def __post_init__(self) -> None:
        self._script = Path(self.task.script).absolute()  # before it changes the directory
        self.record = RunRecord(run=self.task.run, rank=self.task.rank, world=self.task.world)

    @property
    def joins(self) -> bool:
        """Whether this process gets the batches of all ranks at once."""
        return self.task.run in {ONE, RESCALED}

    @property
    def limit(self) -> int:
        """The number of batches of a pass."""
        limit = self.task.steps * GradientState().num_steps
        return limit * self.record.shards if self.task.run == PLAIN else limit

    @property
    def _prepared(self) -> PreparedObjects:
        return PreparedObjects() if self.accelerator is None else self.accelerator._parts.prepared

    def finish(self, stopped: str) -> RunRecord:
        """Return the record."""
        names: dict[int, list[str]] = {}
        for model in self._prepared.models:
            inner = extract_model_from_parallel(model)
            for name, parameter in inner.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), []).append(name)
        self.record.tied = tuple(sorted(tuple(same) for same in names.values() if len(same) > 1))
        self.record.nbytes = sum(
            parameter.numel() * parameter.element_size()
            for model in self._prepared.models
            for parameter in model.parameters()
            if parameter.requires_grad
        )
        self.record.losses = self.record.strategy in LOSSES_ONLY
        self.record.seconds = time.perf_counter() - self._started
        self.record.stopped = stopped
        return self.record

    # 1. What is prepared.

    def build(self, spec: StrategySpec, *arguments: Any) -> Strategy:
        """Record the strategy of the ranks, whose data a process that stands for all ranks has."""
        strategy = super().build(spec, *arguments)
        path = Path(self.task.folder) / "shards"
        record, sharding = self.record, strategy.sharding
        record.strategy = strategy.name
        if self.task.run in {RANKS, RESUMED}:
            record.shards, record.shard = sharding.num_shards, sharding.shard_index
            if self.task.rank == 0:
                path.write_text(str(record.shards))
        elif path.is_file():
            record.shards = int(path.read_text())
        if self.joins:
            strategy.sharding = BatchSharding(num_shards=record.shards, shard_index=0)
        return strategy

    def prepare(self, accelerator: Accelerator, bundle: Bundle, run: Callable[[], Bundle]) -> Bundle:
        """Record prepared objects."""
        _cut(bundle, self.task.blocks)
        with self.paused():
            bundle = run()
        self.record_prepared(accelerator, bundle.models)
        return bundle

    def record_prepared(self, accelerator: Any, models: Sequence[nn.Module]) -> None:
        """Record the order in which the modules of prepared models are executed."""
        self.accelerator = accelerator
        parts = accelerator._parts
        self.record.precision = accelerator.mixed_precision
        self.record.clock = accelerator.step_scheduler_per
        handler = parts.handlers.get(DistributedDataParallelKwargs)
        if handler is not None and handler.comm_hook.value != "no":
            self.record.differs_by = f"the communication hook {handler.comm_hook.value!r} rounds gradients"
        for loader in self._prepared.dataloaders:
            if isinstance(loader, DataLoaderDispatcher) and not accelerator.split_batches:
                self._per_round[id(_shard_of(loader))] = self.record.shards
        for model in models:
            for name, module in extract_model_from_parallel(model).named_modules():
                if any(True for _ in module.parameters(recurse=False)):
                    module.register_forward_pre_hook(functools.partial(self._record_module, name))
                if isinstance(module, nn.RNNBase):
                    module.dropout = 0.0

    def _record_module(self, name: str, *_: Any) -> None:
        self.record.modules.setdefault(name)

    # 2. What loaders yield.

    def plan_epoch(
        self, iterate: Callable[..., Iterator[list[int]]], shard: BatchSamplerShard, position: int, order: Any
    ) -> Iterator[list[int]]:
        """Yield the first batches of an epoch, and the last one.

        A single process that stands for all ranks gets the batches of all of them at once.
        """
        shards = self.record.shards
        parts = shards if self.joins and shard.num_processes == shards else 1
        batches = [*iterate(shard, position, order)]
        padded = dict(shard.padded)
        if parts > 1:
            by_rank, reals = [batches], [padded]
            for index in range(1, parts):
                other = copy(shard)
                other.process_index = index
                by_rank.append([*iterate(other, position, shard.order)])
                reals.append(other.padded)
            rounds = [*zip_longest(*by_rank, fillvalue=())]
            batches = [[sample for batch in together for sample in batch] for together in rounds]
            padded = {}
            for number, together in enumerate(rounds):
                pairs = zip(reals, together, strict=True)
                real = sum(of_rank.get(number, len(batch)) for of_rank, batch in pairs)
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

    def batches(self, loader: Any, read: Callable[[], Iterator[Any]]) -> Generator[Any]:
        """Yield the batches of a pass, and record them."""
        if not any(loader is known for known in self._loaders):
            self._loaders.append(loader)
            at_save = self._loaders_at_save
            if self.resumes and at_save.is_file() and len(self._loaders) >= int(at_save.read_text()):
                self._resume()
        number = next(index for index, known in enumerate(self._loaders) if known is loader)
        epoch = sum(of_loader.loader == number for of_loader in self.record.passes)
        where = source_line()
        if number in self._training and epoch >= _PASSES:
            raise SystemExit(0)
        is_prepared = isinstance(loader, PreparedLoader)
        shard = _shard_of(loader)
        retained: list[list[int]] | None = None
        limit = self.limit
        inner: Any = None
        position = len(self.record.passes)
        this_pass = LoaderPass(
            loader=number,
            epoch=epoch,
            where=where,
            is_prepared=is_prepared,
            shuffles=_shuffles(loader),
            plan=None,
            states=_generators(loader.dataset) if loader.num_workers else (),
        )
        self.record.passes.append(this_pass)
        count = 0
        self._open_passes += 1
        try:
            inner = self._reading(read)
            while (batch := self._reading(lambda: next(inner, _END))) is not _END:
                if not count and is_prepared and shard and not isinstance(loader, DataLoaderDispatcher):
                    retained = self._retained.get(id(shard))
                    if (plan := self._plans.get(id(shard))) is not None:
                        resolve = _original_indices(loader.dataset)
                        resolved = tuple(tuple(map(resolve, batch)) for batch in plan)
                        self.record.passes[position] = replace(this_pass, plan=resolved)
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
        with replaced_attributes(self, {"is_reading": True}):
            return read()

    def _record_batch(self, loader: Any, number: int, epoch: int, batch: Any, indices: Sequence[int]) -> None:
        leaves = walk(batch, "batch")
        tensors = {path: leaf for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0}
        rows = max((len(leaf) for leaf in tensors.values()), default=len(indices))
        columns = [leaf for leaf in tensors.values() if len(leaf) == rows]
        real = getattr(loader, "real_in_batch", None)
        resolve = _original_indices(loader.dataset)
        self.record.batches.append(
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
        if not self.task.saves or self._is_saved or not self.record.steps or self.accelerator is None:
            return
        self._is_saved = True
        for loader in self._prepared.dataloaders:
            loader.resume_mid_epoch = True
        if self.task.rank == 0:
            self._loaders_at_save.write_text(str(len(self._loaders)))
        with self._without_numbers(), self.paused():
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
        with self._without_numbers(), self.paused():
            self.load_state(self.accelerator, str(Path(self.task.folder) / "checkpoint"))

    def _without_numbers(self) -> AbstractContextManager[None]:
        """Save to and load from the folder of the argument, even if the script numbers its checkpoints."""
        return replaced_attributes(
            self.accelerator.project_configuration, {"automatic_checkpoint_naming": False}
        )

    # 3. What is computed.

    def paused(self) -> AbstractContextManager[None]:
        """Record no steps: prepare() tries optimizers out, and loading a state makes an empty step."""
        return replaced_attributes(self, {"is_paused": True})

    def record_backward(self, loss: Any, items: Any) -> None:
        """Record a backward pass."""
        if self._random and self._random != _digest_of_generators():
            self.record.draws = self.record.draws or source_line()
        self._random = ""
        if self.record.batches:
            self._training.add(self.record.batches[-1].loader)
        self.record.backwards.append(
            Backward(
                batch=len(self.record.batches) - 1,
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
        if self.record.backwards and torch.is_grad_enabled() and Path(code.co_filename) == self._script:
            where = source_line()
            self.record.waits[where] = self.record.waits.get(where, 0) + 1

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Record the gradients that an optimizer is about to use."""
        if self.is_paused:
            return
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        number = next(index for index, known in enumerate(self._optimizers) if known is optimizer)
        parameters = {} if self.record.strategy in LOSSES_ONLY else self._by_name(optimizer)
        owned = {id(parameter) for known in self._prepared.optimizers for parameter in _parameters(known)}
        trained = {*self._names()}
        self.record.steps.append(
            Step(
                optimizer=number,
                name=type(optimizer).__name__,
                is_prepared=all(id(p) in owned or id(p) not in trained for p in _parameters(optimizer)),
                backwards=len(self.record.backwards),
                rates=tuple(float(group["lr"]) for group in optimizer.param_groups),
                gradients={
                    name: None if p.grad is None else digest(p.grad) for name, p in parameters.items()
                },
                before={name: digest(parameter.detach()) for name, parameter in parameters.items()},
                weights={},
                schedules=self._schedules(),
            )
        )

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Record the weights after the step."""
        if self.is_paused or self.record.strategy in LOSSES_ONLY:
            return
        weights = {name: digest(parameter.detach()) for name, parameter in self._by_name(optimizer).items()}
        self.record.steps[-1] = replace(self.record.steps[-1], weights=weights)
        self.end_backward()

    def _by_name(self, optimizer: Optimizer) -> dict[str, Tensor]:
        names, kind = self._names(), type(optimizer).__name__
        return {
            names.get(id(parameter), f"parameter {position} of {kind}"): parameter
            for position, parameter in enumerate(_parameters(optimizer))
        }

    def record_gathered(self, function: str, result: Any) -> None:
        """Record a call of `gather` or `gather_for_metrics`."""
        tensors = [leaf for _, leaf in walk(result) if isinstance(leaf, Tensor)]
        rows = len(result) if isinstance(result, list) else 1
        if tensors and tensors[0].dim() > 0:
            rows = len(tensors[0])
        padding = 0
        loader = GradientState().active_dataloader
        if loader is not None and loader.end_of_dataloader and self.record.batches:
            last = self.record.batches[-1]
            in_all = len(last.rows) * (1 if self.joins else self.record.shards)
            real = loader.remainder if loader.remainder > 0 else in_all
            padding = rows - real if rows == in_all else 0
        batch = len(self.record.batches) - 1
        self.record.gathered.append(
            Gathered(function=function, where=source_line(), rows=rows, padding=padding, batch=batch)
        )

    def record_clipping(self) -> None:
        """Record a call of torch's own function, which knows neither loss scales nor accumulation."""
        scaler = None if self.accelerator is None else self.accelerator.scaler
        if scaler is not None and scaler.is_enabled():
            self.record.events["clip-before-unscale", source_line()] = None
        elif not GradientState().sync_gradients:
            self.record.events["clip-within-window", source_line()] = None

    def record_norm(self, module: nn.Module, tensor: Tensor) -> None:
        """Record with how many values a BatchNorm normalises."""
        models = map(extract_model_from_parallel, self._prepared.models)
        names = (path for model in models for path, part in model.named_modules() if part is module)
        name = next(names, type(module).__name__)
        values = tensor.numel() // tensor.shape[1] if tensor.dim() > 1 else len(tensor)
        self.record.norms[name] = min(values, self.record.norms.get(name, values))

    def _names(self) -> dict[int, str]:
        models = self._prepared.models
        names: dict[int, str] = {}
        for index, model in enumerate(models):
            prefix = f"model {index}: " if len(models) > 1 else ""
            for name, parameter in extract_model_from_parallel(model).named_parameters():
                names[id(parameter)] = prefix + name
        return names

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
            )
            for schedule in self._schedulers
        )


def _cut(bundle: Bundle, blocks: int) -> None:
    """Keep the first layers of each list of layers, and only their parameters in the optimizers."""
    if not blocks:
        return
    removed: set[nn.Parameter] = set()
    for model in bundle.models:
        for module in [*model.modules()]:
            if isinstance(module, nn.ModuleList) and len(module) > blocks:
                removed.update(module[blocks:].parameters())
                del module[blocks:]
        removed -= {*model.parameters()}
    for optimizer in bundle.optimizers:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter not in removed]


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
    return getattr(loader, "index_shard", None)


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


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
        for ignored in (-100, 0):
            counts[f"{name} other than {ignored}"] = int((leaf != ignored).sum())
            if leaf.dim() > 1:
                counts[f"shifted {name} other than {ignored}"] = int((leaf[..., 1:] != ignored).sum())
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
