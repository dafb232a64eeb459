"""An exponential moving average of weights, by torch's function, is sharded, saved and loaded as a model."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import get_ema_multi_avg_fn

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.accelerator_state import AcceleratorState, GradientState
from accel_state.errors import CheckpointWriteError
from accel_train import Accelerator
from harness import distributed

ROWS = 12
average = get_ema_multi_avg_fn(0.9)


def make_model():
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
    return torch.nn.Sequential(*layers).double()


def make_data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 8, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (ROWS,), generator=generator)


def train(models, optimizer, steps, backward, rows=slice(None)):
    model, averaged = models
    inputs, labels = make_data()
    for _ in range(steps):
        backward(cross_entropy(model(inputs[rows]), labels[rows]))
        optimizer.step()
        optimizer.zero_grad()
        average([*averaged.parameters()], [weight.detach() for weight in model.parameters()], None)


def train_alone(steps):
    model, averaged = make_model(), make_model().requires_grad_(False)
    train((model, averaged), torch.optim.AdamW(model.parameters(), lr=0.1), steps, torch.Tensor.backward)
    return averaged


def prepared(version, **options):
    model, averaged = make_model(), make_model().requires_grad_(False)
    if version == "tp":
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
        model.tp_plan = averaged.tp_plan = {"0": "colwise", "2": "rowwise"}
    else:
        plugin = None if version is None else FullyShardedDataParallelPlugin(fsdp_version=version, **options)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, averaged, optimizer)


def train_prepared(accelerator, model, averaged, optimizer, steps):
    share = ROWS // accelerator.num_processes
    first = accelerator.process_index * share
    if accelerator.parallelism_config is not None and accelerator.parallelism_config.tp_enabled:
        share, first = ROWS, 0
    train((model, averaged), optimizer, steps, accelerator.backward, slice(first, first + share))


def check_equals_alone(accelerator, averaged, steps):
    expected = train_alone(steps)
    inputs, _ = make_data()
    torch.testing.assert_close(averaged(inputs), expected(inputs))
    found = accelerator.get_state_dict(averaged)
    if accelerator.is_main_process:
        torch.testing.assert_close(dict(found), expected.state_dict())


@pytest.mark.parametrize("version", [None, 1, 2, "tp"])
@distributed(world_size=2)
def test_it_is_that_of_one_process_also_after_loading(version, tmp_path):
    accelerator, *parts = prepared(version)
    train_prepared(accelerator, *parts, 3)
    accelerator.save_state(tmp_path / "checkpoint")
    train_prepared(accelerator, *parts, 2)
    accelerator.load_state(tmp_path / "checkpoint")
    train_prepared(accelerator, *parts, 1)
    check_equals_alone(accelerator, parts[1], 4)
    sizes = [sum(getattr(w, "_local_tensor", w).numel() for w in model.parameters()) for model in parts[:2]]
    assert sizes[0] == sizes[1]  # each rank has as much of the average as of the model


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, None)])
@distributed(world_size=2)
def test_it_goes_on_under_another_strategy(before, after, tmp_path):
    accelerator, *parts = prepared(before)
    train_prepared(accelerator, *parts, 3)
    accelerator.save_state(tmp_path / "checkpoint")
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator, *parts = prepared(after)
    accelerator.load_state(tmp_path / "checkpoint")
    train_prepared(accelerator, *parts, 1)
    check_equals_alone(accelerator, parts[1], 4)


@distributed(world_size=2)
def save_on_two(folder):
    accelerator, *parts = prepared(2)
    train_prepared(accelerator, *parts, 3)
    accelerator.save_state(folder)


@distributed(world_size=3)
def go_on_on_three(folder):
    accelerator, *parts = prepared(2)
    accelerator.load_state(folder)
    train_prepared(accelerator, *parts, 1)
    check_equals_alone(accelerator, parts[1], 4)


def test_it_goes_on_on_another_number_of_ranks(tmp_path):
    save_on_two(folder=tmp_path / "checkpoint")
    go_on_on_three(folder=tmp_path / "checkpoint")


class Shadows:
    """An average that keeps its own tensors, as libraries for it do."""

    def __init__(self, model):
        self.tensors = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        self.tensors = state


@pytest.mark.parametrize("version", [None, 2, "tp"])
@distributed(world_size=2)
def test_shards_of_a_registered_object_are_refused_as_rank_0_alone_would_save_its_own(version, tmp_path):
    accelerator, model, *_ = prepared(version)
    shadows = Shadows(model)
    accelerator.register_for_checkpointing(shadows)
    if version is not None:
        with pytest.raises(CheckpointWriteError, match=r"object 0, of type Shadows, has sharded tensors"):
            accelerator.save_state(tmp_path / "checkpoint")
        return
    expected = {name: tensor.clone() for name, tensor in shadows.tensors.items()}
    accelerator.save_state(tmp_path / "checkpoint")
    shadows.tensors = {}
    accelerator.load_state(tmp_path / "checkpoint")
    assert shadows.tensors.keys() == expected.keys()
    assert all(torch.equal(shadows.tensors[name], tensor) for name, tensor in expected.items())


def swap(weights, others):
    with torch.no_grad():
        for weight, other in zip(weights, others, strict=True):
            kept = weight.clone()
            weight.copy_(other)
            other.copy_(kept)


IN_BLOCKS = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 40}


@pytest.mark.parametrize(
    ("version", "options"),
    [
        (None, {}),
        (1, {}),
        (1, {"sharding_strategy": "SHARD_GRAD_OP", **IN_BLOCKS}),
        (2, {}),
        (2, IN_BLOCKS),
    ],
)
@distributed(world_size=2)
def test_it_swaps_places_with_the_model_for_an_evaluation(version, options):
    accelerator, model, averaged, optimizer = prepared(version, **options)
    train_prepared(accelerator, model, averaged, optimizer, 3)
    inputs, _ = make_data()
    swap(model.parameters(), averaged.parameters())
    with torch.no_grad():
        outputs = model(inputs)
    torch.testing.assert_close(outputs, train_alone(3)(inputs))
    swap(model.parameters(), averaged.parameters())
    train_prepared(accelerator, model, averaged, optimizer, 1)
    check_equals_alone(accelerator, averaged, 4)
