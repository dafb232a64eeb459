"""No tensor outlives its last use: with the cycle collector off, nothing made in a walk is alive after it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from accel_bigmodel import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accel_ops import (
    broadcast,
    broadcast_object_list,
    concatenate,
    convert_to_fp32,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    pad_input_tensors,
    recursively_apply,
    reduce,
    send_to_device,
    slice_tensors,
)
from accel_ops.tree import local_part
from accel_plugins import sequence_parallel_loss
from accel_plugins.deepspeed.library import start
from accel_plugins.kwargs import DataLoaderConfiguration, GradScalerKwargs
from accel_state.accelerator_state import AcceleratorState
from accel_state.partial_state import PartialState
from accel_train import Accelerator
from distributed.equality.alone import LENGTH, ROWS, batches_of, fresh
from distributed.equality.strategies import STRATEGIES, Cell
from harness import cases, distributed
from harness.engines import deepspeed_process
from harness.survivors import collector_off, no_survivor

ON_TWO = [name for name, row in STRATEGIES.items() if row.smallest <= 2]
ON_FOUR = [name for name, row in STRATEGIES.items() if row.smallest == 4]


_TRAINED = ("a step", "an epoch", "a step after loading")
RETAINED: dict[str, dict[str, int]] = {
    # torch frees the last gradient of each unit, and the root's full parameters, in the next forward pass.
    "fsdp1": {**dict.fromkeys(_TRAINED, 3), "an evaluation": 5},
    # DeepSpeed's engine keeps the last loss.
    **{f"zero{stage}": dict.fromkeys(_TRAINED, 1) for stage in range(3)},
    # The engine of stage 3 is in cycles of DeepSpeed's, with the model and the optimizer, until the collector
    # runs: `test_an_engine_of_stage_3_outlives_its_end` shows it without this package.
    "zero3": {**dict.fromkeys(_TRAINED, 1), "prepare and free_memory": 96},
}
"""How many tensors a strategy's library keeps after a walk, until the next step replaces them."""


def under(strategy: str) -> ExitStack:
    stack = ExitStack()
    if strategy.startswith("zero"):
        stack.enter_context(deepspeed_process())
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    warnings.filterwarnings("ignore", category=FutureWarning)
    return stack


class Run:
    """A prepared model, its optimizer and a loader of three batches."""

    def __init__(self, strategy: str, precision: str) -> None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        row = STRATEGIES[strategy]
        cell = Cell(strategy=strategy, precision=precision, accumulation=1, clip=False, world_size=world_size)
        arguments: dict[str, Any] = {"mixed_precision": precision, **row.arguments(cell)}
        if precision == "fp16" and not strategy.startswith("zero"):
            arguments["kwargs_handlers"] = [GradScalerKwargs(init_scale=2.0)]  # else the CPU is in float32
        self.computes_loss = row.computes_loss
        self.accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True), **arguments
        )
        model, optimizer = row.fresh(None)
        samples = [{"input_ids": row[:-1], "shift_labels": row[1:]} for row in batches_of(3)]
        loader = torch.utils.data.DataLoader(samples, batch_size=ROWS)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        inputs, labels = batch["input_ids"].clone(), batch["shift_labels"].clone()
        positions = batch.get("position_ids", torch.arange(LENGTH).repeat(len(inputs), 1))
        parts = [inputs, labels, positions]
        with (
            self.accelerator.accumulate(self.model),
            self.accelerator.maybe_context_parallel(parts, [1, 1, 1], {*parts}),
        ):
            if self.computes_loss:
                loss = self.model(inputs, shift_labels=labels)
            else:
                logits = self.model(inputs, positions).flatten(0, 1)
                loss = cross_entropy(logits, labels.flatten(), reduction="sum")
                loss = sequence_parallel_loss(loss, labels.numel())
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        self.model.eval()
        for batch in self.loader:
            with torch.no_grad():
                self.accelerator.gather_for_metrics(batch["shift_labels"])
                if not self.computes_loss:
                    logits = self.model(batch["input_ids"], batch.get("position_ids"))
                    self.accelerator.gather_for_metrics({"logits": logits, "names": ["a"] * len(logits)})
        self.model.train()

    def state(self) -> list[torch.Tensor]:
        """What loading may replace: the tensors of the optimizer and of the model."""
        values = [value for part in self.optimizer.state.values() for value in part.values()]
        outer = [*filter(torch.is_tensor, values), *self.model.parameters(), *self.model.buffers()]
        fragments = [getattr(parameter, "_hp_mapping", None) for parameter in self.model.parameters()]
        linked = [value for part in fragments if part is not None for value in vars(part).values()]
        return [*outer, *map(local_part, outer), *filter(torch.is_tensor, linked)]


