"""A third party's precision recipe: it converts models before they are wrapped or sharded."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from accel_plugins.fp8.recipe import Recipe, RecipeSpec
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state import lazy as tables
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError
from accel_train import Accelerator
from extending.installed import install, installed
from harness import distributed

STEPS = 6
ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    strategy: str
    batches_differ: bool


CASES = {
    "ddp": Case(strategy="ddp", batches_differ=True),
    "fsdp2": Case(strategy="fsdp2", batches_differ=True),
    "tp": Case(strategy="tp", batches_differ=False),
}


def make_model():
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()
    model.tp_plan = {"0": "colwise", "2": "rowwise"}
    return model


def make_batches():
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(STEPS, ROWS, 6, generator=generator, dtype=torch.float64)
    return [(batch[:, :4], batch[:, 4:]) for batch in rows]


def rounded_by_hand(weight, largest):
    """8-bit weights by numpy, with gradients as if they were not rounded."""
    scale = largest.max().item() / 127
    rounded = torch.from_numpy((weight.detach().numpy() / scale).round().clip(-127, 127) * scale)
    return weight + (rounded - weight).detach()


def train_by_hand():
    """One process, plain PyTorch: no module is converted."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    first, last = model[0], model[2]
    largest = {layer: layer.weight.detach().abs().amax().repeat(3) for layer in (first, last)}
    losses = []
    for inputs, targets in make_batches():
        hidden = inputs @ rounded_by_hand(first.weight, largest[first]).T + first.bias
        outputs = hidden.tanh() @ rounded_by_hand(last.weight, largest[last]).T + last.bias
        loss = torch.nn.functional.mse_loss(outputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        for layer, past in largest.items():
            largest[layer] = torch.cat([past[1:], layer.weight.detach().abs().amax().reshape(1)])
    return losses, model.state_dict()


def train(accelerator, model, optimizer, batches):
    rank, world = accelerator.process_index, accelerator.num_processes
    losses = []
    for inputs, targets in batches:
        own = slice(rank, None, world) if accelerator._parts.strategy.sharding.num_shards > 1 else slice(None)
        loss = torch.nn.functional.mse_loss(model(inputs[own]), targets[own])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def make_accelerator(strategy=None):
    from accel_example.int8 import Int8Kwargs

    plugins = {
        "fsdp2": {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
        "tp": {"parallelism_config": ParallelismConfig(tp_size=2)},
    }
    handlers = [Int8Kwargs(history=3)]
    arguments = plugins.get(strategy, {})
    return Accelerator(cpu=True, mixed_precision="example_int8", kwargs_handlers=handlers, **arguments)


def prepared(accelerator):
    model = make_model()
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))


def weights_of(accelerator, model):
    state = accelerator.get_state_dict(model)
    return {name: value for name, value in state.items() if "largest" not in name}


def check_run(accelerator, folder):
    """Train as by hand; then resume in the middle, which gives the same."""
    expected, weights = train_by_hand()
    model, optimizer = prepared(accelerator)
    batches = make_batches()
    losses = train(accelerator, model, optimizer, batches[:3])
    accelerator.save_state(folder / "half")
    losses += train(accelerator, model, optimizer, batches[3:])
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)
    found = weights_of(accelerator, model)
    if accelerator.is_main_process:
        torch.testing.assert_close(found, dict(weights), rtol=1e-10, atol=1e-10)
    assert accelerator.mixed_precision == "example_int8"
    accelerator.free_memory()
    model, optimizer = prepared(accelerator)
    accelerator.load_state(folder / "half")
    assert accelerator._parts.converter.recipe.state_dict() == {"steps": 3}
    torch.testing.assert_close(
        train(accelerator, model, optimizer, batches[3:]), expected[3:], rtol=1e-10, atol=1e-10
    )


def test_one_process_trains_with_a_recipe_as_by_hand_and_resumes(tmp_path):
    with installed(install(tmp_path)):
        check_run(make_accelerator(), tmp_path)


@pytest.mark.parametrize("name", CASES)
@distributed(world_size=2)
def test_several_processes_train_with_a_recipe_as_one_does_and_resume(name, tmp_path):
    case = CASES[name]
    with installed(install(tmp_path / str(dist.get_rank()))):
        accelerator = make_accelerator(case.strategy)
        assert accelerator._parts.strategy.name == case.strategy
        assert (accelerator._parts.strategy.sharding.num_shards > 1) is case.batches_differ
        check_run(accelerator, tmp_path)


def test_a_model_that_is_saved_loads_without_the_recipe(tmp_path):
    with installed(install(tmp_path)):
        accelerator = make_accelerator()
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer, make_batches())
        plain = make_model()
        plain.load_state_dict(weights_of(accelerator, model))
        torch.testing.assert_close(plain[0].weight, model[0].weight)


def test_an_optimizer_that_is_prepared_later_trains_the_converted_model(tmp_path):
    with installed(install(tmp_path)):
        accelerator = make_accelerator()
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
        losses = train(accelerator, model, optimizer, make_batches())
        torch.testing.assert_close(losses, train_by_hand()[0], rtol=1e-10, atol=1e-10)


def test_a_precision_that_nobody_knows_names_the_installed_recipes(tmp_path, monkeypatch):
    with installed(install(tmp_path)):
        with pytest.raises(SettingsError, match=r"'int9'.*or an installed recipe: 'example_int8'"):
            Accelerator(cpu=True, mixed_precision="int9")
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "example_int8")
        assert Accelerator(cpu=True).mixed_precision == "example_int8"


def test_a_recipe_that_loses_parameters_is_refused(monkeypatch):
    def convert(bundle, runtime, mesh):
        bundle.models[0][0].weight = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
        return {}

    spec = RecipeSpec(name="lossy", build=lambda *_: Recipe(name="lossy", convert=convert, precision="no"))
    monkeypatch.setattr(AcceleratorState, "mixed_precision", "lossy")
    registry = tables.Registry(group="-", kind=RecipeSpec, noun="-", built_in={"lossy": spec})
    monkeypatch.setattr("accel_plugins.fp8.recipe.RECIPES", registry)
    model = make_model()
    with pytest.raises(SettingsError, match=r"'lossy' has replaced 1 parameters.*'0.weight'.*not be trained"):
        Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
