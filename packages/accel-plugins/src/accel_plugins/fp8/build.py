"""Build the FP8 recipe of a run: choose torchao, TransformerEngine or MS-AMP, and build MS-AMP's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
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
from accel_plugins.strategy import Bundle
from accel_state.errors import MissingDependencyError, SettingsError, UnsupportedError
from accel_state.libraries import BY_NAME, Fp8Device, choose_backend
from accel_state.logging import get_logger
from accel_state.runtime import Runtime
from accel_state.settings.model import Settings

logger = get_logger(__name__)

HANDLERS: Mapping[type, str] = {AORecipeKwargs: "AO", TERecipeKwargs: "TE", MSAMPRecipeKwargs: "MSAMP"}
"""The backend of each type of handler."""

_SHARDING = (FullyShardedDataParallelPlugin, ParallelismConfig, DeepSpeedPlugin)


def build(settings: Settings, runtime: Runtime, handlers: Mapping[type, Any]) -> Recipe:
    """Build the recipe; a handler's backend takes precedence over `fp8.backend` of the settings."""
    # 1. Choose the library.
    requested = [handlers[kind] for kind in FP8_HANDLERS if kind in handlers]
    if len(requested) > 1:
        names = " and ".join(type(recipe).__name__ for recipe in requested)
        raise SettingsError(
            f"kwargs_handlers contains {names}, each of which selects a recipe. Pass only one."
        )
    handler = requested[0] if requested else None
    if isinstance(handler, FP8RecipeKwargs):
        named = handler.backend
    else:
        named = None if handler is None else HANDLERS[type(handler)]
    if named is None and settings.fp8 is not None:
        named = settings.fp8.backend
    emulate = isinstance(handler, AORecipeKwargs) and handler.emulate
    options: Any = handler
    backend = choose_backend(named, fp8_device(runtime.device), emulate=emulate)
    if named is None:
        logger.warning_once(
            "mixed_precision='fp8' uses %s. Set fp8_backend or pass a kwargs handler to choose another "
            "library.",
            backend.title,
        )
    # 2. Build its recipe.
    if backend.name == "AO":
        fsdp, config = handlers.get(FullyShardedDataParallelPlugin), handlers.get(ParallelismConfig)
        is_sharded = config is not None and config.dp_shard_enabled if fsdp is None else fsdp.version == 2
        # Weights lose a library's type in buffers of FSDP1 and DeepSpeed, and as tensor-parallel `DTensor`s.
        is_tensor_parallel = config is not None and config.tp_enabled
        is_fsdp1 = fsdp is not None and not is_sharded
        return ao.build(
            options or AORecipeKwargs(),
            runtime,
            sharded=is_sharded,
            keeps_types=not (is_tensor_parallel or is_fsdp1 or DeepSpeedPlugin in handlers),
        )
    if backend.name == "TE":
        config = handlers.get(ParallelismConfig)
        recipe = (options or TERecipeKwargs()).recipe or "delayed"
        if config is not None and config.pp_enabled and recipe == "delayed":
            raise UnsupportedError(
                f"TERecipeKwargs(recipe='delayed') with ParallelismConfig(pp_size={config.pp_size}): after "
                "each forward pass, this recipe reduces maxima over all ranks, and the stages of a pipeline "
                "would wait for one another. Use recipe='current' or another, or torchao (AORecipeKwargs())."
            )
        if config is not None and config.tp_enabled:
            raise UnsupportedError(
                f"TERecipeKwargs with ParallelismConfig(tp_size={config.tp_size}): torch's tensor "
                "parallelism does not shard the layers of TransformerEngine. Use torchao (AORecipeKwargs())."
            )
        return te.build(options or TERecipeKwargs())
    return build_msamp(
        options or MSAMPRecipeKwargs(),
        sharded=any(kind in handlers for kind in _SHARDING),
        world_size=runtime.topology.world_size,
    )


def fp8_device(device: torch.device) -> Fp8Device:
    """Describe a device to `choose_backend`.

    Example:
        >>> fp8_device(torch.device("cpu")).type
        'cpu'
    """
    if device.type != "cuda":
        return Fp8Device(type=device.type)
    capability = torch.cuda.get_device_capability(device)
    return Fp8Device(type="cuda", capability=capability, is_rocm=torch.version.hip is not None)


def build_msamp(handler: MSAMPRecipeKwargs, *, sharded: bool, world_size: int) -> Recipe:
    """Build the recipe of MS-AMP."""
    if sharded:
        raise UnsupportedError(
            "mixed_precision='fp8' with MS-AMP trains in one process or under DDP, and parameters are to be "
            "sharded: use the FP8 backend 'AO' (torchao: AORecipeKwargs())."
        )
    try:
        msamp: Any = import_module("msamp")
    except ImportError as error:
        raise MissingDependencyError(
            f"mixed_precision='fp8' with the backend 'MSAMP': MS-AMP cannot be imported ({error}), and is no "
            f"longer developed; {BY_NAME['MSAMP'].otherwise}."
        ) from error

    def initialize(bundle: Bundle) -> Bundle:
        """Have the library replace the model together with its optimizer."""
        if not bundle.models:
            return bundle
        if len(bundle.models) != 1 or len(bundle.optimizers) != 1:
            raise SettingsError(
                f"prepare() got {len(bundle.models)} models and {len(bundle.optimizers)} optimizers: MS-AMP "
                "takes one of each, in one call of prepare()."
            )
        model, optimizer = msamp.initialize(
            bundle.models[0], bundle.optimizers[0], opt_level=handler.opt_level
        )
        if world_size > 1:  # DDP does not reduce gradients of weights in 8 bits; the optimizer does
            optimizer.register_step_pre_hook(lambda wrapped, *_: wrapped.all_reduce_grads(model))
        return replace(bundle, models=(model,), optimizers=(optimizer,))

    return Recipe(backend="MSAMP", convert=lambda _: {}, initialize=initialize)
