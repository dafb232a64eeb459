"""The documented methods of `Accelerator` mean the same under every strategy."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from accel_ops.weights.read import load_state_dict
from accel_plugins import sequence_parallel_loss
from accel_plugins.kwargs import DataLoaderConfiguration
from accel_plugins.strategy import Feature
from accel_state.errors import UnsupportedError
from accel_train import Accelerator
from distributed.equality.alone import CLIP, LENGTH, ROWS, batches_of, fresh
from distributed.equality.strategies import STRATEGIES, Cell, fsdp
from harness import cases, distributed
from harness.engines import deepspeed_process

if TYPE_CHECKING:
    from pathlib import Path

    from distributed.equality.alone import Fresh

# Those of a recipe round to eight bits, and pipelines need the loss of the model itself: the table of
# equality and `test_pipeline.py` compare them.
ALL = {
    "fsdp1, flat": None,
    **{name: row for name, row in STRATEGIES.items() if not (row.recipe or row.computes_loss)},
}
FRESH = {name: row.fresh for name, row in STRATEGIES.items()}
ON_TWO = [name for name, row in ALL.items() if row is None or row.smallest == 2]
ON_FOUR = [name for name, row in ALL.items() if row is not None and row.smallest == 4]
TOLERANCE = 1e-6


class Counter:
    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Run:
    """A model in the hands of a strategy, and the same in plain PyTorch."""

    def __init__(self, strategy: str, *, accumulation: int = 1, tied: bool = False) -> None:
        row = ALL[strategy]
        world = dist.get_world_size()
        cell = Cell(
            strategy=strategy, precision="no", accumulation=accumulation, clip=False, world_size=world
        )
        arguments = fsdp(1, use_orig_params=False) if row is None else row.arguments(cell)
        config = DataLoaderConfiguration(split_batches=True)
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulation, dataloader_config=config, **arguments
        )
        fresh_of = FRESH.get(strategy, fresh)
        self.inside, optimizer = made(fresh_of, tied=tied)
        self.right, self.right_optimizer = made(fresh_of, tied=tied)
        samples = [{"input_ids": row[:-1], "shift_labels": row[1:]} for row in batches_of(2)]
        loader = torch.utils.data.DataLoader(samples, batch_size=ROWS)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.inside, optimizer, loader)

    def backward(self, batch: dict[str, torch.Tensor]) -> None:
        inputs, labels = batch["input_ids"].clone(), batch["shift_labels"].clone()
        positions = batch.get("position_ids", torch.arange(LENGTH).repeat(len(inputs), 1))
        parts = [inputs, labels, positions]
        with self.accelerator.maybe_context_parallel(parts, [1, 1, 1], {*parts}):
            logits = self.model(inputs, positions)
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            self.accelerator.backward(sequence_parallel_loss(loss, labels.numel()))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, batch: dict[str, torch.Tensor]) -> None:
        """One step."""
        self.backward(batch)
        self.step()

    def follow(self, number: int) -> None:
        """The same step with the plain model, which then has the same weights."""
        self.plainly(number)
        self.plain_step()
        self.assert_right()

    def plainly(self, number: int, scale: float = 1.0) -> None:
        """Add the gradients of a whole batch to those of the plain model."""
        batch = batches_of(2)[ROWS * number : ROWS * number + ROWS]
        logits = self.right(batch[:, :-1])
        (cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) * scale).backward()

    def plain_step(self) -> None:
        self.right_optimizer.step()
        self.right_optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        found = self.accelerator.get_state_dict(self.model)
        return {name: value.detach().clone() for name, value in found.items()}

    def assert_right(self) -> None:
        found = self.state()
        if self.accelerator.is_main_process:
            assert_same(found, self.right.state_dict())


def made(begin: Fresh, *, tied: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = begin(None)
    if not tied:
        return model, optimizer
    model.head.weight = model.embedding.weight
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.05)


def assert_same(found: dict, wanted: dict, tolerance: float = TOLERANCE) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=name)


def under(strategy: str) -> ExitStack:
    """What goes around a test: what is left by DeepSpeed is put away, and some warnings of torch are."""
    stack = ExitStack()
    if strategy.startswith("zero"):
        stack.enter_context(deepspeed_process())
    stack.enter_context(warnings.catch_warnings())
    # Tensor-parallel layers return views; nothing changes them in place here.
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    return stack


def steps_and_micro_batches(strategy: str) -> None:
    """`accumulate`, `clip_grad_norm_`, `no_sync`, `clip_grad_value_`."""
    with under(strategy):
        run = Run(strategy, accumulation=2)
        accelerator, before = run.accelerator, run.state()
        for number, batch in enumerate(run.loader):
            with accelerator.accumulate(run.model):
                run.backward(batch)
                assert accelerator.sync_gradients == (number == 1)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(run.model.parameters(), CLIP)
                run.step()
                if number == 0:
                    assert_same(run.state(), before, 0)
            run.plainly(number, 0.5)
        wanted = torch.nn.utils.clip_grad_norm_(run.right.parameters(), CLIP)
        assert wanted > 2 * CLIP
        torch.testing.assert_close(torch.as_tensor(norm), wanted, rtol=0, atol=1e-5)
        run.plain_step()
        run.assert_right()

        accelerator.gradient_accumulation_steps = 1
        batches = [*run.loader]
        with accelerator.no_sync(run.model):
            run.backward(batches[0])
        run.backward(batches[1])
        run.step()
        run.plainly(0)
        run.plainly(1)
        run.plain_step()
        run.assert_right()

        run.backward(batches[0])
        if Feature.CLIP_GRAD_VALUE in accelerator._parts.strategy.features:
            accelerator.clip_grad_value_(run.model.parameters(), 1e-3)
            run.plainly(0)
            torch.nn.utils.clip_grad_value_(run.right.parameters(), 1e-3)
            run.step()
            run.plain_step()
            run.assert_right()
        else:
            with pytest.raises(UnsupportedError, match="CLIP_GRAD_VALUE"):
                accelerator.clip_grad_value_(run.model.parameters(), 1e-3)
        accelerator.free_memory()


def states_and_samples(strategy: str, folder: Path) -> None:
    """Everything else: what is got out of a run, put into files, taken back, and let go."""
    with under(strategy):
        run = Run(strategy)
        accelerator, counter = run.accelerator, Counter()
        assert accelerator.unwrap_model(run.model) is run.inside
        run.assert_right()

        numbers = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(10), batch_size=4))
        seen = torch.cat([accelerator.gather_for_metrics(batch) for batch in numbers])
        # Of every sequence, each of two processes along `cp` or `sp` has a part of its own to tell of.
        assert sorted(seen.tolist()) == sorted([*range(10)] * (2 if strategy in {"cp", "sp"} else 1))

        accelerator.register_for_checkpointing(counter)
        batches = [*run.loader]
        run.train(batches[0])
        counter.count = 1
        accelerator.save_state(str(folder / "state"), flush=False)
        counter.count = 2
        run.train(batches[1])
        accelerator.load_state(str(folder / "state"))
        assert counter.count == 1
        run.follow(0)
        run.train(batches[1])
        run.follow(1)

        accelerator.save_model(run.model, folder / "weights")
        accelerator.wait_for_everyone()
        if state := run.state():
            saved = load_state_dict(folder / "weights" / "model.safetensors")
            assert_same({name: saved.pop(name) for name in state}, state, 0)
            assert not saved

        assert accelerator.free_memory(1, 2) == [None, None]
        assert not accelerator._models
        assert not accelerator._optimizers
        again, optimizer = FRESH.get(strategy, fresh)(None)
        again, optimizer = accelerator.prepare(again, optimizer)  # the accelerator can be used again
        if state := accelerator.get_state_dict(again):
            assert_same(state, FRESH.get(strategy, fresh)(None)[0].state_dict(), 0)
        accelerator.free_memory()


def tied_weights(strategy: str, folder: Path) -> None:
    """Weights with two names are trained as one, and have both names wherever they are looked at."""
    with under(strategy):
        run = Run(strategy, tied=True)
        batches = [*run.loader]
        run.train(batches[0])
        run.follow(0)
        run.accelerator.save_state(str(folder / "state"), flush=False)
        run.accelerator.save_model(run.model, folder / "weights")
        run.train(batches[1])
        run.accelerator.load_state(str(folder / "state"))
        run.assert_right()
        run.train(batches[1])
        run.follow(1)
        assert run.inside.head.weight is run.inside.embedding.weight
        saved = load_state_dict(folder / "weights" / "model.safetensors")
        assert len({"head.weight", "embedding.weight"} & saved.keys()) == 1
        run.accelerator.free_memory()


@pytest.mark.parametrize("strategy", ON_TWO)
@distributed(world_size=2)
def test_steps_and_micro_batches(strategy):
    steps_and_micro_batches(strategy)


@pytest.mark.parametrize("strategy", cases(ON_FOUR, always={"copies+tp"}))
@distributed(world_size=4)
def test_steps_and_micro_batches_on_four(strategy):
    steps_and_micro_batches(strategy)


@pytest.mark.parametrize("strategy", ON_TWO)
@distributed(world_size=2)
def test_states_and_samples(strategy, tmp_path):
    states_and_samples(strategy, tmp_path)


@pytest.mark.parametrize("strategy", cases(ON_FOUR, always={"fsdp2+tp"}))
@distributed(world_size=4)
def test_states_and_samples_on_four(strategy, tmp_path):
    states_and_samples(strategy, tmp_path)


@pytest.mark.parametrize("strategy", ["fsdp1, flat", "fsdp1", "fsdp2", "tp", "zero3"])
@distributed(world_size=2)
def test_tied_weights(strategy, tmp_path):
    tied_weights(strategy, tmp_path)
