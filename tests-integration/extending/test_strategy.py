"""A third party's strategy: installed by entry point, selected by name, with an engine that trains."""

from __future__ import annotations

import pytest
import torch

from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError, UnsupportedError
from accel_train import Accelerator
from extending.installed import install, installed
from harness import distributed

STEPS = 6


class Chain(torch.nn.Module):
    """A loss in training; predictions otherwise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6), torch.nn.Linear(6, 2)
        ).double()

    def loss(self, outputs, targets):
        return torch.nn.functional.mse_loss(outputs, targets)

    def forward(self, inputs, targets=None):
        outputs = self.layers(inputs)
        return outputs if targets is None else self.loss(outputs, targets)


def make_batches():
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(STEPS, 8, 6, generator=generator, dtype=torch.float64)
    return [(batch[:, :4], batch[:, 4:]) for batch in rows]


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def train_plainly(accumulation):
    model = Chain()
    optimizer = make_optimizer(model)
    losses = []
    for index, (inputs, targets) in enumerate(make_batches()):
        loss = model(inputs, targets)
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (index + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()


def train(accelerator):
    model = Chain()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    losses = []
    for inputs, targets in make_batches():
        with accelerator.accumulate(model):
            loss = model(inputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("accumulation", [1, 2])
@distributed(world_size=2)
def test_an_engine_that_owns_forward_and_backward_trains_as_one_process(accumulation, tmp_path):
    with installed(install(tmp_path / str(torch.distributed.get_rank()))):
        accelerator = Accelerator(
            cpu=True, strategy="example_pipeline", gradient_accumulation_steps=accumulation
        )
        model, losses = train(accelerator)
        expected, weights = train_plainly(accumulation)
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(accelerator.get_state_dict(model), weights, rtol=1e-12, atol=1e-12)
        window = [*["train_step", "after_micro_batch"] * (accumulation - 1), "train_step", "after_step"]
        assert accelerator._parts.strategy.events == window * (STEPS // accumulation)
        model.eval()
        torch.testing.assert_close(model(make_batches()[0][0]), reference_outputs(weights))
        with pytest.raises(SettingsError, match=r"a tensor that no model returned.*'example_pipeline'"):
            accelerator.backward(model(*make_batches()[0]))


def reference_outputs(weights):
    model = Chain()
    model.load_state_dict(weights)
    return model(make_batches()[0][0])


def shard_of(batch):
    half = len(batch[0]) // 2
    first = torch.distributed.get_rank() * half
    return [part[first : first + half] for part in batch]


def train_steps(accelerator, model, optimizer, batches):
    for batch in batches:
        accelerator.backward(model(*shard_of(batch)))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("after", ["example_packed", None])
@distributed(world_size=2)
def test_an_engine_builds_its_optimizer_and_every_strategy_reads_its_files(after, tmp_path):
    with installed(install(tmp_path / str(torch.distributed.get_rank()))):
        from accel_example.packed import PackedOptim

        batches, folder = make_batches(), tmp_path / "checkpoint"
        first = Accelerator(cpu=True, strategy="example_packed")
        model = Chain()
        model, optimizer = first.prepare(model, PackedOptim(model.parameters(), lr=0.05))
        train_steps(first, model, optimizer, batches[:3])
        first.save_state(folder)
        first.wait_for_everyone()
        assert (folder / "pytorch_model" / "packed.pt").is_file()
        assert not (folder / "model.safetensors").exists()
        first.free_memory()
        AcceleratorState._reset_state()
        second = Accelerator(cpu=True, strategy=after)
        model = Chain()
        torch.nn.init.zeros_(model.layers[0].weight)
        own = PackedOptim if after else torch.optim.SGD
        options = {} if after else {"momentum": 0.9}
        model, optimizer = second.prepare(model, own(model.parameters(), lr=0.05, **options))
        second.load_state(folder)
        train_steps(second, model, optimizer, batches[3:])
        weights = second.get_state_dict(model)
        right = Chain()
        alone = torch.optim.SGD(right.parameters(), lr=0.05, momentum=0.9)
        for inputs, targets in batches:
            right(inputs, targets).backward()
            alone.step()
            alone.zero_grad()
        for name, value in right.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12)


@distributed(world_size=2)
def test_the_placeholder_of_an_engine_is_refused_by_other_strategies(tmp_path):
    with installed(install(tmp_path / str(torch.distributed.get_rank()))):
        from accel_example.packed import PackedOptim

        model = Chain()
        with pytest.raises(UnsupportedError, match=r"PackedOptim.*OPTIMIZER_FROM_CONFIGURATION"):
            Accelerator(cpu=True).prepare(model, PackedOptim(model.parameters(), lr=0.05))
