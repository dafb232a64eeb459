"""FSDP2: parameters, gradients and optimizer states sharded across ranks, also with other mesh axes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel_plugins.dcp.full_state import ShardsPersister
from accel_plugins.dcp.local import LocalFiles
from accel_plugins.dcp.tensors import TensorShards
from accel_plugins.fsdp.apply import FullSharding
from accel_plugins.fsdp.fields import form_of
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.axes import Axes, axes_of
from accel_plugins.parallelism.context import ContextParallel
from accel_plugins.parallelism.tensor import TensorParallel
from accel_plugins.strategies.sharded_step import sharded_stepper
from accel_plugins.strategies.sharded_wrap import SHARDED_FEATURES, ShardedWrapper, compose
from accel_plugins.strategy import Strategy
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.versions import is_torch_version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from accel_plugins.roles import PrecisionPolicy
    from accel_state.runtime import Runtime
    from accel_state.settings.model import Settings


def build(
    settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
) -> Strategy:
    """Make the strategy of a run whose models are sharded."""
    del settings
    plugin = handlers.get(FullyShardedDataParallelPlugin) or FullyShardedDataParallelPlugin(fsdp_version=2)
    if plugin.version != 2:
        raise SettingsError(
            f"FullyShardedDataParallelPlugin(fsdp_version={plugin.version}) with a ParallelismConfig: "
            "its axes go with fsdp_version=2 only."
        )
    plugin.set_mixed_precision(precision.name)
    axes = axes_of(runtime, handlers, sharded=FullyShardedDataParallelPlugin in handlers)
    full = FullSharding(
        plugin=plugin, mesh=axes.fully_sharded(runtime), master_weights=precision.name != "no"
    )
    tensor = None if axes.tensor is None else TensorParallel(mesh=axes.tensor)
    context = _context(axes)
    stages = [*(() if tensor is None else (tensor,)), full]
    shard: list[Callable[[nn.Module], None]] = [*stages]
    validate = [stage.validate for stage in stages]
    if context is not None:
        shard.append(context.prepare)
        validate.append(context.validate)
    shards = TensorShards(form_now=partial(form_of, plugin))
    return Strategy(
        name="fsdp2",
        fsdp_version=2,
        wrapper=ShardedWrapper(
            runtime=runtime,
            shard=compose(shard),
            validate=compose(validate),
            parameters_on=full.parameters_on(runtime.device),
            master_weights=None if precision.name == "no" else precision.name,
            only_main_has_values=bool(plugin.cpu_ram_efficient_loading),
        ),
        stepper=sharded_stepper(precision, "fsdp2"),
        persister=ShardsPersister(shards=shards, device=runtime.device),
        sharding=axes.sharding,
        features=SHARDED_FEATURES,
        mesh=axes.mesh,
        split_sequences=context,
        shards=shards,
        native=LocalFiles(shards=shards, topology=runtime.topology),
    )


def _context(axes: Axes) -> ContextParallel | None:
    handler = axes.config.cp_handler
    if axes.context is None or handler is None:
        return None
    _need_torch("2.10", "ParallelismConfig(cp_size>1)")
    return ContextParallel(mesh=axes.context, rotation=handler.cp_comm_strategy or "allgather")


def _need_torch(version: str, what: str) -> None:
    if is_torch_version("<", version):
        raise UnsupportedError(
            f"{what}: it needs torch {version} or newer, and {torch.__version__} is installed."
        )
