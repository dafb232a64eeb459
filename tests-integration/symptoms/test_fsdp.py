"""Symptoms that users of Accelerate have reported of FSDP: the same programs, beside plain PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.accelerator_state import AcceleratorState
from accel_train import Accelerator
from harness import distributed

ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
LAYERS = {"0": "colwise", "2": "rowwise"}


def make_accelerator(version, **plugin):
    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version, **plugin))


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    model.tp_plan = LAYERS
    return model


def loss_of(model, rows=ROWS):
    return model(rows).square().mean()


def rows_of_rank():
    return ROWS.chunk(dist.get_world_size())[dist.get_rank()]


@pytest.mark.parametrize("form", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@distributed(world_size=2)
def test_row_13_the_states_of_adamw_are_bitwise_those_that_were_saved(form, tmp_path):
    def prepare():
        AcceleratorState._reset_state(True)
        accelerator, model = make_accelerator(2, state_dict_type=form), make_model()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    def step():
        accelerator.backward(loss_of(model, rows_of_rank()))
        optimizer.step()
        optimizer.zero_grad()

    def states():
        local = [dict(optimizer.state[parameter]) for parameter in model.parameters()]
        return [
            {key: getattr(value, "_local_tensor", value) for key, value in each.items()} for each in local
        ]

    accelerator, model, optimizer = prepare()
    step()
    step()
    saved = [{key: value.clone() for key, value in each.items()} for each in states()]
    assert {key for each in saved for key in each} == {"step", "exp_avg", "exp_avg_sq"}
    accelerator.save_state(tmp_path / "state")
    for anew in (False, True):
        if anew:
            accelerator, model, optimizer = prepare()
        else:
            step()
        accelerator.load_state(tmp_path / "state")
        for loaded, expected in zip(states(), saved, strict=True):
            assert loaded.keys() == expected.keys()
            for key, value in expected.items():
                assert loaded[key].dtype == value.dtype
                assert torch.equal(loaded[key], value)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "tp"])
@distributed(world_size=2)
def test_row_15_optimizers_with_eager_state_train_as_in_one_process(strategy):
    model, alone = make_model(), make_model()
    optimizer, expected = (torch.optim.Adagrad(each.parameters(), lr=0.1) for each in (model, alone))
    if strategy == "tp":
        accelerator, rows = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2)), ROWS
    else:
        accelerator, rows = make_accelerator(int(strategy[-1])), rows_of_rank()
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        accelerator.backward(loss_of(model, rows))
        optimizer.step()
        optimizer.zero_grad()
        loss_of(alone).backward()
        expected.step()
        expected.zero_grad()
    trained = accelerator._parts.strategy.states.full_state_dict(model)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-6)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("version", [1, 2])
@distributed(world_size=2)
def test_row_20_checkpointed_layers_keep_only_their_inputs(version):
    blocks = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    accelerator = make_accelerator(version, activation_checkpointing=True, **blocks)
    model = accelerator.prepare(nn.Sequential(*[Block() for _ in range(3)]))
    shapes = []

    def pack(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.randn(5, 4, requires_grad=True)).sum()
    assert shapes == [(5, 4)] * 3
    accelerator.backward(loss)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@distributed(world_size=4)
def test_row_21_clipping_covers_parameters_of_several_meshes(norm_type):
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules="3"),
        parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2),
    )

    def make():
        return make_model().append(nn.LayerNorm(2)).append(nn.Linear(2, 2))

    model, alone = make(), make()
    model.tp_plan = LAYERS  # the first layers are on both axes, the last on one, the norm on none
    model = accelerator.prepare(model)
    for each, rows in (
        (model, ROWS),
        (alone, ROWS),
    ):  # the same rows: those of ignored modules are not reduced
        loss_of(each, rows).backward()
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.1, norm_type)
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1, norm_type)
    torch.testing.assert_close(norm, expected)
    for parameter, plain in zip(model.parameters(), alone.parameters(), strict=True):
        gradient = parameter.grad
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(full, plain.grad)
