"""The types of the methods and properties of `Accelerator`; read by type checkers, never run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Linear
from torch.optim import Optimizer
from torch.profiler import profile
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.deepspeed.engine import DeepSpeedEngineWrapper
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.fp8.recipe import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel_plugins.kwargs import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from accel_plugins.parallelism.config import ParallelismConfig
from accel_plugins.weight_source import WeightSource
from accel_state.accelerator_state import AcceleratorState, GradientState
from accel_state.labels import DistributedType, FP8BackendType, RNGType
from accel_train.accelerator import Accelerator
from accel_train.checkpoint.save import Saving
from accel_train.data.adapter import PreparedLoader


def process(accelerator: Accelerator) -> None:
    """The rank, the device and what runs on some ranks only."""
    assert_type(accelerator.state, AcceleratorState)
    assert_type(accelerator.device, torch.device)
    assert_type(accelerator.distributed_type, DistributedType)
    assert_type((accelerator.num_processes, accelerator.process_index), tuple[int, int])
    assert_type(accelerator.local_process_index, int)
    assert_type((accelerator.multi_device, accelerator.use_distributed), tuple[bool, bool])
    assert_type((accelerator.is_main_process, accelerator.is_local_main_process), tuple[bool, bool])
    assert_type(accelerator.is_last_process, bool)
    assert_type((accelerator.fp8_backend, accelerator.fp8_enabled), tuple[FP8BackendType, bool])
    assert_type(accelerator.set_trigger(), None)
    assert_type(accelerator.check_trigger(), bool)
    assert_type(accelerator.flag_tensor, Tensor | None)
    assert_type(accelerator.wait_for_everyone(), None)
    assert_type(accelerator.main_process_first(), AbstractContextManager[None])
    assert_type(accelerator.local_main_process_first(), AbstractContextManager[None])
    assert_type(accelerator.print("loss", 0.5, flush=True), None)

    @accelerator.on_local_main_process
    def rows(count: int) -> list[int]:
        return [count]

    @accelerator.on_main_process()
    def other_rows(count: int) -> list[int]:
        return [count]

    @accelerator.on_local_process(local_process_index=1)
    def third_rows(count: int) -> list[int]:
        return [count]

    assert_type(rows(1), list[int] | None)
    assert_type(other_rows(1), list[int] | None)
    assert_type(third_rows(1), list[int] | None)


def training(accelerator: Accelerator, model: Linear, optimizer: Optimizer, loss: Tensor) -> None:
    """A step, its window of accumulation, clipping and precision."""
    assert_type(accelerator.accumulate(model), AbstractContextManager[None])
    with accelerator.no_sync(model), accelerator.autocast():
        assert_type(accelerator.backward(loss, retain_graph=True), None)
    assert_type(accelerator.backward(loss, num_items=3), None)
    assert_type(accelerator.lomo_backward(loss, learning_rate=1e-3), None)
    assert_type(accelerator.trigger_sync_in_backward(model), AbstractContextManager[None])
    with accelerator.join_uneven_inputs([model], even_batches=False) as nothing:
        assert_type(nothing, None)
    assert_type(accelerator.clip_grad_norm_(model.parameters(), 1.0), Tensor | None)
    assert_type(accelerator.clip_grad_value_(model.parameters(), 1.0), None)
    assert_type(accelerator.unscale_gradients(), None)
    assert_type(accelerator.unscale_gradients([optimizer]), None)
    assert_type(accelerator.mixed_precision, str)
    assert_type((accelerator.native_amp, accelerator.sync_gradients), tuple[bool, bool])
    assert_type((accelerator.gradient_accumulation_steps, accelerator.step), tuple[int, int])
    assert_type(accelerator.step_scheduler_with_optimizer, bool)
    assert_type(accelerator.optimizer_step_was_skipped, bool)
    assert_type(accelerator.gradient_state, GradientState)
    assert_type(accelerator.scaler, GradScaler | None)
    accelerator.sync_gradients = True
    accelerator.gradient_accumulation_steps = 2
    accelerator.backward("loss")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    accelerator.clip_grad_norm_(model)  # type: ignore[call-arg, arg-type] # pyright: ignore[reportCallIssue]


def handlers(accelerator: Accelerator) -> None:
    """The handlers of an accelerator are those of its constructor."""
    assert_type(accelerator.autocast_handler, AutocastKwargs | None)
    assert_type(accelerator.scaler_handler, GradScalerKwargs | None)
    assert_type(accelerator.init_handler, InitProcessGroupKwargs | None)
    assert_type(accelerator.ddp_handler, DistributedDataParallelKwargs | None)
    assert_type(accelerator.ao_recipe_handler, AORecipeKwargs | None)
    assert_type(accelerator.te_recipe_handler, TERecipeKwargs | None)
    assert_type(accelerator.msamp_recipe_handler, MSAMPRecipeKwargs | None)
    assert_type(accelerator.fp8_recipe_handler, AORecipeKwargs | TERecipeKwargs | MSAMPRecipeKwargs | None)
    assert_type(accelerator.profile_handler, ProfileKwargs | None)
    assert_type(accelerator.profile(), AbstractContextManager[profile])


def loading(accelerator: Accelerator, model: Linear, loader: DataLoader[Tensor]) -> None:
    """How loaders are prepared, and what is released."""
    assert_type((accelerator.device_placement, accelerator.split_batches), tuple[bool, bool])
    assert_type((accelerator.even_batches, accelerator.dispatch_batches), tuple[bool, bool | None])
    assert_type((accelerator.use_seedable_sampler, accelerator.non_blocking), tuple[bool, bool])
    assert_type(accelerator.use_stateful_dataloader, bool)
    assert_type(accelerator.dataloader_config, DataLoaderConfiguration)
    assert_type(accelerator.rng_types, Sequence[str | RNGType])
    assert_type(accelerator.verify_device_map(model), bool)
    assert_type(accelerator.skip_first_batches(loader, num_batches=2), PreparedLoader[Tensor])
    assert_type(accelerator.free_memory(model, loader), list[Any])
    assert_type(accelerator.clear(model), list[Any])


def state(accelerator: Accelerator, model: Linear, hook: Callable[..., None], path: Path) -> None:
    """Checkpoints and weights."""
    assert_type(accelerator.save_state(path), str)
    assert_type(accelerator.save_state("step_1", blocking=False), str | Saving)
    assert_type(accelerator.load_state(path), None)
    assert_type((accelerator.has_checkpoint, accelerator.save_iteration), tuple[bool, int])
    assert_type(accelerator.exit_if_preempted(), None)
    assert_type(accelerator.register_for_checkpointing(model), None)
    assert_type(accelerator.register_save_state_pre_hook(hook), RemovableHandle)
    assert_type(accelerator.register_load_state_pre_hook(hook), RemovableHandle)
    assert_type(accelerator.save_model(model, path, max_shard_size="1GB"), None)
    assert_type(accelerator.save(model.state_dict(), path, safe_serialization=True), None)
    assert_type(accelerator.get_state_dict(model), dict[str, Any])
    assert_type(accelerator.named_full_parameters(dtype=torch.bfloat16), Iterator[tuple[str, Tensor]])
    assert_type(accelerator.weight_source(model, track_changes=True), WeightSource)
    assert_type(accelerator.offload_states(["gradients"]), None)
    assert_type(accelerator.reload_states(), None)
    assert_type(accelerator.project_configuration, ProjectConfiguration)
    assert_type(accelerator.project_dir, str | Path | None)
    assert_type(accelerator.logging_dir, str | Path | None)
    accelerator.save_state(3)  # type: ignore[call-overload] # pyright: ignore[reportCallIssue, reportArgumentType]


def axes(accelerator: Accelerator, tensor: Tensor) -> None:
    """The device mesh and the rank on it."""
    assert_type(accelerator.parallelism_config, ParallelismConfig | None)
    assert_type(accelerator.deepspeed_plugin, DeepSpeedPlugin | None)
    assert_type(accelerator.deepspeed_engine_wrapped, DeepSpeedEngineWrapper | None)
    assert_type(accelerator.torch_device_mesh, DeviceMesh | None)
    assert_type((accelerator.is_fsdp2, accelerator.should_save_model), tuple[bool, bool])
    assert_type(accelerator.is_composable_parallelism_enabled, bool)
    assert_type((accelerator.tensor_parallel_rank, accelerator.context_parallel_rank), tuple[int, int])
    assert_type((accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank), tuple[int, int])
    assert_type(accelerator.pipeline_parallel_rank, int)
    with accelerator.maybe_context_parallel([tensor], [1], {tensor}) as nothing:
        assert_type(nothing, None)


def tracking(accelerator: Accelerator) -> None:
    """Runs of trackers."""
    assert_type(accelerator.init_trackers("run", {"lr": 0.1}, {"wandb": {"tags": ["a"]}}), None)
    assert_type(accelerator.log({"loss": 0.5}, step=1, log_kwargs={"wandb": {"commit": True}}), None)
    assert_type(accelerator.end_training(), None)
    accelerator.log(0.5)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