def walk(strategy: str, precision: str, folder: Path, *, checked: bool) -> None:
    """Prepare, train, evaluate, save, load, let go."""
    block = partial(no_survivor_but, RETAINED.get(strategy, {})) if checked else unchecked
    run = Run(strategy, precision)
    accelerator = run.accelerator
    for batch in run.loader:  # makes the state of the optimizer, and what lasts as long as the model
        run.step(batch)
    del batch
    with block("an epoch"):
        for batch in run.loader:
            with block("a step"):
                run.step(batch)
        del batch
    run.evaluate()
    with block("an evaluation"):
        run.evaluate()
    accelerator.save_state(folder / "first", blocking=False).wait()  # makes the host buffers of later ones
    with block("save_state"):
        accelerator.save_state(folder / "state")
    with block("save_state(blocking=False)"):
        saving = accelerator.save_state(folder / "later", blocking=False)
        saving.wait()  # and `saving` may be kept
    with block("load_state", run.state):
        accelerator.load_state(folder / "state")
    with block("get_state_dict"):
        accelerator.get_state_dict(run.model)
    with block("save_model"):
        accelerator.save_model(run.model, folder / "weights")
    with block("a step after loading"):
        for batch in run.loader:
            run.step(batch)
        del batch
    del run
    accelerator.free_memory()


def no_survivor_but(
    counts: Mapping[str, int], walk: str, state: Callable[[], Iterable[torch.Tensor]] = tuple
) -> AbstractContextManager[None]:
    return no_survivor(walk, state, but=counts.get(walk, 0))


def unchecked(*_: Any, **__: Any) -> ExitStack:
    return ExitStack()


def check(strategy: str, precision: str, folder: Path) -> None:
    with under(strategy):
        walk(strategy, precision, folder / "warm", checked=False)  # imports, caches, groups
        AcceleratorState._reset_state()
        with collector_off(), no_survivor_but(RETAINED.get(strategy, {}), "prepare and free_memory"):
            walk(strategy, precision, folder / "checked", checked=True)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_one_process(precision, tmp_path):
    check("ddp", precision, tmp_path)


@pytest.mark.parametrize("strategy", cases(ON_TWO, always={"ddp", "fsdp2", "tp"}))
@distributed(world_size=2)
def test_two_ranks(strategy, tmp_path):
    check(strategy, "bf16", tmp_path)


@pytest.mark.parametrize("strategy", cases(ON_FOUR, always=set()))
@distributed(world_size=4)
def test_four_ranks(strategy, tmp_path):
    check(strategy, "bf16", tmp_path)


def step_of_stage_3(deepspeed: Any) -> None:
    """A step of DeepSpeed's engine alone, and its end."""
    model, optimizer = fresh()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    inputs = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    logits = engine(inputs, torch.arange(LENGTH).repeat(ROWS, 1))
    engine.backward(cross_entropy(logits.flatten(0, 1).float(), inputs.flatten()))
    engine.step()
    engine.destroy()


