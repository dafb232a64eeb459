"""The strategy `pipeline` on several ranks: the public suite, alone and beside other axes."""

from __future__ import annotations

import pytest

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig, TorchPipelineParallelConfig
from accel_plugins.pipeline import strategy
from accel_plugins.precision import build_precision
from accel_plugins.testing import StrategySubject, check_strategy
from accel_state.partial_state import PartialState
from harness import distributed


def subject(directory, sizes, *, schedule="1F1B", plugin=None):
    runtime = PartialState(cpu=True).runtime

    def make():
        handler = TorchPipelineParallelConfig(pp_schedule=schedule)
        handlers = {ParallelismConfig: ParallelismConfig(**sizes, pp_handler=handler)}
        if plugin is not None:
            handlers[FullyShardedDataParallelPlugin] = FullyShardedDataParallelPlugin(
                fsdp_version=2, **plugin
            )
        return strategy.PipelineStrategy(None, runtime, build_precision("no", runtime.device), handlers)

    return StrategySubject(make=make, runtime=runtime, directory=directory)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@distributed(world_size=2)
def test_two_stages_conform(schedule, tmp_path):
    check_strategy(subject(tmp_path, {"pp_size": 2}, schedule=schedule))


@pytest.mark.parametrize(
    ("data", "plugin"),
    [
        pytest.param("dp_shard_size", None, marks=pytest.mark.thorough),
        ("dp_replicate_size", None),
        pytest.param("dp_shard_size", {"reshard_after_forward": True}, marks=pytest.mark.thorough),
        pytest.param(
            "dp_shard_size",
            {"auto_wrap_policy": "size_based_wrap", "min_num_params": 1},
            marks=pytest.mark.thorough,
        ),
        ("dp_shard_size", {"cpu_offload": True}),
    ],
)
@distributed(world_size=4)
def test_stages_of_shards_and_of_replicas_conform(data, plugin, tmp_path):
    check_strategy(subject(tmp_path, {"pp_size": 2, data: 2}, plugin=plugin))
