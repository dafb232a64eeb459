"""Pipeline-parallel inference: a model's layers as stages on several ranks, batches as micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torch.func import functional_call

from accel_bigmodel.device_map import generate_device_map, split_points_of
from accel_bigmodel.hooks import M
from accel_ops.collectives import broadcast, broadcast_object_list
from accel_ops.tree import (
    concatenate,
    get_data_structure,
    ignorant_find_batch_size,
    initialize_tensors,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from accel_state import hang_monitor
from accel_state.errors import SettingsError
from accel_state.partial_state import PartialState
from accel_state.torch_private import tree_leaves, tree_structure, tree_unflatten


def prepare_pippy(
    model: M,
    split_points: Literal["auto"] | Sequence[str] = "auto",
    no_split_module_classes: str | Sequence[str] | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> M:
    """Split a model's layers into pipeline stages, one per process. For inference only.

    Afterwards every process calls the model in the same way. The first process's inputs are used; batches may
    have any number of rows. The last process gets the output, the others `None` unless `gather_output`.

    Args:
        model: The model, in evaluation mode, in full on every process. Its `forward` is replaced.
        split_points: The names of the first modules of the second and every further stage; `"auto"` balances
            the weights.
        no_split_module_classes: Names of classes whose modules are not split across stages.
        example_args: Example inputs for tracing the model: tensors with the batch first.
        example_kwargs: Example keyword inputs.
        num_chunks: Number of micro-batches per batch, so that several stages run concurrently; the number of
            processes by default.
        gather_output: Whether every process gets the output.

    Returns:
        The model; its attribute `hf_split_points` lists the split points. A single process runs it unchanged.

    Raises:
        SettingsError: There is no example input, there are fewer layers than processes, or a split point is
            no module of the model.
        RuntimeError: The model cannot be traced.
    """
    state = PartialState()
    stages, chunks = state.num_processes, num_chunks or state.num_processes
    kwargs = dict(example_kwargs or {})
    rows = find_pippy_batch_size(example_args, kwargs)
    if rows is None:
        raise SettingsError(
            "prepare_pippy() traces the model with example inputs: pass example_args or example_kwargs with "
            "at least one tensor whose first dimension is the batch."
        )
    if split_points == "auto":
        split_points = split_points_of(generate_device_map(model, stages, no_split_module_classes), stages)
    _check_points(model, split_points, stages)
    model.hf_split_points = list(split_points)  # pyright: ignore[reportArgumentType] - the documented attribute
    if stages == 1:
        return model
    size = math.ceil(rows / chunks)
    args, kwargs = _padded(slice_tensors((example_args, kwargs), slice(0, size)), size)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    args, kwargs = send_to_device((args, kwargs), device)
    named = (*model.named_parameters(), *model.named_buffers())
    tensors = {name: tensor.to("meta") for name, tensor in named}
    with torch.no_grad():  # the structure of the output, which tracing loses
        output = functional_call(model, tensors, *send_to_device((args, dict(kwargs)), "meta"))
    structure = tree_structure(output)
    schedule = build_pipeline(model, split_points, args, kwargs, chunks)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        del self
        output = _forward_in_slices(schedule.step, size * chunks, gather_output, args, kwargs)
        return None if output is None else tree_unflatten(tree_leaves(output), structure)

    vars(model)["_original_forward"] = model.forward
    vars(model)["forward"] = MethodType(forward, model)
    return model


def build_pipeline(
    model: nn.Module,
    split_points: Sequence[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    num_chunks: int,
) -> ScheduleGPipe:
    """Trace a model, and build this process's stage of it.

    Returns:
        The schedule. Its `step` takes a batch on the first process, and returns the output on the last.
    """
    state = PartialState()
    spec = {f"model.{point}": SplitPoint.BEGINNING for point in split_points}
    with torch.no_grad(), _restored(model, split_points):
        pipe = pipeline(_Entrance(model), mb_args=args, mb_kwargs=dict(kwargs or {}), split_spec=spec)
        stage = pipe.build_stage(state.process_index, device=state.device)
    return ScheduleGPipe(stage, num_chunks)


def pippy_forward(
    forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any
) -> Any:
    """Run one batch through a pipeline and return its output, or `None`. Call it on every process."""
    state = PartialState()
    rows: int = broadcast_object_list([find_pippy_batch_size(args, kwargs)])[0] or num_chunks
    wanted = math.ceil(rows / num_chunks) * num_chunks
    return _one_batch(forward, rows, wanted, state, gather_output, args, kwargs)


def find_pippy_batch_size(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> int | None:
    """Return the number of rows of the first tensor among the inputs of a model; `None` without a tensor.

    Example:
        >>> find_pippy_batch_size((torch.zeros(3, 2),), {})
        3
    """
    for value in (*args, *(kwargs or {}).values()):
        rows = ignorant_find_batch_size(value)
        if rows is not None:
            return rows
    return None


def _forward_in_slices(
    forward: Callable[..., Any],
    most: int,
    gather: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a batch of any size in slices: the traced model takes exactly `most` rows."""
    state = PartialState()
    rows: int | None = broadcast_object_list([find_pippy_batch_size(args, kwargs)])[0]
    if not rows:
        raise SettingsError("The first process called a pipelined model without a tensor that has a row.")
    outputs: list[Any] = []
    with torch.no_grad():
        for begin in range(0, rows, most):
            part = slice(begin, min(begin + most, rows))
            some_args, some_kwargs = (
                slice_tensors((args, kwargs), part) if state.is_main_process else ((), {})
            )
            count = part.stop - begin
            outputs.append(_one_batch(forward, count, most, state, gather, some_args, some_kwargs))
    return outputs[0] if len(outputs) == 1 or outputs[0] is None else concatenate(outputs)


