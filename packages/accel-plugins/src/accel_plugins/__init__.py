"""Strategies, precision policies, and what configures them. Names are imported when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_plugins.bundle import Bundle as Bundle
    from accel_plugins.kwargs.accumulation import GradientAccumulationPlugin as GradientAccumulationPlugin
    from accel_plugins.kwargs.amp import AutocastKwargs as AutocastKwargs
    from accel_plugins.kwargs.amp import GradScalerKwargs as GradScalerKwargs
    from accel_plugins.kwargs.base import KwargsHandler as KwargsHandler
    from accel_plugins.kwargs.dataloader import DataLoaderConfiguration as DataLoaderConfiguration
    from accel_plugins.kwargs.ddp import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from accel_plugins.kwargs.dynamo import TorchDynamoPlugin as TorchDynamoPlugin
    from accel_plugins.kwargs.process_group import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accel_plugins.kwargs.profile import ProfileKwargs as ProfileKwargs
    from accel_plugins.kwargs.project import ProjectConfiguration as ProjectConfiguration
    from accel_plugins.precision.build import build_precision as build_precision
    from accel_plugins.roles import ModelWrapper as ModelWrapper
    from accel_plugins.roles import Persister as Persister
    from accel_plugins.roles import PrecisionPolicy as PrecisionPolicy
    from accel_plugins.roles import Stepper as Stepper
    from accel_plugins.strategy import BatchSharding as BatchSharding
    from accel_plugins.strategy import Feature as Feature
    from accel_plugins.strategy import Strategy as Strategy
    from accel_plugins.strategy import StrategyFactory as StrategyFactory
    from accel_plugins.strategy import StrategySpec as StrategySpec

__all__ = [
    "AutocastKwargs",
    "BatchSharding",
    "Bundle",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "Feature",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "ModelWrapper",
    "Persister",
    "PrecisionPolicy",
    "ProfileKwargs",
    "ProjectConfiguration",
    "Stepper",
    "Strategy",
    "StrategyFactory",
    "StrategySpec",
    "TorchDynamoPlugin",
    "build_precision",
]

_MODULES = {
    "bundle": ("Bundle",),
    "kwargs.accumulation": ("GradientAccumulationPlugin",),
    "kwargs.amp": ("AutocastKwargs", "GradScalerKwargs"),
    "kwargs.base": ("KwargsHandler",),
    "kwargs.dataloader": ("DataLoaderConfiguration",),
    "kwargs.ddp": ("DistributedDataParallelKwargs",),
    "kwargs.dynamo": ("TorchDynamoPlugin",),
    "kwargs.process_group": ("InitProcessGroupKwargs",),
    "kwargs.profile": ("ProfileKwargs",),
    "kwargs.project": ("ProjectConfiguration",),
    "precision.build": ("build_precision",),
    "roles": ("ModelWrapper", "Persister", "PrecisionPolicy", "Stepper"),
    "strategy": ("BatchSharding", "Feature", "Strategy", "StrategyFactory", "StrategySpec"),
}

__getattr__, __dir__ = attach(
    __name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
)
