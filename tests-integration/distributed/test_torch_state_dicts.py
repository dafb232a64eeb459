"""Full states of models and optimizers equal those of `torch.distributed.checkpoint.state_dict`."""

from __future__ import annotations

import warnings
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from accel_plugins import Bundle, build_precision, ddp
from accel_plugins.fsdp import fsdp1, fsdp2
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism import tensor
from accel_plugins.parallelism.config import ParallelismConfig
from accel_plugins.sharding.state import state_by_name
from accel_state.partial_state import PartialState
from harness import distributed


class Model(nn.Module):
    tp_plan: ClassVar = {"inner.0": "colwise_rep", "inner.2": "colwise_rep"}

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.register_buffer("factor", torch.tensor([2.0]))

    def forward(self, inputs):
        return self.inner(inputs) * self.factor


def fsdp_plugin(version):
    blocks = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}
    return {
        FullyShardedDataParallelPlugin: FullyShardedDataParallelPlugin(fsdp_version=version, **blocks),
    }


STRATEGIES = {
    "ddp": (ddp.DdpStrategy, dict),
    "fsdp1": (fsdp1.Fsdp1Strategy, partial(fsdp_plugin, 1)),
    "fsdp2": (fsdp2.Fsdp2Strategy, partial(fsdp_plugin, 2)),
    "tp": (tensor.TensorParallelStrategy, lambda: {ParallelismConfig: ParallelismConfig(tp_size=2)}),
}


@pytest.mark.parametrize("name", STRATEGIES)
@distributed(world_size=2)
def test_full_states_are_those_of_torch(name):
    build, make_handlers = STRATEGIES[name]
    runtime = PartialState(cpu=True).runtime
    strategy = build(None, runtime, build_precision("no", runtime.device), make_handlers())
    # 1. Train two steps, so that the optimizer has moments; each group has options of its own.
    torch.manual_seed(3)
    model = Model()
    groups = [{"params": model.inner[0].parameters()}, {"params": model.inner[2].parameters(), "lr": 0.2}]
    bundle = Bundle(models=[model], optimizers=[torch.optim.AdamW(groups, lr=0.1, weight_decay=0.01)])
    with warnings.catch_warnings():
        # FSDP1 and torch's functions are deprecated in parts, and tensor-parallel layers return views.
        warnings.simplefilter("ignore")
        strategy.check(bundle)
        bundle = strategy.wrap(bundle)
        model, optimizer = bundle.models[0], bundle.optimizers[0]
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(strategy.sharding.shard_index))
        for _ in range(2):
            strategy.backward(model(inputs).square().mean(), accumulation=1, sync=True)
            strategy.step(optimizer)
            optimizer.zero_grad()
        # 2. Read both states twice, since torch's may change the optimizer.
        # Of FSDP1 on CPUs, torch 2.15 offloads all tensors of a parameter's state to the same memory.
        options = StateDictOptions(full_state_dict=True, cpu_offload=name != "fsdp1")
        weights = strategy.states.full_state_dict(model)
        states = strategy.states.full_optimizer_state(optimizer, [model])
        expected_weights = get_model_state_dict(model, options=options)
        expected_states = get_optimizer_state_dict(model, optimizer, options=options)
    # 3. Torch's are complete on rank 0 alone.
    if not runtime.topology.is_main:
        return
    assert [*weights] == [*expected_weights] == [*Model().state_dict()]
    for key, value in expected_weights.items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=0)
    names = [["inner.0.weight", "inner.0.bias"], ["inner.2.weight", "inner.2.bias"]]
    named = state_by_name(states, names)
    assert named["state"].keys() == expected_states["state"].keys()
    for key, values in expected_states["state"].items():
        assert named["state"][key].keys() == values.keys() == {"step", "exp_avg", "exp_avg_sq"}
        torch.testing.assert_close(named["state"][key], dict(values), rtol=0, atol=0)
    assert named["param_groups"] == expected_states["param_groups"]
