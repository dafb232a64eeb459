"""FP8 with MS-AMP, which is no longer developed: it replaces the model and the optimizer in one call."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accel_plugins.recipe import Recipe
from accel_state.errors import MissingDependencyError, SettingsError, UnsupportedError
from accel_state.fp8_backends import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from accel_plugins.bundle import Bundle
    from accel_plugins.kwargs.fp8 import MSAMPRecipeKwargs
    from accel_state.runtime import Runtime


def build(handler: MSAMPRecipeKwargs, *, sharded: bool, world_size: int) -> Recipe:
    """Make the recipe."""
    if sharded:
        raise UnsupportedError(
            "mixed_precision='fp8' with MS-AMP trains in one process or under DDP, and parameters are to be "
            "sharded: use the FP8 backend 'AO' (torchao: AORecipeKwargs())."
        )
    msamp = _load()

    def initialize(bundle: Bundle) -> Bundle:
        """Let the library replace the model and the optimizer, which belong together."""
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
        if world_size > 1:  # DDP leaves out the weights in 8 bits, whose gradients the optimizer reduces
            optimizer.register_step_pre_hook(lambda own, *_: own.all_reduce_grads(model))
        return replace(bundle, models=(model,), optimizers=(optimizer,))

    return Recipe(name="fp8", convert=_nothing, initialize=initialize, precision="bf16", backend="MSAMP")


def _load() -> Any:
    try:
        return import_module("msamp")
    except ImportError as error:
        raise MissingDependencyError(
            f"mixed_precision='fp8' with the backend 'MSAMP': MS-AMP cannot be imported ({error}), and is no "
            f"longer developed; {BY_NAME['MSAMP'].otherwise}."
        ) from error


def _nothing(bundle: Bundle, runtime: Runtime, mesh: DeviceMesh | None) -> Mapping[Tensor, Tensor]:
    del bundle, runtime, mesh
    empty: dict[Any, Any] = {}
    return empty
