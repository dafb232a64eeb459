"""Run a pipeline: schedules of torch for training, forward passes only for evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from accel_ops.tree import recursively_apply
from accel_plugins.pipeline.stages import Layout, Leave, RemoteModule, Stage, first_tensor
from accel_state import hang_monitor
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from accel_plugins.pipeline.strategy import PipelineStrategy

IGNORED = -100
"""The label ignored by losses, as in PyTorch's `cross_entropy` and all models of transformers."""


@dataclass(slots=True)
class Batch:
    """The micro-batches of one call: arguments, shares of the loss, and outputs of the last stage.

    `scale` is the factor of losses before the backward pass. In training, an output is only the loss.
    """

    parts: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    weights: Sequence[Tensor | float]
    is_training: bool
    scale: float = 1.0
    outputs: list[Any] = field(default_factory=list[Any])


class Pipeline:
    """The stages of one model on this rank, and their schedules; others' modules are replaced in place."""

    def __init__(self, strategy: PipelineStrategy, model: nn.Module, layout: Layout) -> None:
        options, self.layout = strategy.options, layout
        self.group, self.replicas = strategy.group, strategy.replicas_group
        self.rank = dist.get_rank(self.group)
        self.device, self.precision = strategy.runtime.device, strategy.precision
        self.micro_batches = options.pp_num_microbatches or self.group.size()
        self._kind: Any = get_schedule_class(str(options.pp_schedule))
        self._forward: Callable[..., Any] = model.forward
        is_known = getattr(model, "loss_type", None) is not None or hasattr(model, "loss_function")
        loss: Any = model.loss_function if is_known else None  # of transformers
        self._is_causal = getattr(loss, "__name__", "") == "ForCausalLMLoss"
        self._takes_use_cache = "use_cache" in inspect.signature(model.forward).parameters
        self._name = type(model).__name__
        # 1. Replace modules of other ranks with placeholders.
        modules = [model.get_submodule(name) for name in layout.names]
        paths = [name.rpartition(".") for name in layout.names]
        self._slots = [(model.get_submodule(path), leaf) for path, _, leaf in paths]
        self._absent = [RemoteModule(module, position, self) for position, module in enumerate(modules)]
        self._own: dict[int, nn.Module] = {}
        self.stages: list[Stage] = []
        for index, (first, end) in enumerate(layout.bounds):
            if layout.ranks[index] == self.rank:
                self._own |= {position: modules[position] for position in range(first, end)}
                self.stages.append(Stage(self, index, first, modules[first:end]))
        self._show(self._own)
        # 2. Prepare the state of runs.
        self._sharded: list[FSDPModule] = []
        self._active: Stage | None = self.stages[0] if len(self.stages) == 1 else None
        self._stage: Stage | None = None
        self._received: Tensor | None = None
        self._nothing: Tensor | None = None
        self._produced: Any = None
        self._calls: list[int] | None = None
        self._failure: Exception | None = None
        self._forms: dict[int, int | None] = {}  # the lengths of tuples that stages receive
        self._length = 0  # of the tuple that a stage's last module has returned
        self._batch: Batch | None = None
        self._boundaries: dict[int, tuple[list[int], torch.dtype]] | None = None
        self._probed: tuple[int, int | None] = 0, None  # the sizes of the batch that has these boundaries
        self._expected: dict[int, tuple[int, ...]] = {}
        self._schedules: dict[tuple[int, int | None], tuple[Any, list[PipelineStage]]] = {}
        self._output_type: type[Any] = Tensor
        self._form: Any = None

    def watch(self) -> None:
        """Record the output of each stage's last module; called once the stages are sharded."""

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            del module, args
            if self._stage is not None:  # not when activations are recomputed
                self._produced = output

        modules = [module for stage in self.stages for module in stage.modules()]
        self._sharded = [module for module in modules if isinstance(module, FSDPModule)]
        for stage in self.stages:
            if not stage.is_last:
                stage.units[-1].register_forward_hook(keep)

    def train(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, accumulation: int) -> Any:
        """Run forward and backward passes of all micro-batches; return the output with only the loss.

        The loss is the mean over the replicas.
        """
        number = self.micro_batches
        if self._takes_use_cache:  # recomputed forward passes would append to the cache again
            kwargs = {**kwargs, "use_cache": False}
        parts = _cut_batch(self._name, args, kwargs, number, exact=True)
        weights = self._weights(parts)
        batch = Batch(parts=parts, weights=weights, is_training=True, scale=1.0 / accumulation)
        self.precision.scale(torch.zeros((), device=self.device))  # a new loss, also for stages without one
        with self._running(batch), hang_monitor.collective_scope("schedule of the pipeline"):
            if self._boundaries is None:
                self.probe()
            schedule, stages = self._schedule(*_sizes_of(parts[0]))
            batch.outputs.clear()
            try:
                order = torch.arange(number, device="cpu")
                schedule.step(index=order, target=order)
            except RuntimeError as error:
                if isinstance(error.__cause__, (SettingsError, UnsupportedError)):
                    raise error.__cause__ from None
                raise
            finally:
                for stage in stages:  # else torch keeps losses, and activations after an error
                    stage.clear_runtime_states()
        form, dtype = self._form
        loss = torch.zeros((), dtype=dtype, device=self.device)
        if batch.outputs:
            loss = torch.stack(batch.outputs).sum().to(dtype)  # without gradients, the dtype may differ
        dist.broadcast(loss, group=self.group, group_src=self.layout.ranks[-1])
        if self.replicas is not None:
            dist.all_reduce(loss, group=self.replicas)
            loss /= self.replicas.size()
        if issubclass(form, Tensor):
            return loss
        return (loss,) if issubclass(form, (tuple, list)) else form(loss=loss)

    def evaluate(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run forward passes only; every rank returns the full output."""
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            raise UnsupportedError(
                f"{self._name} got past_key_values: a stage of a pipeline has no cache of the others; "
                "call it, or generate(), with use_cache=False."
            )
        kwargs = {key: value for key, value in kwargs.items() if key != "past_key_values"}
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
        parts = _cut_batch(self._name, args, kwargs, self.micro_batches, exact=False)
        batch = Batch(parts=parts, weights=self._weights(parts), is_training=False)
        with self._running(batch), torch.no_grad(), hang_monitor.collective_scope("forward"):
            self._pass_forward(range(len(parts)))
            output = _merged(batch.outputs, batch.weights) if batch.outputs else None
            return self._broadcast_last(output)

    # What stages call.

    def run_stage(self, stage: Stage, received: Tensor | None, index: int) -> Tensor:
        """Run the forward pass of a stage for one micro-batch of the batch."""
        batch = cast("Batch", self._batch)
        self._activate(stage)
        self._stage, self._received, self._produced = stage, received, None
        self._nothing = None if received is None else received.new_full((), float("nan")).expand_as(received)
        args, kwargs = batch.parts[index]
        try:
            output = self._forward(*args, **kwargs)
        except Leave:
            output = None
        finally:
            produced, self._stage, self._received, self._nothing = self._produced, None, None, None
            self._produced = None
        if not stage.is_last:
            name = self.layout.names[stage.end - 1]
            if produced is None:
                raise SettingsError(
                    f"{self._name} did not call {name!r} before a module of a later stage: the modules of a "
                    "pipeline are called in the order in which they are registered."
                )
            activation = first_tensor(produced, name)
            self._length = len(produced) if isinstance(produced, tuple) else 0
            wanted = self._expected.get(stage.index)
            if batch.is_training and wanted is not None and tuple(activation.shape) != wanted:
                raise SettingsError(
                    f"The activation behind {name!r} has the shape {tuple(activation.shape)}, and "
                    f"{wanted} was expected from that of the first batch: pad batches to one shape."
                )
            return activation
        if not batch.is_training:
            batch.outputs.append(output)
            return torch.zeros(1, device=self.device)
        self._output_type = type(output)
        loss = _weighted(loss_in(self._name, output), batch.weights[index])
        batch.outputs.append(loss.detach())
        return torch.stack([self.precision.scale(loss * batch.scale)])  # FSDP2 warns about views

    def skipped(self, position: int, kind: type[nn.Module]) -> Any:
        """Return the result of calling another stage's module, or end this stage's forward pass."""
        stage = self._stage
        if stage is None:
            raise UnsupportedError(
                f"{self.layout.names[position]!r} is on another stage of the pipeline. Call the whole model."
            )
        self._record(position)
        if position >= stage.end:
            raise Leave
        before = stage.first - 1
        value = self._received if position == before else self._nothing
        is_alike = position == before or kind is self._absent[before].replaced
        length = self._forms.get(stage.index) if is_alike else 0
        return (value, *[None] * (length - 1)) if length else value

    # Running stages.

    @contextmanager
    def _running(self, batch: Batch) -> Generator[None]:
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None
            for module in self._sharded:  # without a backward pass, FSDP2 may keep gathered parameters
                module.reshard()
            if len(self.stages) > 1:
                self._activate(None)

    def _activate(self, stage: Stage | None) -> None:
        """Put one stage's modules into the model, or those of all stages of this rank."""
        if stage is self._active:
            return
        own = self._own
        if stage is not None:
            own = {position: own[position] for position in range(stage.first, stage.end)}
        self._show(own)
        self._active = stage

    def _show(self, own: Mapping[int, nn.Module]) -> None:
        for position, (owner, key) in enumerate(self._slots):
            owner.register_module(key, own.get(position, self._absent[position]))

    def _schedule(self, rows: int, length: int | None) -> tuple[Any, list[PipelineStage]]:
        """Return the schedule for batches of a shape, and its stages; collective for a new shape."""
        sizes, boundaries = (rows, length), self._boundaries or {}
        # The activations behind each stage, of the first batch, with the sizes of this one.
        examples: dict[int, Tensor] = {}
        for index, (shape, dtype) in boundaries.items():
            first = [
                new if new is not None and size == old else size
                for size, old, new in zip(shape, self._probed, sizes, strict=False)
            ]
            full = [*first, *shape[len(first) :]]
            examples[index] = torch.empty(full, dtype=dtype, device="meta", requires_grad=True)
        self._expected = {index: tuple(example.shape) for index, example in examples.items()}
        if sizes in self._schedules:
            return self._schedules[sizes]
        if len(self._schedules) == _MAX_SCHEDULES:
            self._schedules.clear()
        count = len(self.layout.bounds)
        stages = [
            PipelineStage(
                stage,
                stage.index,
                count,
                self.device,
                input_args=() if stage.index == 0 else examples[stage.index - 1],
                output_args=torch.empty(1, device="meta", dtype=self._form[1], requires_grad=True)
                if stage.is_last
                else examples[stage.index],
                group=self.group,
            )
            for stage in self.stages
        ]
        is_multi = issubclass(self._kind, PipelineScheduleMulti)
        schedule = self._kind(
            stages if is_multi else stages[0],
            self.micro_batches,
            loss_fn=lambda output, target: output.sum(),  # noqa: ARG005 - the stage has computed it
            scale_grads=False,
        )
        self._schedules[sizes] = schedule, stages
        return schedule, stages

    def probe(self) -> None:
        """Run the first micro-batch forward, to record the stages' outputs and check their calls.

        A collective of the pipeline.
        """
        batch = cast("Batch", self._batch)
        devices = [] if self.device.type == "cpu" else [self.device]
        buffers = [(buffer, buffer.clone()) for stage in self.stages for buffer in stage.buffers()]
        self._boundaries = {}
        self._calls = []
        handles = [
            module.register_forward_pre_hook(lambda *_, position=position: self._record(position))
            for position, module in self._own.items()
        ]
        try:
            with torch.random.fork_rng(devices=devices, device_type=self.device.type), torch.no_grad():
                self._pass_forward([0], is_probe=True)
        finally:
            for handle in handles:
                handle.remove()
            self._calls = None
            for buffer, value in buffers:
                buffer.copy_(value)
        failure, self._failure = self._failure, None
        about = (self._output_type, batch.outputs[0].dtype) if batch.outputs else None
        answers: list[Any] = [None] * self.group.size()
        dist.all_gather_object(answers, (about, failure and str(failure)), group=self.group)
        problem = next((text for _, text in answers if text), None)
        if problem is not None:  # on every rank, or the others would hang
            self._boundaries = None
            try:
                raise failure or SettingsError(problem)
            finally:
                del failure  # else a cycle: its traceback holds this frame
        self._form = answers[self.layout.ranks[-1]][0]

    def _record(self, position: int) -> None:
        if self._calls is not None:
            self._calls.append(position)

    def _check_calls(self, stage: Stage, output: Tensor, received: Tensor | None) -> None:
        """Check which modules a stage's first forward pass called, and that it used only the activation."""
        calls, self._calls = self._calls or [], []
        names = self.layout.names
        own = [position for position in calls if stage.first <= position < stage.end]
        start = calls.index(own[0]) if own else 0
        is_early = stage.first > 0 and stage.first - 1 not in calls[:start]
        if own != [*range(stage.first, stage.end)] or is_early:
            expected = ", ".join(names[stage.first : stage.end][:8])
            actual = ", ".join(names[position] for position in calls if position < stage.end)
            raise SettingsError(
                f"Stage {stage.index} of {self._name} should call each of its modules once, in the order in "
                f"which they are registered ({expected}) and after those before them, and it called "
                f"{actual}: such a model cannot be cut there; choose other pp_split_points."
            )
        if received is not None and output.isnan().any() and not received.isnan().any():
            raise SettingsError(
                f"Stage {stage.index} of {self._name} reads the result of a module before "
                f"{names[stage.first]!r} beside the activation that the stage before passes on: models with "
                "further state between stages cannot be cut there; choose other pp_split_points."
            )

    def _pass_forward(self, indices: Sequence[int], *, is_probe: bool = False) -> None:
        """Run forward passes only; each activation is sent with its shape and the length of its tuple.

        A probe records the boundaries; a stage that fails sends no length, and its error is stored.
        """
        ranks = self.layout.ranks
        for index in indices:
            passed: tuple[Tensor, int | None] | None = None  # on to a stage of the same rank
            for stage in self.stages:
                received, form = None, 0
                if stage.index > 0:
                    received, form = passed or self._receive(ranks[stage.index - 1])
                    self._forms[stage.index] = form
                    if is_probe:
                        self._note_boundary(stage.index - 1, received)
                activation = received
                if form is not None:  # else the stage before has failed
                    try:
                        arguments = () if received is None else (received,)
                        activation = stage(*arguments, index=torch.tensor(index, device="cpu"))
                        form = self._length
                        if is_probe:
                            self._check_calls(stage, activation, received)
                    except Exception as error:
                        if not is_probe:
                            raise
                        self._failure, form = error, None
                        activation = torch.zeros(1, device=self.device)
                passed = None
                if stage.is_last:
                    continue
                activation = cast("Tensor", activation)
                if is_probe:
                    self._note_boundary(stage.index, activation)
                if ranks[stage.index + 1] == self.rank:
                    passed = activation, form
                else:
                    self._send(activation, form, ranks[stage.index + 1])

    def _note_boundary(self, number: int, activation: Tensor) -> None:
        """Record what a stage passes on, with the sizes of the batch."""
        self._probed = _sizes_of(cast("Batch", self._batch).parts[0])
        cast("Any", self._boundaries)[number] = [*activation.shape], activation.dtype

    def _send(self, tensor: Tensor, form: int | None, rank: int) -> None:
        about = [tensor.shape, tensor.dtype, form]
        dist.send_object_list(about, group=self.group, group_dst=rank, device=self.device)
        dist.send(tensor.detach().contiguous(), group=self.group, group_dst=rank)

    def _receive(self, rank: int) -> tuple[Tensor, int | None]:
        about: list[Any] = [None] * 3
        dist.recv_object_list(about, group=self.group, group_src=rank, device=self.device)
        shape, dtype, form = about
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(tensor, group=self.group, group_src=rank)
        return tensor, form

    def _broadcast_last(self, output: Any) -> Any:
        """Broadcast an output of the last stage."""
        source = self.layout.ranks[-1]
        tensors: list[Tensor] = []

        def describe(tensor: Tensor) -> Tensor:
            tensors.append(tensor.contiguous())
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        about: list[Any] = [recursively_apply(describe, output) if self.rank == source else None]
        dist.broadcast_object_list(about, group=self.group, group_src=source)
        own = iter(tensors)

        def fill(like: Tensor) -> Tensor:
            tensor = next(own, None)
            if tensor is None:
                tensor = torch.empty(like.shape, dtype=like.dtype, device=self.device)
            dist.broadcast(tensor, group=self.group, group_src=source)
            return tensor

        return recursively_apply(fill, about[0])

    def _weights(self, parts: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Tensor | float]:
        """Return each micro-batch's share in the mean loss of the batch, by its labels or rows."""
        labels = [kwargs.get("labels") for _, kwargs in parts]
        if parts[0][1].get("num_items_in_batch") is not None:  # the loss is a sum over this number
            return [1.0] * len(parts)
        if all(isinstance(part, Tensor) and not part.is_floating_point() and part.ndim for part in labels):
            tensors = cast("list[Tensor]", labels)
            if self._is_causal:  # the first token is never predicted
                tensors = [part[..., 1:] for part in tensors]
            counts = torch.stack([(part != IGNORED).sum() for part in tensors]).to(torch.float64)
            return [*(counts / counts.sum().clamp(min=1)).unbind()]
        rows = [_sizes_of(part)[0] for part in parts]
        return [count / sum(rows) for count in rows]


_MAX_SCHEDULES = 8
"""Schedules that are kept: before torch 2.15, each has buffers for what its stages receive."""


def _cut_batch(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], number: int, *, exact: bool
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Cut the tensors of a batch along their rows, evenly if `exact`; pass other values to each."""
    rows = _num_rows(args, kwargs)
    if rows is None:
        raise SettingsError(f"{name} got no tensor with rows: a pipeline cuts batches into micro-batches.")
    if exact and (rows % number or rows == 0):
        raise SettingsError(
            f"A batch of {rows} rows cannot be cut into pp_num_microbatches={number}: make the batch "
            "size a multiple of it, leave out the last batch (drop_last=True), or complete it "
            "(even_batches=True of DataLoaderConfiguration)."
        )
    each = -(-rows // number)

    def part(value: Any, start: int) -> Any:
        has_rows = isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == rows
        return value[start : start + each] if has_rows else value

    return [
        (
            tuple(part(value, start) for value in args),
            {key: part(value, start) for key, value in kwargs.items()},
        )
        for start in range(0, rows, each)
    ]


def _num_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the rows of a batch; tensors of one dim, such as the positions of tokens, may be longer."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim]
    return max((len(value) for value in tensors if value.ndim > 1), default=None) or max(
        map(len, tensors), default=None
    )


def _sizes_of(part: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[int, int | None]:
    """Return the rows of a micro-batch, and the second size of its first tensor that has one."""
    args, kwargs = part
    rows = _num_rows(args, kwargs) or 0
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    wide = next((tensor for tensor in tensors if tensor.ndim > 1 and len(tensor) == rows), None)
    return rows, None if wide is None else wide.shape[1]


def loss_in(name: str, output: Any) -> Tensor:
    """Return the loss in the output of a model."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    loss = first.get("loss") if isinstance(first, Mapping) else getattr(first, "loss", first)
    if not isinstance(loss, Tensor) or loss.ndim:
        raise SettingsError(
            f"{name} returned no loss in training: a pipeline computes gradients when the model is called, "
            "so its forward computes the loss (pass labels), and returns it alone, first, or as `loss`."
        )
    return loss


def _weighted(loss: Tensor, weight: Tensor | float) -> Tensor:
    if not isinstance(weight, torch.Tensor):
        return loss * weight
    weighted = loss * weight.to(loss.dtype)
    return torch.where(weight > 0, weighted, 0)  # the mean of a micro-batch without labels is not a number


def _merged(outputs: Sequence[Any], weights: Sequence[Tensor | float]) -> Any:
    """Merge the outputs of micro-batches: concatenate rows, average losses by weight."""
    first = outputs[0]
    if isinstance(first, Tensor):
        if first.ndim:
            return torch.cat([*outputs])
        return torch.stack([*map(_weighted, outputs, weights)]).sum()
    if isinstance(first, Mapping):
        keys: Any = [key for key in first if key != "past_key_values"]
        return type(first)(**{key: _merged([value[key] for value in outputs], weights) for key in keys})
    if isinstance(first, (tuple, list)):
        items = [_merged([*values], weights) for values in zip(*outputs, strict=True)]
        return type(first)(items)
    return first