@pytest.mark.thorough
@distributed(world_size=2)
def test_an_engine_of_stage_3_outlives_its_end():
    with under("zero3"):
        deepspeed = start(PartialState(cpu=True).runtime)
        step_of_stage_3(deepspeed)
        with collector_off():
            retained = RETAINED["zero3"]["prepare and free_memory"]
            with no_survivor("a step and its end", but=retained):
                step_of_stage_3(deepspeed)
            with pytest.raises(AssertionError, match=f"{retained} tensor"), no_survivor("the same"):
                step_of_stage_3(deepspeed)


def collectives() -> dict[str, Any]:
    """Every operation on nested data, by name, on data of its own."""
    rank = PartialState().process_index

    def data() -> dict[str, Any]:
        return {"logits": torch.ones(2 + rank, 3), "more": [torch.arange(2 + rank), torch.ones(1)]}

    def even() -> dict[str, Any]:
        return {"logits": torch.ones(2, 3), "more": [torch.arange(2), torch.ones(1, dtype=torch.bfloat16)]}

    def fails() -> None:
        with pytest.raises(TypeError):
            recursively_apply(torch.neg, {"logits": torch.ones(2), "text": ""}, error_on_other_type=True)

    return {
        "gather": lambda: gather(data()),
        "gather_object": lambda: gather_object([data()]),
        "reduce": lambda: [reduce(even(), how) for how in ("sum", "mean")],
        "broadcast": lambda: broadcast(even()),
        "broadcast_object_list": lambda: broadcast_object_list([even()]),
        "pad_across_processes": lambda: pad_across_processes(data(), dim=0),
        "pad_input_tensors": lambda: pad_input_tensors(torch.ones(3, 2), 3, 2),
        "copy_tensor_to_devices": lambda: copy_tensor_to_devices(torch.ones(2) if rank == 0 else None),
        "recursively_apply": lambda: recursively_apply(torch.neg, data()),
        "convert_to_fp32": lambda: convert_to_fp32(even()),
        "send_to_device": lambda: send_to_device(data(), "cpu"),
        "concatenate": lambda: concatenate([even(), even()]),
        "slice_tensors": lambda: slice_tensors(data(), slice(1)),
        "a leaf that is no tensor": fails,
    }


def check_collectives() -> None:
    PartialState(cpu=True)
    calls = collectives()
    for call in calls.values():
        call()
    with collector_off():
        for name, call in calls.items():
            with no_survivor(name):
                call()


def test_collectives_of_one_process():
    check_collectives()


@distributed(world_size=2)
def test_collectives_of_two_ranks():
    check_collectives()


def big_models(folder: Path) -> dict[str, Any]:
    """Every way to get a model whose weights are elsewhere, by name."""
    inputs = torch.zeros(1, 4, dtype=torch.long)

    def use(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model(inputs)

    def load(device_map: Any, **options: Any) -> None:
        with init_empty_weights():
            model = fresh()[0]
        use(load_checkpoint_and_dispatch(model, folder / "weights", device_map=device_map, **options))

    halves = {"embedding": "cpu", "positions": "cpu", "blocks": "disk", "norm": "disk", "head": "cpu"}
    return {
        "load_checkpoint_and_dispatch": lambda: load({"": "cpu"}),
        "the same, to the disk": lambda: load(halves, offload_folder=folder / "offload"),
        "cpu_offload": lambda: use(cpu_offload(fresh()[0], "cpu")),
        "disk_offload": lambda: use(disk_offload(fresh()[0], folder / "disk", "cpu")),
        "dispatch_model": lambda: use(
            dispatch_model(fresh()[0], halves, main_device="cpu", offload_dir=folder / "dispatched")
        ),
        "infer_auto_device_map": lambda: infer_auto_device_map(fresh()[0], {"cpu": "1GB"}),
    }


def test_big_models(tmp_path):
    Accelerator(cpu=True).save_model(fresh()[0], tmp_path / "weights")
    for name, call in big_models(tmp_path).items():
        call()
        with collector_off(), no_survivor(name):
            call()
            if name not in {"load_checkpoint_and_dispatch", "infer_auto_device_map"}:
                # `forward` and `_old_forward` of a model with hooks refer to it, as with Accelerate.
                gc.collect()
