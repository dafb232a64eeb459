"""The strategies `fsdp2` and `tp` on several ranks: the public suite along one axis and along several."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import pytest
from torch import nn

from accel_plugins.fsdp import fsdp2
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism import tensor
from accel_plugins.parallelism.config import ParallelismConfig
from accel_plugins.precision import build_precision
from accel_plugins.testing import StrategySubject, check_strategy
from accel_state.environ import patch_environment
from accel_state.partial_state import PartialState
from harness import distributed

PLAN = {"0": "colwise_rep", "2": "colwise_rep"}


@contextmanager
def planned():
    """Models of the suite have a plan."""
    nn.Sequential.tp_plan = PLAN
    try:
        with warnings.catch_warnings():
            # Tensor-parallel layers return views; nothing changes them in place here.
            warnings.filterwarnings("ignore", message=".*returned a view tensor")
            yield
    finally:
        del nn.Sequential.tp_plan


def subject(directory, build, *, sizes=None, plugin=None):
    runtime = PartialState(cpu=True).runtime

    def make():
        handlers = {}
        if plugin is not None:
            handlers[FullyShardedDataParallelPlugin] = FullyShardedDataParallelPlugin(
                fsdp_version=2, **plugin
            )
        if sizes is not None:
            handlers[ParallelismConfig] = ParallelismConfig(**sizes)
        return build(None, runtime, build_precision("no", runtime.device), handlers)

    return StrategySubject(make=make, runtime=runtime, directory=directory)


@distributed(world_size=2)
def test_two_ranks_of_fsdp2_conform(tmp_path):
    check_strategy(subject(tmp_path, fsdp2.Fsdp2Strategy, plugin={}))


@pytest.mark.parametrize(
    "plugin",
    [
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 1},
        {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]},
        {"reshard_after_forward": False},
        {"cpu_offload": True},
        {"activation_checkpointing": True, "auto_wrap_policy": "size_based_wrap", "min_num_params": 1},
        {"forward_prefetch": True, "auto_wrap_policy": "size_based_wrap", "min_num_params": 1},
        {"cpu_ram_efficient_loading": True},
    ],
    ids=lambda plugin: next(iter(plugin)) + "-" + str(next(iter(plugin.values()))),
)
@distributed(world_size=2)
def test_options_of_fsdp2_conform(plugin, tmp_path):
    with patch_environment(ACCELERATE_USE_FSDP="false", FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
        check_strategy(subject(tmp_path, fsdp2.Fsdp2Strategy, plugin=plugin))


@distributed(world_size=4)
def test_copies_of_shards_conform(tmp_path):
    one = subject(
        tmp_path, fsdp2.Fsdp2Strategy, sizes={"dp_replicate_size": 2, "dp_shard_size": 2}, plugin={}
    )
    check_strategy(one)


@pytest.mark.parametrize("axis", ["cp_size", "sp_size"])
@distributed(world_size=2)
def test_shards_of_sequences_conform(axis, tmp_path):
    """Ranks of a sequence have the same batch here, whose gradients are those of one process."""
    check_strategy(subject(tmp_path, fsdp2.Fsdp2Strategy, sizes={axis: 2}, plugin={}))


@distributed(world_size=2)
def test_tensor_parallel_layers_conform(tmp_path):
    with planned():
        check_strategy(subject(tmp_path, tensor.TensorParallelStrategy, sizes={"tp_size": 2}))


@distributed(world_size=2)
def test_tensor_parallel_layers_of_one_shard_conform(tmp_path):
    with planned():
        check_strategy(subject(tmp_path, fsdp2.Fsdp2Strategy, sizes={"tp_size": 2}, plugin={}))


@pytest.mark.parametrize(
    "data", ["dp_shard_size", pytest.param("dp_replicate_size", marks=pytest.mark.thorough)]
)
@distributed(world_size=4)
def test_tensor_parallel_layers_of_shards_and_of_copies_conform(data, tmp_path):
    with planned():
        check_strategy(subject(tmp_path, fsdp2.Fsdp2Strategy, sizes={data: 2, "tp_size": 2}, plugin={}))
