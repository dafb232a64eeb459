"""Build the FP8 recipe of a run: choose torchao or TransformerEngine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel_plugins.fp8 import ao, te
from accel_plugins.fp8.recipe import (
    FP8_HANDLERS,
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    Recipe,
    TERecipeKwargs,
)
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_plugins.strategy import Strategy
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.libraries import Fp8Device, choose_backend
from accel_state.logging import get_logger
from accel_state.settings.model import Settings

logger = get_logger(__name__)

HANDLERS: Mapping[type, str] = {AORecipeKwargs: "AO", TERecipeKwargs: "TE", MSAMPRecipeKwargs: "MSAMP"}
"""The backend of each type of handler."""


def build(settings: Settings, strategy: Strategy) -> Recipe:
    """Build the recipe; a handler's backend takes precedence over `fp8.backend` of the settings."""
    runtime, handlers = strategy.runtime, strategy.handlers
    # 1. Choose the library.
    requested = [handlers[kind] for kind in FP8_HANDLERS if kind in handlers]
    if len(requested) > 1:
        names = " and ".join(type(recipe).__name__ for recipe in requested)
        raise SettingsError(
            f"kwargs_handlers contains {names}, each of which selects a recipe. Pass only one."
        )
    handler: Any = requested[0] if requested else None
    if requested and isinstance(requested[0], FP8RecipeKwargs):
        named = requested[0].backend
    else:
        named = HANDLERS.get(type(handler)) or (settings.fp8 and settings.fp8.backend)
    device = Fp8Device(type=runtime.device.type)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(runtime.device)
        device = Fp8Device(type="cuda", capability=capability, is_rocm=torch.version.hip is not None)
    emulate = isinstance(handler, AORecipeKwargs) and handler.emulate
    backend = choose_backend(named, device, emulate=emulate)
    if named is None:
        logger.warning_once(
            "mixed_precision='fp8' uses %s. Set fp8_backend or pass a kwargs handler to choose another "
            "library.",
            backend.title,
        )
    # 2. Build its recipe.
    config: ParallelismConfig | None = handlers.get(ParallelismConfig)
    is_tensor_parallel = config is not None and config.tp_enabled
    if backend.name == "AO":
        fsdp = handlers.get(FullyShardedDataParallelPlugin)
        is_sharded = config is not None and config.dp_shard_enabled if fsdp is None else fsdp.version == 2
        return ao.build(
            handler or AORecipeKwargs(),
            runtime,
            sharded=is_sharded,
            keeps_types=strategy.keeps_weight_types and not is_tensor_parallel,
        )
    handler = handler or TERecipeKwargs()
    if config is not None and config.pp_enabled and handler.recipe == "delayed":
        raise UnsupportedError(
            f"TERecipeKwargs(recipe='delayed') with ParallelismConfig(pp_size={config.pp_size}): it reduces "
            "maxima over all ranks, and stages would wait for one another. Use recipe='current'."
        )
    if config is not None and is_tensor_parallel:
        raise UnsupportedError(
            f"TERecipeKwargs with ParallelismConfig(tp_size={config.tp_size}): layers of TransformerEngine "
            "are not sharded. Use torchao (AORecipeKwargs())."
        )
    return te.build(handler)
