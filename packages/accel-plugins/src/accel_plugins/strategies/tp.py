"""Tensor parallelism alone: every rank computes a part of each layer, all with the same batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_plugins.parallelism.axes import axes_of
from accel_plugins.parallelism.tensor import TensorParallel
from accel_plugins.sharding.states import ShardedPersister
from accel_plugins.strategies.fsdp2 import FEATURES
from accel_plugins.strategies.sharded_step import ShardedStepper
from accel_plugins.strategies.sharded_wrap import ShardedWrapper
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
    """Make the strategy of a run whose layers are divided.

    Args:
        settings: Nothing in them concerns this strategy that the plugins do not say.
        runtime: Device and topology.
        precision: Scales losses and steps optimizers.
        handlers: A `ParallelismConfig` or `TorchTensorParallelPlugin` says among how many ranks.

    Raises:
        SettingsError: The sizes do not fit the number of processes, or layers are not to be divided.
    """
    del settings
    axes = axes_of(runtime, handlers, sharded=False)
    if axes.tensor is None:
        raise SettingsError(
            "strategy='tp' was selected, and layers are to be divided among 1 process: pass "
            "ParallelismConfig(tp_size=…) with more."
        )
    stage = TensorParallel(mesh=axes.tensor)
    return Strategy(
        name="tp",
        wrapper=ShardedWrapper(
            runtime=runtime, shard=stage, validate=stage.validate, parameters_on=runtime.device
        ),
        stepper=ShardedStepper(precision=precision, name="tp"),
        persister=ShardedPersister(is_main=runtime.topology.is_main, device=runtime.device),
        sharding=axes.sharding,
        features=FEATURES,
        mesh=axes.mesh,
    )
