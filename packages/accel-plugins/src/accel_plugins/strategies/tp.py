"""Tensor parallelism alone: every layer is sharded across ranks, and all ranks get the same batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_plugins.dcp.full_state import ShardsPersister
from accel_plugins.dcp.tensors import TensorShards
from accel_plugins.parallelism.axes import axes_of
from accel_plugins.parallelism.tensor import TensorParallel
from accel_plugins.strategies.sharded_step import sharded_stepper
from accel_plugins.strategies.sharded_wrap import SHARDED_FEATURES, ShardedWrapper
from accel_plugins.strategy import Strategy
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_plugins.roles import PrecisionPolicy
    from accel_state.runtime import Runtime
    from accel_state.settings.model import Settings


def build(
    settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
) -> Strategy:
    """Make the strategy of a tensor-parallel run."""
    del settings
    axes = axes_of(runtime, handlers, sharded=False)
    if axes.tensor is None:
        raise SettingsError(
            "strategy='tp' was selected, and the tensor-parallel size is 1: pass "
            "ParallelismConfig(tp_size=…) with 2 or more."
        )
    stage = TensorParallel(mesh=axes.tensor)
    return Strategy(
        name="tp",
        wrapper=ShardedWrapper(
            runtime=runtime, shard=stage, validate=stage.validate, parameters_on=runtime.device
        ),
        stepper=sharded_stepper(precision, "tp"),
        persister=ShardsPersister(shards=TensorShards(), device=runtime.device),
        sharding=axes.sharding,
        features=SHARDED_FEATURES,
        mesh=axes.mesh,
    )
