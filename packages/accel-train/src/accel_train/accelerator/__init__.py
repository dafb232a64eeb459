"""`Accelerator`: one training script, unchanged, on any number of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

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
from accel_state.libraries import hide_import_notices
from accel_trackers.session import OnTrackerError
from accel_train.accelerator.build import UNSET, AcceleratorConfig, build_parts
from accel_train.accelerator.prepare import PrepareFacet
from accel_train.accelerator.results import CollectFacet, TrackingFacet
from accel_train.accelerator.run import ObserveFacet, ParallelFacet, ProcessFacet
from accel_train.accelerator.state_io import StateIoFacet
from accel_train.accelerator.stepping import SteppingFacet

if TYPE_CHECKING:
    from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
    from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
    from accel_plugins.megatron.plugin import MegatronLMPlugin
    from accel_plugins.parallelism.config import ParallelismConfig, TorchTensorParallelPlugin
    from accel_state.labels import PrecisionName
    from accel_trackers.session import Trackers

__all__ = ["Accelerator"]

hide_import_notices()  # at import: scripts import transformers, which imports torchao, after accel


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
    """Run one training script on one device or many.

    Args:
        device_placement: Whether `prepare` moves models, and loaders their batches, to the device.
        split_batches: Whether batches are split across ranks; `dataloader_config` has the same field.
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`; else `ACCELERATE_MIXED_PRECISION`, else
            `"no"`.
        gradient_accumulation_steps: Micro-batches that make one optimizer step; else
            `ACCELERATE_GRADIENT_ACCUMULATION_STEPS`, else 1.
        cpu: Whether to train on the CPU even if there is an accelerator.
        dataloader_config: Options for prepared loaders.
        deepspeed_plugin: Train with DeepSpeed's engine; a dictionary is the same as `deepspeed_plugins`.
        fsdp_plugin: Train with parameters, gradients and optimizer states sharded across ranks. As
            with the other plugins, an earlier `Accelerator` of this process, and else the environment,
            decides if it is `None`.
        torch_tp_plugin: Train with tensor parallelism; prefer `parallelism_config`.
        megatron_lm_plugin: Train with Megatron: tensor, pipeline, sequence and data parallelism.
        rng_types: The random generators that loaders synchronise across ranks at the start of an epoch;
            `["generator"]`, the generator of the sampler, if `None`.
        log_with: Experiment trackers: a name such as `"tensorboard"`, `"all"` for all installed ones, a
            custom `GeneralTracker`, or a list of these.
        project_dir: Directory of the project's files.
        project_config: Directories and naming of checkpoints and logs.
        gradient_accumulation_plugin: Number of micro-batches, and when gradients synchronise.
        step_scheduler_with_optimizer: Whether schedulers step only after optimizer steps, as
            `step_scheduler_per` counts them; otherwise they step at every call.
        kwargs_handlers: Options of PyTorch features, at most one each of `AutocastKwargs`,
            `DistributedDataParallelKwargs`, `GradScalerKwargs`, `InitProcessGroupKwargs`, `ProfileKwargs`.
        dynamo_backend: Backend with which `prepare` compiles models; else `ACCELERATE_DYNAMO_BACKEND`.
        dynamo_plugin: Backend and options of `torch.compile`.
        deepspeed_plugins: Several plugins by name; the first is active until
            `AcceleratorState.select_deepspeed_plugin` selects another.
        parallelism_config: Sizes of the mesh axes.
        step_scheduler_per: How far an optimizer step advances a learning rate schedule: `"process"` once per
            process, `"update"` once, `"sample"` by the number of samples; `"process"` if `None`, which is
            logged.
        on_tracker_error: How to handle a tracker's error: `"raise"` raises it on the main process; `"warn"`
            logs it and continues training.
        strategy: Training strategy: a name such as `"ddp"`, including those of installed distributions, or a
            `StrategySpec`. If `None`, the strategy of an earlier `Accelerator`, else
            `ACCELERATE_STRATEGY`, else the first that applies to the plugins and the number of processes.
        log_system_metrics: Whether `log` adds step time, throughput, device memory and the share of time
            spent waiting for data, under names that begin with `system/`.

    Raises:
        SettingsError: An argument or its environment variable is invalid.
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
        mixed_precision: PrecisionType | PrecisionName | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        rng_types: Sequence[str | RNGType] | None = None,
        log_with: Trackers | None = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
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