def _one_batch(
    forward: Callable[..., Any],
    rows: int,
    wanted: int,
    state: PartialState,
    gather: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    with hang_monitor.transport_errors_explained("pipeline"):
        if state.is_main_process:
            args, kwargs = _padded((args, kwargs), wanted)
            output = forward(*args, **kwargs)
        else:
            output = forward()
    if state.is_last_process:
        output = slice_tensors(output, slice(0, rows))
    if not gather:
        return output
    last = state.num_processes - 1
    described = [get_data_structure(output) if state.is_last_process else None]
    structure = broadcast_object_list(described, last)[0]
    if not state.is_last_process:
        output = recursively_apply(lambda tensor: tensor.to(state.device), initialize_tensors(structure))
    return broadcast(output, last)


def _padded(data: Any, wanted: int) -> Any:
    def longer(tensor: torch.Tensor) -> torch.Tensor:
        missing = wanted - len(tensor) if tensor.ndim else 0
        return torch.cat([tensor, *[tensor[-1:]] * missing]) if missing > 0 else tensor

    return recursively_apply(longer, data)


def _check_points(model: nn.Module, split_points: Sequence[str], stages: int) -> None:
    known = {name for name, _ in model.named_modules()}
    for name in split_points:
        if name not in known:
            raise SettingsError(
                f"split_points has {name!r}, which is not a module of {type(model).__name__}."
            )
    if len(split_points) != stages - 1:
        raise SettingsError(
            f"split_points={list(split_points)!r} makes {len(split_points) + 1} stages, but there are "
            f"{stages} processes: pass one point fewer than processes."
        )


class _Entrance(nn.Module):
    """Route every input through the first stage, which sends it to the stages that use it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = recursively_apply(torch.clone, (args, kwargs))
        return self.model(*args, **kwargs)


@contextmanager
def _restored(model: nn.Module, split_points: Sequence[str]) -> Generator[None]:
    """Undo the changes that marking split points makes to the modules."""
    forwards = {name: vars(model.get_submodule(name)).get("forward") for name in split_points}
    try:
        yield
    finally:
        for name, forward in forwards.items():
            inside = vars(model.get_submodule(name))
            inside.pop("_orig_forward", None)
            inside.pop("forward", None)
            if forward is not None:
                inside["forward"] = forward
