"""Sharded by the compiler (SPMD) over four devices in one process: equal to one device."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
import torch_xla
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.spmd as spmd
from safetensors.torch import load_file

from accel import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accel.errors import UnsupportedError
from accel.state import AcceleratorState
from accel.utils import load_fsdp_model
from accel_plugins.xla import SpmdStrategy
from accel_state import xla_devices
from accel_state.errors import SettingsError
from nightly.xla.problems import (
    CHECKS,
    Problem,
    assert_as_plain,
    check_conformance,
    counted,
    plain_losses,
    run_guide,
    train,
)

NEAR = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(autouse=True, scope="module")
def sharding_compiler():
    """Begin with SPMD: for good, and with a variable that torch_xla sets."""
    xla_devices.start(spmd=True)
    yield
    os.environ.pop("XLA_USE_SPMD")


def sharding_of(tensor: torch.Tensor) -> str:
    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


def sharded(**fields) -> Accelerator:
    fields = {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Block"],
        **fields,
    }
    return Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(xla=True, xla_fsdp_v2=True, **fields))


def prepared(accelerator: Accelerator, **options):
    problem = Problem(**options)
    return accelerator.prepare(problem.model, problem.optimizer, problem.loader)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"xla_fsdp_grad_ckpt": True},
        {"auto_wrap_policy": "no_wrap"},
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 500},
    ],
    ids=str,
)
def test_losses_and_weights_are_those_of_one_device(fields):
    if "auto_wrap_policy" in fields:
        fields = {**fields, "transformer_cls_names_to_wrap": None}
    accelerator = sharded(**fields)
    assert accelerator.distributed_type == DistributedType.XLA
    model, optimizer, loader = prepared(accelerator)
    losses = train(accelerator, model, optimizer, loader, max_norm=0.5)
    assert_as_plain(accelerator, model, losses, max_norm=0.5)


def test_blocks_are_selected_by_size_and_recompute_their_activations():
    """A block has 1,072 parameters, its layers 544 and 528, the tied embedding 384."""
    accelerator = sharded(
        auto_wrap_policy="size_based_wrap",
        transformer_cls_names_to_wrap=None,
        min_num_params=1000,
        xla_fsdp_grad_ckpt=True,
    )
    model, optimizer, loader = prepared(accelerator)
    calls = Counter()
    for name in ("embed", "blocks.0.up", "blocks.1.down"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.update([name]))
    losses = train(accelerator, model, optimizer, loader, max_norm=0.5)
    assert_as_plain(accelerator, model, losses, max_norm=0.5)
    assert calls == {"embed": 8, "blocks.0.up": 16, "blocks.1.down": 16}


@pytest.mark.parametrize("name", CHECKS)
def test_the_strategy_conforms(name, tmp_path):
    plugin = FullyShardedDataParallelPlugin(xla=True, xla_fsdp_v2=True)
    check_conformance(name, SpmdStrategy, {FullyShardedDataParallelPlugin: plugin}, tmp_path)


def test_parameters_states_and_batches_are_sharded_over_all_devices():
    accelerator = sharded()
    model, optimizer, loader = prepared(accelerator)
    (tokens,) = next(iter(loader))
    assert sharding_of(tokens) == "{devices=[4,1]0,1,2,3}"
    train(accelerator, model, optimizer, loader, epochs=1)
    for name, parameter in model.named_parameters():
        largest = parameter.shape.index(max(parameter.shape))
        parts = ",".join("4" if dim == largest else "1" for dim in range(parameter.dim()))
        assert sharding_of(parameter) == f"{{devices=[{parts}]0,1,2,3}}", name
        assert sharding_of(optimizer.state[parameter]["exp_avg"]) == sharding_of(parameter), name
    assert model.head.weight is model.embed.weight


def test_nothing_is_compiled_after_the_second_step_and_a_step_is_one_execution():
    accelerator = sharded()
    model, optimizer, loader = prepared(accelerator, rows=62)  # the last batch is completed
    seen = []
    names = ("CompileTime", "ExecuteReplicatedTime")
    metrics.clear_all()
    train(accelerator, model, optimizer, loader, epochs=1, each=lambda: seen.append(counted(*names)))
    assert len(seen) == 8
    assert {compiled for compiled, _ in seen[1:]} == {seen[1][0]}, seen
    assert {after[1] - before[1] for before, after in pairwise(seen[1:])} == {1}, seen


def test_the_example_of_the_guide_is_sharded():
    (names,) = run_guide(sharded=True)
    assert "devices=[4,1]" in sharding_of(names["model"].layers[0].linear1.weight)


def test_batches_need_not_divide_by_the_devices():
    accelerator = sharded()
    losses = train(accelerator, *prepared(accelerator, rows=30, batch_size=6))
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(plain_losses(rows=30, batch_size=6)), **NEAR
    )


def test_a_checkpoint_of_one_device_is_resumed_sharded_and_the_reverse(tmp_path):
    expected = torch.tensor(plain_losses())
    for number, on_cpu_first in enumerate([True, False]):
        folder = str(tmp_path / str(number))
        first = Accelerator(cpu=True) if on_cpu_first else sharded()
        losses = train(first, *prepared(first), epochs=1)
        first.save_state(folder)
        AcceleratorState._reset_state(reset_partial_state=True)
        second = sharded() if on_cpu_first else Accelerator(cpu=True)
        objects = prepared(second)
        second.load_state(folder)
        if on_cpu_first:
            model, optimizer, _ = objects
            weight = model.blocks[0].up.weight
            assert sharding_of(weight) == "{devices=[4,1]0,1,2,3}"
            assert sharding_of(optimizer.state[weight]["exp_avg"]) == "{devices=[4,1]0,1,2,3}"
        losses += train(second, *objects, epochs=1)
        torch.testing.assert_close(torch.tensor(losses), expected, **NEAR)
        AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def global_mesh(shape: tuple[int, int]):
    """Within it, models are sharded over a mesh of this shape, along its first axis."""
    before = spmd.get_global_mesh()
    spmd.set_global_mesh(spmd.Mesh(np.arange(4), shape, ("fsdp", "model")))
    try:
        yield
    finally:
        spmd.set_global_mesh(before)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")
def test_shards_of_pytorch_are_read(tmp_path):
    accelerator = sharded()
    model = accelerator.prepare(Problem().model)
    doubled = {name: tensor * 2 for name, tensor in accelerator.get_state_dict(model).items()}
    torch_dcp.save({"model": doubled}, checkpoint_id=tmp_path / "plain", no_dist=True)
    shards = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    load_fsdp_model(shards, accelerator, model, str(tmp_path / "plain"))
    torch.testing.assert_close(accelerator.get_state_dict(model), doubled, rtol=0, atol=0)
    assert sharding_of(model.embed.weight) == "{devices=[4,1]0,1,2,3}"


def test_saved_weights_are_whole_and_under_the_names_of_the_model(tmp_path):
    accelerator = sharded()
    problem = Problem()
    expected = {name: tensor.clone() for name, tensor in problem.model.state_dict().items()}
    model, *_ = accelerator.prepare(problem.model, problem.optimizer, problem.loader)
    accelerator.save_model(model, str(tmp_path))
    state = accelerator.get_state_dict(model)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert {tensor.device.type for tensor in state.values()} == {"cpu"}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


def test_a_mesh_of_the_caller_is_used():
    with global_mesh((2, 2)):
        accelerator = sharded()
        model, optimizer, loader = prepared(accelerator)
        assert "devices=[2,1,2]" in sharding_of(model.embed.weight)
        losses = train(accelerator, model, optimizer, loader, epochs=1)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain_losses(epochs=1)), **NEAR)


def test_the_documented_variables_choose_it(monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "FSDP_XLA", "FSDP_XLA_V2"):
        monkeypatch.setenv(name, "true")
    assert "xla_fsdp" in repr(Accelerator()._parts.strategy.name)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"xla_fsdp_v2": False}, "xla_fsdp_v2=False"),
        ({"xla": False}, "xla=False"),
        ({"cpu_offload": True}, "cpu_offload"),
        ({"ignored_modules": "blocks"}, "ignored_modules"),
        ({"state_dict_type": "SHARDED_STATE_DICT"}, "SHARDED_STATE_DICT"),
    ],
)
def test_what_the_compiler_does_not_do_is_refused_at_construction(fields, named):
    plugin = FullyShardedDataParallelPlugin(**{"xla": True, "xla_fsdp_v2": True, **fields})
    with pytest.raises(UnsupportedError, match=named):
        Accelerator(fsdp_plugin=plugin)


def test_other_devices_are_refused():
    plugin = FullyShardedDataParallelPlugin(xla=True, xla_fsdp_v2=True)
    with pytest.raises(UnsupportedError, match="computes on 'cpu'"):
        Accelerator(cpu=True, fsdp_plugin=plugin)


def test_blocks_to_recompute_must_be_selected():
    accelerator = sharded(
        auto_wrap_policy="no_wrap", transformer_cls_names_to_wrap=None, xla_fsdp_grad_ckpt=True
    )
    with pytest.raises(SettingsError, match="selects none of Tied"):
        prepared(accelerator)
