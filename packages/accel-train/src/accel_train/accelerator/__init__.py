"""`Accelerator`: one training script, unchanged, on any number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from accel_plugins.kwargs import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    KwargsHandler,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel_plugins.optimizer import StepPer
from accel_plugins.strategy import StrategySpec
from accel_state.labels import DynamoBackend, PrecisionType, RNGType
from accel_trackers.session import OnTrackerError
from accel_train.accelerator.build import UNSET, AcceleratorConfig, build_parts
from accel_train.accelerator.prepare import PrepareFacet
from accel_train.accelerator.results import CollectFacet, TrackingFacet
from accel_train.accelerator.run import ObserveFacet, ParallelFacet, ProcessFacet
from accel_train.accelerator.state_io import StateIoFacet
from accel_train.accelerator.stepping import SteppingFacet

__all__ = ["Accelerator"]


@final
class Accelerator(
    ProcessFacet,
    PrepareFacet,
    SteppingFacet,
    CollectFacet,
    StateIoFacet,
    ObserveFacet,
    TrackingFacet,
    ParallelFacet,
):
    """Everything that a training script needs to run on one device or many.

    Args:
        device_placement: Whether `prepare` moves models, and loaders their batches, to the device.
        split_batches: The same as in `dataloader_config`, where it belongs.
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or the name of an installed recipe; else
            `ACCELERATE_MIXED_PRECISION`, else `"no"`.
        gradient_accumulation_steps: Micro-batches that make one optimizer step; else
            `ACCELERATE_GRADIENT_ACCUMULATION_STEPS`, else 1.
        cpu: Whether to stay on the CPU although there is an accelerator.
        dataloader_config: How loaders are prepared.
        deepspeed_plugin: Train with DeepSpeed's engine; a dictionary is the same as `deepspeed_plugins`.
        fsdp_plugin: Train with parameters, gradients and optimizer states sharded across ranks. As
            with the other plugins, an earlier `Accelerator` of this process, and else the environment,
            decides if it is `None`.
        torch_tp_plugin: Train with tensor parallelism; `parallelism_config` has the same and more.
        megatron_lm_plugin: Train with Megatron: tensor, pipeline, sequence and data parallelism.
        rng_types: Which sources of randomness loaders synchronise between processes at their beginning;
            `["generator"]` if `None`: that of the sampler.
        log_with: Experiment trackers: a name such as `"tensorboard"`, `"all"` for all that are installed, a
            `GeneralTracker` of your own, or a list of these.
        project_dir: Directory of the project's files.
        project_config: That and more about them.
        gradient_accumulation_plugin: The number of micro-batches and more about them.
        step_scheduler_with_optimizer: Whether schedulers step only when their optimizers have stepped, by
            the clock of `step_scheduler_per`; else they step at every call.
        kwargs_handlers: Options of PyTorch's own parts, one each of `AutocastKwargs`,
            `DistributedDataParallelKwargs`, `GradScalerKwargs`, `InitProcessGroupKwargs`, `ProfileKwargs`.
        dynamo_backend: With which compiler `prepare` compiles models; else `ACCELERATE_DYNAMO_BACKEND`.
        dynamo_plugin: The compiler and its options.
        deepspeed_plugins: Several by name, of which the first is active until
            `AcceleratorState.select_deepspeed_plugin` chooses another.
        parallelism_config: The sizes of the mesh axes.
        step_scheduler_per: What one step of a learning rate schedule stands for: `"process"` advances it once
            for every process when the optimizer steps, `"update"` once, `"sample"` by the samples that were
            read; `"process"` if `None`, with a line in the log.
        on_tracker_error: What an error of a tracker does: `"raise"` raises it on the main process; `"warn"`
            logs a line, and the training continues.
        strategy: How models are trained: the name of a strategy, such as `"ddp"` or that of an installed
            distribution, or a `StrategySpec`. If `None`, that of an earlier `Accelerator`, else
            `ACCELERATE_STRATEGY`, else the first that applies to the plugins and the number of processes.
        log_system_metrics: Whether `log` adds step time, throughput, device memory and the share of time in
            which data was waited for, under names that begin with `system/`.

    Raises:
        SettingsError: An argument, or its environment variable, cannot be used.
        UnsupportedError: A requested feature is not available.

    Example:
        >>> import torch
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> for batch in loader:
        ...     loss = model(batch).square().mean()
        ...     accelerator.backward(loss)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = UNSET,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[str | RNGType] | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        *,
        step_scheduler_per: StepPer | None = None,
        on_tracker_error: OnTrackerError = "raise",
        strategy: str | StrategySpec | None = None,
        log_system_metrics: bool = False,
    ) -> None:
        config = AcceleratorConfig(
            device_placement=device_placement,
            split_batches=split_batches,
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            cpu=cpu,
            dataloader_config=dataloader_config,
            deepspeed_plugin=deepspeed_plugin,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            rng_types=rng_types,
            log_with=log_with,
            project_dir=project_dir,
            project_config=project_config,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            kwargs_handlers=kwargs_handlers,
            dynamo_backend=dynamo_backend,
            dynamo_plugin=dynamo_plugin,
            deepspeed_plugins=deepspeed_plugins,
            parallelism_config=parallelism_config,
            step_scheduler_per=step_scheduler_per,
            on_tracker_error=on_tracker_error,
            strategy=strategy,
            log_system_metrics=log_system_metrics,
        )
        self._parts = build_parts(config, self)
