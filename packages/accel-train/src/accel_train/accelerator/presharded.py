"""Switch the strategy in `prepare` when the first model is already sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from accel_ops.modules import model_has_dtensor, size_at_load
from accel_plugins import fsdp
from accel_plugins.kwargs import AutocastKwargs, GradScalerKwargs
from accel_plugins.precision import build_precision
from accel_state.errors import SettingsError, UnsupportedError
from accel_train.step import bind_backward, bind_step

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_train.accelerator import Accelerator


def adopt_sharded(models: Sequence[nn.Module], accelerator: Accelerator) -> None:
    """Switch to the strategy that trains already sharded models as they are, if there are any."""
    parts = accelerator._parts
    sharded = [model for model in models if _is_sharded(model, parts.strategy.mesh)]
    if parts.strategy.name == "presharded" or not sharded:
        return
    name = type(sharded[0]).__qualname__
    if not parts.strategy.keeps_sharded:
        raise UnsupportedError(
            f"{name} is already sharded, as by from_pretrained(distributed_config=...), but the strategy "
            f"{parts.strategy.name!r} shards models itself. Load it without these arguments."
        )
    stages = size_at_load(sharded[0], "pp_size") or 1
    if stages > 1:
        raise UnsupportedError(
            f"{name} was loaded with pp_size={stages}, as stages of transformers' own pipeline, which "
            "returns no gradients from one stage to the one before. Load it without these arguments, and "
            f"pass ParallelismConfig(pp_size={stages})."
        )
    if parts.recipe is not None:
        raise UnsupportedError(
            f"{name} is already sharded, but mixed_precision={accelerator.state.mixed_precision!r} replaces "
            "layers, which must come first. Use 'bf16'."
        )
    if parts.prepared.optimizers or parts.prepared.dataloaders or parts.prepared.models:
        raise SettingsError(
            f"{name} is already sharded and determines which ranks read different batches. Prepare it before "
            "anything else, or together with its optimizer and loaders."
        )
    runtime, handlers = parts.runtime, parts.handlers
    precision = build_precision(
        accelerator.state.mixed_precision,
        runtime.device,
        handlers.get(AutocastKwargs),  # pyright: ignore[reportArgumentType] - by its own type
        handlers.get(GradScalerKwargs),  # pyright: ignore[reportArgumentType] - by its own type
        shared=True,
    )
    strategy = fsdp.presharded.PreshardedStrategy(sharded[0], runtime, precision, handlers)
    accelerator.state.device_mesh = strategy.mesh
    parts.synchronizer.no_sync = strategy.no_sync
    parts.strategy, parts.precision = strategy, precision
    parts.backward = bind_backward(strategy, None, None)
    parts.after_step = (parts.preemption and parts.preemption.count_optimizer_step,)
    parts.step = bind_step(strategy, parts.after_step)
    parts.checkpoints.strategy, parts.checkpoints.precision = strategy, precision


def _is_sharded(model: nn.Module, mesh: DeviceMesh | None) -> bool:
    """Return whether a model was already sharded; under tensor parallelism, its layers may be DTensors."""
    if getattr(model, "is_distributed_loading_by_transformers", False):
        return True
    if "_is_accelerate_prepared" in vars(model):
        return False
    has_tp = mesh is not None and "tp" in (mesh.mesh_dim_names or ())
    return model_has_dtensor(model) and (not has_tp or fsdp.presharded.data_mesh(model) is not None)
