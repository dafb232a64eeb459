"""Record what a script does with the objects that `prepare` returns, on real tensors."""

from __future__ import annotations

import functools
import gc
import hashlib
import math
import random
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from copy import copy
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from accel_inspect.doctor.record import (
    ONE,
    PLAIN,
    RANKS,
    RESUMED,
    Backward,
    Digest,
    LoaderPass,
    ReadBatch,
    RunRecord,
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
from accel_train.data.shards import Draw
from accel_train.observing import Observer

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel_train.data.shards import BatchSamplerShard

LOSSES_ONLY = frozenset({"deepspeed", "fsdp1", "megatron", "pipeline", "xla", "xla_fsdp"})
"""Strategies that keep gradients and weights in a layout of their own."""

_PASSES = 2
"""Passes over a training loader, after which the script ends."""

_FEW_VALUES = 32
"""Values of a BatchNorm below which its statistics are those of no larger batch."""

_HALF = {torch.float16, torch.bfloat16}
_END: Any = object()


class TrainingRecorder(Observer):
    """Recorder of one process.

    Attributes:
        joins: Whether this process gets the batches of all ranks at once.
        resumes: Whether this is a resumed run.
        is_reading: Whether a prepared loader reads, so that the loaders of torch within are its own.
        is_paused: Whether steps of optimizers are the library's own.
        has_saved: Whether the script has called `save_state`.
    """

    def __init__(self, task: RankTask) -> None:
        self.task = task
        self.record = RunRecord(run=task.run, rank=task.rank)
        self.joins = task.run == ONE
        self.resumes = task.run == RESUMED
        self.is_reading = self.is_paused = self.has_saved = False
        self.accelerator: Any = None
        self._save_state, self._load_state = Accelerator.save_state, Accelerator.load_state
        self._is_done = False  # the only save or load of this run
        self._loaders: list[Any] = []
        self._optimizers: list[Any] = []
        self._training: set[int] = set()
        self._plans: dict[int, tuple[tuple[tuple[int, ...], ...], list[list[int]]]] = {}
        self._per_round: dict[int, int] = {}
        self._open_passes = 0
        self._random: tuple[str, ...] = ()  # states of generators before the script draws from them

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
        record = self.record
        names: dict[int, list[str]] = {}
        for model in map(extract_model_from_parallel, self._prepared.models):
            for name, parameter in model.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), []).append(name)
        record.tied = tuple(sorted(tuple(same) for same in names.values() if len(same) > 1))
        record.losses = record.strategy in LOSSES_ONLY
        record.stopped = stopped
        return record

    def found(self, check: str, name: str, text: str, where: str = "") -> None:
        """Record a diagnosis that this process finds by itself."""
        self.record.found.setdefault((check, name, where), text)

    # 1. What is prepared.

    def build(self, spec: StrategySpec, *arguments: Any) -> Strategy:
        """Record the strategy of the ranks, whose data a process that stands for all ranks has."""
        strategy = super().build(spec, *arguments)
        record, sharding = self.record, strategy.sharding
        record.strategy = strategy.name
        if self.task.run in {RANKS, RESUMED}:
            record.shards, record.shard = sharding.num_shards, sharding.shard_index
        else:
            record.shards = self.task.shards
        if self.joins:
            strategy.sharding = BatchSharding(num_shards=record.shards, shard_index=0)
        return strategy

    def prepare(self, accelerator: Accelerator, bundle: Bundle, run: Callable[[], Bundle]) -> Bundle:
        """Record prepared objects, and the order in which the modules of models are executed."""
        _cut(bundle, self.task.blocks)
        with self.paused():
            bundle = run()
        self.accelerator, record = accelerator, self.record
        record.precision, record.clock = accelerator.mixed_precision, accelerator.step_scheduler_per
        handler = accelerator._parts.handlers.get(DistributedDataParallelKwargs)
        if handler is not None and handler.comm_hook.value != "no":
            record.differs_by = f"the communication hook {handler.comm_hook.value!r} rounds gradients"
        for loader in self._prepared.dataloaders:
            if isinstance(loader, DataLoaderDispatcher) and not accelerator.split_batches:
                self._per_round[id(getattr(loader, "index_shard", None))] = record.shards
        for model in bundle.models:
            for name, module in extract_model_from_parallel(model).named_modules():
                if any(True for _ in module.parameters(recurse=False)):
                    module.register_forward_pre_hook(lambda *_, name=name: record.modules.setdefault(name))
                if isinstance(module, nn.RNNBase):
                    module.dropout = 0.0
        return bundle

    # 2. What loaders yield.

    def plan_epoch(
        self, iterate: Callable[..., Iterator[Iterator[list[int]]]], shard: BatchSamplerShard, draw: Draw
    ) -> Iterator[Iterator[list[int]]]:
        """Yield the first batches of an epoch, and the last one.

        A single process that stands for all ranks gets the batches of all of them at once.
        """
        shards = self.record.shards
        batches, padded = [*chain.from_iterable(iterate(shard, draw))], dict(draw.padded)
        if self.joins and shard.num_processes == shards > 1:
            by_rank, reals = [batches], [padded]
            for index in range(1, shards):
                other, replayed = copy(shard), Draw(draw.start, draw.order)
                other.process_index = index
                by_rank.append([*chain.from_iterable(iterate(other, replayed))])
                reals.append(replayed.padded)
            batches, padded = [], {}
            for number, together in enumerate(zip_longest(*by_rank, fillvalue=())):
                batches.append([*chain.from_iterable(together)])
                pairs = zip(reals, together, strict=True)
                real = sum(of_rank.get(number, len(batch)) for of_rank, batch in pairs)
                if real != len(batches[number]):
                    padded[number] = real
                    draw.padded_rows = len(batches[number])
        first, per_round = draw.start // (shard.plan.stride or 1), self._per_round.get(id(shard), 1)
        last = (len(batches) - 1) // per_round * per_round
        stop = (self.limit - 1) * per_round - first
        retained = [number for number in range(len(batches)) if number >= last or number < stop]
        draw.padded.clear()
        draw.padded.update({new: padded[old] for new, old in enumerate(retained) if old in padded})
        plan = tuple(tuple(batch[: padded.get(number, len(batch))]) for number, batch in enumerate(batches))
        self._plans[id(shard)] = plan, [batches[number] for number in retained]
        yield iter(self._plans[id(shard)][1])

    def iterate(self, real: Any, loader: Any) -> Iterator[Any]:
        """Record what a loader that is not prepared yields."""
        if self.is_reading or isinstance(loader, PreparedLoader):
            return real(loader)
        return self.batches(loader, lambda: real(loader))

    def batches(self, loader: Any, read: Callable[[], Iterator[Any]]) -> Generator[Any]:
        """Yield the batches of a pass, and record them."""
        num_known = len(self._loaders)
        number, record = _number(self._loaders, loader), self.record
        if number == num_known and 0 < self.task.loaders_at_save <= number + 1:
            self._resume()
        epoch = sum(of_loader.loader == number for of_loader in record.passes)
        where = source_line()
        if number in self._training and epoch >= _PASSES:
            raise SystemExit(0)
        is_prepared, limit = isinstance(loader, PreparedLoader), self.limit
        this_pass = LoaderPass(
            loader=number,
            epoch=epoch,
            where=where,
            is_prepared=is_prepared,
            shuffles=_shuffles(loader),
        )
        if loader.num_workers and (generators := _generators(loader.dataset)):
            text = f"each worker has its own copy of the data set's {', '.join(generators)}"
            self.found("data", "generator-in-workers", text, where)
        record.passes.append(this_pass)
        resolve = functools.partial(_original_index, loader.dataset)
        shard = getattr(loader, "index_shard", None)
        retained: list[list[int]] | None = None
        inner: Any = None
        count = 0
        self._open_passes += 1
        try:
            inner = self._reading(read)
            while (batch := self._reading(lambda: next(inner, _END))) is not _END:
                is_planned = is_prepared and not isinstance(loader, DataLoaderDispatcher)
                if not count and is_planned and id(shard) in self._plans:
                    plan, retained = self._plans[id(shard)]
                    this_pass.plan = tuple(tuple(map(resolve, of_plan)) for of_plan in plan)
                indices = retained[count] if retained is not None and count < len(retained) else ()
                record.batches.append(_read_batch(loader, number, epoch, batch, tuple(map(resolve, indices))))
                count += 1
                is_cut = retained is None and count == limit
                if is_cut and is_prepared:
                    vars(loader).update(end_of_dataloader=True, remainder=0)
                self._random = _states_of_generators()
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

    # 3. The checkpoint.

    def _save(self) -> None:
        """Write a checkpoint after the first optimizer step of the run on the ranks."""
        if self.task.saves and self.record.steps and self.accelerator is not None and not self._is_done:
            self.record.loaders_at_save = len(self._loaders)
            self._transfer(self._save_state, restores_position=True)

    def _resume(self, *, restores_position: bool = True) -> None:
        """Load the checkpoint of the run on the ranks before the pass that it was saved in."""
        if self.resumes and self.accelerator is not None and not self._is_done:
            self._transfer(self._load_state, restores_position=restores_position)

    def _transfer(self, transfer: Callable[..., Any], *, restores_position: bool) -> None:
        """Save or load in the folder of the command, even if the script numbers its checkpoints."""
        self._is_done = True
        for loader in self._prepared.dataloaders if restores_position else ():
            loader.resume_mid_epoch = True
        project = self.accelerator.project_configuration
        with replaced_attributes(project, {"automatic_checkpoint_naming": False}), self.paused():
            transfer(self.accelerator, str(Path(self.task.folder) / "checkpoint"))

    def save_state(self, real: Any, accelerator: Any, output_dir: Any = None, **options: Any) -> str:
        """Write no checkpoint of the script, from which the next run would resume."""
        del real, options
        self.has_saved = True
        self.record.saves_within_epoch |= self._open_passes > 0
        accelerator.wait_for_everyone()
        return str(output_dir or accelerator.project_dir)

    def load_state(self, real: Any, *args: Any, **options: Any) -> None:
        """Load the checkpoint of the run on the ranks where a resumed script loads its own.

        The position in the epoch is restored as the script does it, if it saves within an epoch.
        """
        if self.resumes:
            self._resume(restores_position=not self.task.saves_within_epoch)
        elif not self.has_saved:  # what the script saved in this run is not there
            with self.paused():
                real(*args, **options)

    # 4. What is computed.

    def paused(self) -> AbstractContextManager[None]:
        """Record no steps: prepare() tries optimizers out, and loading a state makes an empty step."""
        return replaced_attributes(self, {"is_paused": True})

    def backward(self, real: Any, accelerator: Any, loss: Any, **options: Any) -> None:
        """Record a backward pass."""
        record = self.record
        if self._random and self._random != _states_of_generators():
            record.draws = record.draws or source_line()
        if record.batches:
            self._training.add(record.batches[-1].loader)
        prepared, where, value = self._prepared, source_line(), math.nan
        if isinstance(loss, Tensor):
            value = float(local_part(loss.detach()).float().mean())
            trained = {p.dtype for optimizer in prepared.optimizers for p in _parameters(optimizer)}
            if record.precision != "no" and loss.dtype in _HALF and not trained & _HALF:
                text = f"the loss has the dtype {str(loss.dtype).removeprefix('torch.')}"
                self.found("numbers", "loss-in-low-precision", text, where)
        items = options.get("num_items")
        items = None if items is None else float(items)
        record.backwards.append(Backward(batch=len(record.batches) - 1, loss=value, items=items, where=where))
        real(accelerator, loss, **options)
        self._random = _states_of_generators()  # the script may draw until the next backward pass

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Record the gradients that an optimizer is about to use."""
        if self.is_paused:
            return
        prepared, record = self._prepared, self.record
        if not record.steps:
            known = {id(schedule.scheduler) for schedule in prepared.schedulers}
            made = [schedule for schedule in gc.get_objects() if isinstance(schedule, LRScheduler)]
            record.schedules = {type(schedule).__name__: id(schedule) in known for schedule in made}
        parameters = self._by_name(optimizer)
        owned = {id(parameter) for known in prepared.optimizers for parameter in _parameters(known)}
        if {id(parameter) for parameter in _parameters(optimizer)} & {*self._names()} - owned:
            text = f"steps after {len(record.backwards)} backward passes, and was not prepared"
            self.found("clocks", "optimizer-not-prepared", f"{type(optimizer).__name__} {text}")
        record.steps.append(
            Step(
                optimizer=_number(self._optimizers, optimizer),
                backwards=len(record.backwards),
                rates=tuple(float(group["lr"]) for group in optimizer.param_groups),
                gradients={
                    name: None if p.grad is None else digest(p.grad) for name, p in parameters.items()
                },
                before={name: digest(parameter.detach()) for name, parameter in parameters.items()},
            )
        )

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Record the weights after the step."""
        if not self.is_paused:
            parameters = self._by_name(optimizer)
            self.record.steps[-1].weights = {name: digest(p.detach()) for name, p in parameters.items()}
            self._random = _states_of_generators()

    def _by_name(self, optimizer: Optimizer) -> dict[str, Tensor]:
        if self.record.strategy in LOSSES_ONLY:
            return {}
        names, kind = self._names(), type(optimizer).__name__
        return {
            names.get(id(parameter), f"parameter {position} of {kind}"): parameter
            for position, parameter in enumerate(_parameters(optimizer))
        }

    def _names(self) -> dict[int, str]:
        models = self._prepared.models
        return {
            id(parameter): f"model {index}: {name}" if len(models) > 1 else name
            for index, model in enumerate(models)
            for name, parameter in extract_model_from_parallel(model).named_parameters()
        }

    def gather(self, real: Any, *args: Any, **options: Any) -> Any:
        """Record a call of `gather` or `gather_for_metrics`, and whether it returned padding."""
        result = real(*args, **options)
        self.record.gathered += 1
        loader, is_metric = GradientState().active_dataloader, real.__name__ == "gather_for_metrics"
        if is_metric or loader is None or not loader.end_of_dataloader or not self.record.batches:
            return result
        tensors = [leaf for _, leaf in walk(result) if isinstance(leaf, Tensor)]
        rows = len(tensors[0]) if tensors and tensors[0].dim() > 0 else 1
        in_all = len(self.record.batches[-1].rows) * (1 if self.joins else self.record.shards)
        if rows == in_all and 0 < loader.remainder < rows:
            padding = rows - loader.remainder
            text = f"gather() returned {rows} rows of the last batch, {padding} of which pad it"
            self.found("gathered", "metric-on-padding", text, source_line())
        return result

    def average_models(self, real: Any, averaging: Any) -> Any:
        """Record that the script uses `LocalSGD`."""
        self.record.differs_by = "LocalSGD averages models instead of gradients"
        return real(averaging)

    def clip(self, real: Any, *args: Any, **options: Any) -> Any:
        """Record a call of torch's own function, which knows neither loss scales nor accumulation."""
        scaler = None if self.accelerator is None else self.accelerator.scaler
        text = "torch.nn.utils.clip_grad_norm_ was called"
        if scaler is not None and scaler.is_enabled():
            self.found("clocks", "clip-before-unscale", text, source_line())
        elif not GradientState().sync_gradients:
            self.found("clocks", "clip-within-window", text, source_line())
        return real(*args, **options)

    def normalise(self, real: Any, module: Any, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Record a BatchNorm of few values; for all ranks, normalise the rows of each by themselves."""
        shards = self.record.shards
        if not module.training:
            return real(module, input)
        if self.joins and shards > 1 and len(input) % shards == 0:
            first, *following = input.chunk(shards)
            normalised = [real(module, first)]
            running = [module.running_mean, module.running_var, module.num_batches_tracked]
            averages = [(average, average.clone()) for average in running if average is not None]
            normalised += [real(module, part) for part in following]
            for average, of_first in averages:  # ranks keep the averages of rank 0
                average.data.copy_(of_first)  # as BatchNorm's own change, it is none for autograd
            return torch.cat(normalised)
        values = input.numel() // input.shape[1] if input.dim() > 1 else len(input)
        if values < _FEW_VALUES and shards > 1:
            models = map(extract_model_from_parallel, self._prepared.models)
            names = (path for model in models for path, part in model.named_modules() if part is module)
            name = next(names, type(module).__name__)
            text = f"{name} normalises with only the {values} values of its rank"
            self.found("numbers", "batchnorm-per-rank", text)
        return real(module, input)


def _number(known: list[Any], item: Any) -> int:
    """Return the position of an object in a list, to which it is added if it is new."""
    if not any(item is other for other in known):
        known.append(item)
    return [id(other) for other in known].index(id(item))


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
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    flat = full.detach().to(torch.float64 if full.dtype == torch.float64 else torch.float32).flatten()
    samples = flat[:: max(1, len(flat) // 256)][:256].tolist()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Digest(norm=float(flat.norm()), values=(float(flat.sum()), *samples), dtype=dtype)


def _states_of_generators() -> tuple[str, ...]:
    """Return the states of the default generators that a script draws from."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    of_numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else ()
    return (repr(random.getstate()), repr(of_numpy), *(state.numpy().tobytes().hex() for state in states))


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _read_batch(loader: Any, number: int, epoch: int, batch: Any, indices: tuple[int, ...]) -> ReadBatch:
    leaves = walk(batch, "batch")
    tensors = {path: leaf for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0}
    rows = max((len(leaf) for leaf in tensors.values()), default=len(indices))
    columns = [leaf for leaf in tensors.values() if len(leaf) == rows]
    parts = [leaf.detach().cpu().contiguous() for leaf in columns if leaf.numel()]
    arrays = [part.view(rows, -1).view(torch.uint8).numpy() for part in parts]
    digests = (hashlib.sha256(b"".join(array[row].tobytes() for array in arrays)) for row in range(rows))
    real = getattr(loader, "real_in_batch", None)
    return ReadBatch(
        loader=number,
        epoch=epoch,
        indices=indices,
        rows=tuple(of_row.hexdigest() for of_row in digests),
        real=rows if real is None else real,
        counts=_counts(tensors),
        shape=tuple(tuple(leaf.shape[1:]) for leaf in columns),
    )


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


def _original_index(dataset: Any, index: Any) -> Any:
    """Return the index in the data set below all subsets."""
    while isinstance(dataset, torch.utils.data.Subset):
        dataset, index = dataset.dataset, dataset.indices[index]
    return int(index) if isinstance(index, Tensor) else index


def _shuffles(loader: DataLoader[Any]) -> bool:
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return False
    sampler: Any = innermost_sampler(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    is_random = isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))
    return bool(getattr(sampler, "shuffle", is_random))


def _generators(dataset: Any) -> tuple[str, ...]:
    """Return the attributes of a data set that are random generators."""
    kinds = (torch.Generator, random.Random)
    return tuple(
        name
        for name, value in getattr(dataset, "__dict__", {}).items()
        if isinstance(value, kinds) or type(value).__module__.startswith("numpy.random")
    )
