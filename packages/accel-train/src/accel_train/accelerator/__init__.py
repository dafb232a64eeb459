"""`Accelerator`: one training script, unchanged, on any number of devices."""

from __future__ import annotations

import json
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, TypeVarTuple, final, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

import accel_train
from accel_ops import collectives, pad, weights
from accel_ops.modules import extract_model_from_parallel, without_compiler
from accel_ops.weights.layout import DEFAULT_SHARD_SIZE
from accel_plugins import sharding
from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.fp8.recipe import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs, build_recipe
from accel_plugins.full_parameters import FullParameters, ParameterSource
from accel_plugins.host_copies import StateKind
from accel_plugins.kwargs import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    StepGuard,
    TilingKwargs,
    TorchDynamoPlugin,
)
from accel_plugins.optimizer import (
    AcceleratedOptimizer,
    AcceleratedScheduler,
    StepPer,
    check_clock,
    without_wrapper,
)
from accel_plugins.precision import switch_autocast, switch_scaler, with_autocast_options
from accel_plugins.registry import as_handlers, find_plugins, with_plugin_fields
from accel_plugins.strategy import Feature, StrategySpec
from accel_plugins.unsharded import has_device_map, sync_in_backward, with_offloaded_weights
from accel_plugins.weight_source import WeightSource
from accel_state import environ, hang_monitor
from accel_state.accelerator_state import AcceleratorState, GradientState, is_initialized
from accel_state.errors import CheckpointError, SettingsError, UnsupportedError
from accel_state.files import any_path
from accel_state.html_table import html_table
from accel_state.labels import DistributedType, DynamoBackend, FP8BackendType, PrecisionType, RNGType
from accel_state.libraries import hide_import_notices
from accel_state.logging import get_logger
from accel_state.memory import release_memory
from accel_state.partial_state import PartialState, RankMethods
from accel_state.remote import AnyPath
from accel_state.runtime import current_topology
from accel_state.settings.model import from_environ
from accel_trackers.session import OnTrackerError, TrackerSession
from accel_train import checkpoint
from accel_train.accelerator import build, offload
from accel_train.accelerator.metrics import gather_real
from accel_train.accelerator.prepare import prepare_all
from accel_train.checkpoint.context import CheckpointContext
from accel_train.data.adapter import PreparedLoader, override_even_batches
from accel_train.data.prepare import skip_first_batches
from accel_train.step import (
    Accumulation,
    EngineCalls,
    ItemCount,
    ItemWindow,
    Synchronizer,
    bind_backward,
    bind_step,
    fused_backward,
)

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.lr_scheduler import LRScheduler
    from torch.profiler import profile
    from torch.utils.data import DataLoader

    from accel_plugins.deepspeed.engine import DeepSpeedEngineWrapper
    from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
    from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
    from accel_plugins.megatron.plugin import MegatronLMPlugin
    from accel_plugins.parallelism.config import ParallelismConfig, TorchTensorParallelPlugin
    from accel_state.labels import PrecisionName
    from accel_trackers.general import GeneralTracker
    from accel_trackers.session import Trackers
    from accel_train.checkpoint.save import Saving

__all__ = ["Accelerator"]

hide_import_notices()  # at import: scripts import transformers, which imports torchao, after accel

logger = get_logger(__name__)

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
More = TypeVarTuple("More")
Placement: TypeAlias = "Sequence[bool | None] | None"
RecipeKwargs: TypeAlias = "AORecipeKwargs | TERecipeKwargs | MSAMPRecipeKwargs"

DEFAULT_BUCKET_BYTES = 256 << 20


def _read_only(path: str, doc: str) -> Any:
    """Return a property for an attribute of a part of the accelerator, at a dotted path."""
    return property(attrgetter(path), doc=doc)


def _attribute_of(name: str, doc: str, part: str = "dataloader_config") -> Any:
    """Return a property that reads and writes an attribute of a part of the accelerator."""

    def write(self: Any, value: Any) -> None:
        setattr(attrgetter(part)(self), name, value)

    return _read_only(f"{part}.{name}", doc).setter(write)


def _rank_on(mesh: Any, axis: str) -> int:
    if mesh is None or axis not in (mesh.mesh_dim_names or ()):
        return 0
    return mesh.get_local_rank(axis)


def _rank_along(axis: str, doc: str) -> Any:
    """Return a property for the coordinate of this rank along an axis of the mesh; 0 without the axis."""
    return property(lambda self: _rank_on(self.torch_device_mesh, axis), doc=doc)


def _handler(kind: type[KwargsHandler], doc: str = "") -> Any:
    """Return a property for the kwargs handler of a type; what is prepared later follows a change."""
    is_recipe = kind in (AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs)

    def write(self: Any, handler: Any) -> None:
        parts = self._parts
        if is_recipe and handler is not parts.handlers.get(kind):
            build.use_recipe_handler(parts, handler)
        elif not is_recipe:
            parts.handlers[kind] = handler
        if kind is AutocastKwargs:
            parts.precision = with_autocast_options(parts.precision, handler)

    doc = f"The `{kind.__name__}` of the accelerator{doc}."
    return property(lambda self: self._parts.handlers.get(kind), write, doc=doc)


@final
class Accelerator(RankMethods):
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
            `DistributedDataParallelKwargs`, `GradScalerKwargs`, `InitProcessGroupKwargs`, `ProfileKwargs`,
            `StepGuard`, `TilingKwargs`.
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

    state: AcceleratorState
    """The process-wide state."""
    device_placement: bool
    """Whether `prepare` moves objects to the device by default."""
    dataloader_config: DataLoaderConfiguration
    """The options of prepared data loaders; a change applies to loaders prepared later."""
    rng_types: Sequence[str | RNGType]
    """The random generators that loaders synchronise across ranks at the start of an epoch."""
    step_scheduler_with_optimizer: bool
    """Whether schedulers follow their optimizers; a change applies to schedulers prepared later."""
    step_scheduler_per: StepPer | None
    """How far an optimizer step advances a schedule; a change applies to schedulers prepared later."""
    flag_tensor: Tensor | None
    """The flag of `set_trigger` on this rank; `None` before the first call."""

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = build.UNSET,
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
        # 1. Check the arguments, before anything is started.
        settings = from_environ(variables := environ.read())
        requested_plugins = build.merge_plugins(
            deepspeed_plugins,
            {
                "deepspeed_plugin": deepspeed_plugin,
                "fsdp_plugin": fsdp_plugin,
                "torch_tp_plugin": torch_tp_plugin,
                "megatron_lm_plugin": megatron_lm_plugin,
                "parallelism_config": parallelism_config,
            },
        )
        selected = build.select_strategy(strategy, settings)
        handlers = build.index_handlers(kwargs_handlers or ())
        self.device_placement = device_placement
        self.dataloader_config = build.resolve_dataloading(dataloader_config, split_batches)
        self.rng_types = ["generator"] if rng_types is None else [*rng_types]
        if unknown := [kind for kind in self.rng_types if kind not in RNGType]:
            raise SettingsError(
                f"rng_types contains {unknown[0]!r}; accepted are {', '.join(map(repr, RNGType.list()))}."
            )
        project = project_config or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and project.project_dir is None:
            project.set_directories(project_dir)
        if dynamo_plugin is not None and dynamo_backend is not None:
            raise SettingsError(
                f"Accelerator(dynamo_backend={dynamo_backend!r}, dynamo_plugin={dynamo_plugin!r}): pass only "
                "one of the two."
            )
        compiler = dynamo_plugin or TorchDynamoPlugin(backend=dynamo_backend)
        trackers = TrackerSession(log_with, project.logging_dir, on_error=on_tracker_error)
        check_clock(step_scheduler_per, "step_scheduler_per")
        if step_scheduler_per is not None and not step_scheduler_with_optimizer:
            raise SettingsError(
                f"Accelerator(step_scheduler_per={step_scheduler_per!r}, step_scheduler_with_optimizer="
                "False): without the optimizer, every call of step() is one step of the schedule. Remove one "
                "of the two."
            )
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.step_scheduler_per = step_scheduler_per
        tiling = TilingKwargs()  # from the environment, if no handler was given
        # 2. Choose the plugins; their settings override the environment.
        earlier = AcceleratorState._shared_state  # of an earlier `Accelerator` of this process
        known = {name: earlier.get(name) for name in requested_plugins}
        known["deepspeed_plugin"] = earlier.get("deepspeed_plugins")  # all of them by name
        plugins = find_plugins(requested_plugins, known, settings, selected and selected.sections)
        accumulation = build.resolve_accumulation(
            gradient_accumulation_steps, gradient_accumulation_plugin, settings, plugins
        )
        settings = with_plugin_fields(settings, plugins)
        # 3. Start the process group, and build the precision policy and the strategy for its ranks.
        with build.restore_state_on_failure():
            group = handlers.get(InitProcessGroupKwargs)
            options = {} if group is None else group.to_kwargs()
            PartialState._from_settings(settings, variables, cpu, options)
            # An earlier state keeps its precision.
            from_settings = mixed_precision is None and not is_initialized()
            self.state = AcceleratorState(
                mixed_precision=settings.precision.mixed_precision if from_settings else mixed_precision,
                cpu=cpu,
                dynamo_plugin=compiler,
                _from_accelerator=True,
                **plugins,
                **options,
            )
            self._partial_state = PartialState()
            runtime = self._partial_state.runtime
            if self.state.parallelism_config is not None:
                self.state.parallelism_config._validate_accelerator(self)
            handlers |= {**as_handlers(plugins), TorchDynamoPlugin: compiler}
            handlers.setdefault(TilingKwargs, tiling)
            handlers[GradientAccumulationPlugin] = accumulation
            handlers[DataLoaderConfiguration] = self.dataloader_config
            base = "bf16" if self.state.mixed_precision == "fp8" else self.state.mixed_precision
            built, precision = build.build_strategy(settings, selected, base, runtime, handlers)
            recipe = build_recipe(self.state.mixed_precision, settings, built)
        self.state.strategy, self.state.device_mesh = selected, built.mesh
        vars(self.state)["_fsdp_version"] = built.fsdp_version
        # 4. Create the state of the training loop.
        self.flag_tensor = None
        self.delayed_fp8_autocast, self.has_lomo_optimizer = False, False
        self.has_fp8_handler = any("Recipe" in kind.__name__ for kind in handlers)
        self._native_amp: bool | None = None
        gradient_state = GradientState(gradient_accumulation_plugin=accumulation)
        prepared = build.PreparedObjects()
        meter = None
        if log_system_metrics:
            meter = accel_train.profiling.StepMeter(gradient_state, prepared, runtime)
        no_sync = None if runtime.topology.world_size == 1 else built.no_sync
        synchronizer = Synchronizer(gradient_state, no_sync, prepared.optimizers)
        engine = EngineCalls(built, gradient_state) if built.owns_forward else None
        checkpoints = CheckpointContext(runtime, project, prepared, synchronizer, built, precision, recipe)
        preemption = build.start_preemption(checkpoints, self.save_state, variables)
        after_step = build.hooks_after_step(built, recipe, prepared, preemption)
        if built.replicas is not None:
            accel_train.healing.share_state(built.replicas, checkpoints, self)
        monitor = hang_monitor.active()
        if monitor is not None and settings.process.name_stragglers:
            monitor.name_stragglers(prepared.num_steps)
        self._parts = build.Parts(
            runtime=runtime,
            gradient_state=gradient_state,
            strategy=built,
            engine=engine,
            backward=bind_backward(built, engine, built.after_micro_batch),
            step=bind_step(built, after_step),
            after_step=after_step,
            precision=precision,
            recipe=recipe,
            compiler=compiler,
            synchronizer=synchronizer,
            items=ItemWindow(runtime, prepared.parameters, meter),
            handlers=handlers,
            prepared=prepared,
            checkpoints=checkpoints,
            trackers=trackers,
            meter=meter,
            preemption=preemption,
        )

    # The process, its rank and device.

    @property
    def _process(self) -> PartialState:
        return self._partial_state

    device: torch.device = _read_only("_partial_state.device", "The device of this process.")
    distributed_type: DistributedType = _read_only(
        "state.distributed_type", "The documented label of the strategy and device."
    )
    num_processes: int = _read_only("_partial_state.num_processes", "Number of processes of the run.")
    process_index: int = _read_only("_partial_state.process_index", "The rank of this process among all.")
    local_process_index: int = _read_only(
        "_partial_state.local_process_index", "The local rank of this process."
    )

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each with its own accelerator."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library of FP8 matrix multiplication; `FP8BackendType.NO` without FP8.

        Example:
            >>> from accel_train import Accelerator
            >>> Accelerator(cpu=True).fp8_backend.value
            'NO'
        """
        recipe = self._parts.recipe
        return FP8BackendType("NO" if recipe is None else recipe.backend)

    @property
    def fp8_enabled(self) -> bool:
        """Whether FP8 matrix multiplication is used; a change applies to models prepared later."""
        return self.fp8_backend is not FP8BackendType.NO

    @fp8_enabled.setter
    def fp8_enabled(self, fp8_enabled: bool) -> None:
        if fp8_enabled and not self.fp8_enabled:
            raise SettingsError("accelerator.fp8_enabled = True: pass Accelerator(mixed_precision='fp8').")
        if not fp8_enabled:
            self._parts.recipe = None

    def set_trigger(self) -> None:
        """Set a flag on this rank, which `check_trigger` returns on all ranks.

        Example:
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.set_trigger()
            >>> accelerator.check_trigger(), accelerator.check_trigger()
            (True, False)
        """
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Return whether any rank has called `set_trigger` since the last check; call it on every rank."""
        count = torch.tensor(0, device=self.device) if self.flag_tensor is None else self.flag_tensor.clone()
        self.flag_tensor = torch.tensor(0, device=self.device)
        self._parts.runtime.collectives.all_reduce(count)
        return bool(count.item())

    # Prepare objects, and release them.

    @overload
    def prepare(self, first: A, /, *, device_placement: Placement = ...) -> A: ...
    @overload
    def prepare(
        self, first: A, second: B, /, *more: *More, device_placement: Placement = ...
    ) -> tuple[A, B, *More]: ...
    @overload
    def prepare(self, *args: Any, device_placement: Placement = ...) -> Any: ...
    def prepare(  # pyright: ignore[reportInconsistentOverload] - any number of arguments, as `More`
        self, *args: Any, device_placement: Placement = None
    ) -> Any:
        """Prepare objects for this run: move and wrap models, shard what the strategy shards.

        Args:
            *args: Models, optimizers, data loaders and schedulers, in any order and number. Other objects,
                and objects that this accelerator has already prepared, are returned unchanged.
            device_placement: For every argument, whether it may be moved to the device. `None`, as a whole or
                in the list, uses the value of `Accelerator(device_placement=…)`.

        Returns:
            The prepared objects in the order of the arguments; a single object if there is only one argument.

        Raises:
            ValueError: `device_placement` and the arguments differ in length.
            UnsupportedError: The strategy cannot train the objects, such as a model that is spread over
                several devices and processes.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> model = torch.nn.Linear(2, 1)
            >>> model, optimizer = Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters()))
            >>> type(optimizer).__name__
            'AcceleratedOptimizer'
        """
        replaced = self._replaced_methods()
        for method in replaced:
            args = tuple(getattr(self, method)(*args))
        results = prepare_all(self, args, device_placement, replaced=replaced)
        return results[0] if len(results) == 1 else tuple(results)

    def prepare_model(
        self,
        model: M,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> M:
        """Prepare a model.

        Args:
            model: The model.
            device_placement: Whether it may be moved to the device; the accelerator's default if `None`.
            evaluation_mode: Whether the model is only evaluated: it is moved to the device and converted to
                its precision, and wrapped only if it cannot run otherwise.
        """
        return prepare_all(self, [model], [device_placement], kind="models", evaluation=evaluation_mode)[0]

    def prepare_optimizer(
        self,
        optimizer: Optimizer,
        device_placement: bool | None = None,
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer; `device_placement` sets whether its state follows its parameters."""
        return prepare_all(self, [optimizer], [device_placement], kind="optimizers")[0]

    def prepare_data_loader(
        self,
        data_loader: DataLoader[T],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> PreparedLoader[T]:
        """Prepare a data loader.

        Args:
            data_loader: A PyTorch `DataLoader`.
            device_placement: Whether it moves batches to the device; the accelerator's default if `None`.
            slice_fn_for_dispatch: Splits the batches of a loader that reads only on the main process.
        """
        options: dict[str, Any] = {"kind": "dataloaders", "slice_fn": slice_fn_for_dispatch}
        return prepare_all(self, [data_loader], [device_placement], **options)[0]

    def prepare_scheduler(
        self, scheduler: LRScheduler, *, step_per: StepPer | None = None
    ) -> AcceleratedScheduler:
        """Prepare a learning rate scheduler; it follows the optimizer that it was created with.

        Args:
            scheduler: The scheduler.
            step_per: The unit of one step; the value of `Accelerator(step_scheduler_per=…)` if `None`.
        """
        return prepare_all(self, [scheduler], kind="schedulers", step_per=step_per)[0]

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a device map spreads a model, or a part of it, over several devices.

        One process runs such a model; several cannot train it.

        Args:
            model: Any model.
        """
        return has_device_map(model)

    def unwrap_model(
        self,
        model: M,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> M:
        """Return a model as it was before `prepare`.

        Args:
            model: A prepared model; any other is returned as it is.
            keep_fp32_wrapper: Whether its forward keeps computing in mixed precision.
            keep_torch_compile: Whether it stays compiled if it is.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release all prepared objects and their memory.

        Args:
            *objects: Further objects of the caller to release.

        Returns:
            One `None` for each object, to assign to the caller's variables.

        Example:
            >>> from accel_train import Accelerator
            >>> model, optimizer = "a model", "an optimizer"
            >>> model, optimizer = Accelerator(cpu=True).free_memory(model, optimizer)
            >>> model is optimizer is None
            True
        """
        self._parts.strategy.release()
        if self._parts.strategy.offloaded:
            self._parts.strategy.offloaded.clear()
            offload.guard(self)
        self._parts.prepared.clear()
        self._parts.synchronizer.step = 0
        self._parts.items.close()
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[Any]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    def offload_states(self, include: Collection[StateKind] | None = None) -> None:
        """Move states of all prepared objects to pinned host memory, and free their memory on the device.

        An inference engine on the same devices can use it until `reload_states`. All tensors stay the same
        objects. A save in the background continues. Until states are back, what needs them raises a
        `RuntimeError`: forward passes and the weights need parameters, a backward pass gradients, too, and an
        optimizer's step all three. So weights can still be sent while gradients and optimizers are away. A
        parameter that is read otherwise has no memory. On the CPU no memory is moved.

        Gradients of micro-batches that FSDP2 has not reduced stay on the device.

        Args:
            include: Any of `"parameters"` (with buffers), `"gradients"` (with the buckets of DDP) and
                `"optimizer"`; all if `None`. Further calls add to these.

        Raises:
            SettingsError: `include` has another word.
            UnsupportedError: The strategy cannot, such as Megatron, XLA and stage 0 of DeepSpeed, whose
                engine moves its states only after a step.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> accelerator.offload_states()
            >>> model(torch.ones(2))
            Traceback (most recent call last):
            RuntimeError: a call of Linear needs states that offload_states() has moved to the host ...
            >>> accelerator.reload_states()
            >>> model(torch.ones(2)).shape
            torch.Size([1])
        """
        offload.offload(self, include)

    def reload_states(self, include: Collection[StateKind] | None = None) -> None:
        """Move states back to the device, bit for bit, without waiting for the copies.

        Args:
            include: Those to move back, as in `offload_states`; all that are away if `None`.

        Raises:
            SettingsError: `include` has another word.
        """
        offload.reload(self, include)

    split_batches: bool = _attribute_of("split_batches", "Whether each batch of a loader is sharded.")
    dispatch_batches: bool | None = _attribute_of(
        "dispatch_batches", "Whether the main process reads all batches; `None`: of iterable datasets only."
    )
    even_batches: bool = _attribute_of(
        "even_batches", "Whether all ranks get equally many samples; a change is for loaders prepared later."
    )
    use_seedable_sampler: bool = _attribute_of(
        "use_seedable_sampler", "Whether shuffling is drawn from a seed and the epoch alone."
    )
    non_blocking: bool = _attribute_of("non_blocking", "Whether batches are copied without waiting.")
    use_stateful_dataloader: bool = _attribute_of(
        "use_stateful_dataloader", "Whether loaders become torchdata's `StatefulDataLoader`."
    )

    _models: list[nn.Module] = _attribute_of("models", "The prepared models.", "_parts.prepared")
    _optimizers: list[AcceleratedOptimizer] = _attribute_of(
        "optimizers", "The prepared optimizers.", "_parts.prepared"
    )
    _schedulers: list[AcceleratedScheduler] = _attribute_of(
        "schedulers", "The prepared schedulers.", "_parts.prepared"
    )
    _dataloaders: list[Any] = _attribute_of("dataloaders", "The prepared loaders.", "_parts.prepared")

    # A training step.

    def backward(self, loss: Tensor, *, num_items: ItemCount | None = None, **kwargs: Any) -> None:
        """Compute gradients, scaled for accumulation and, with float16, for precision.

        Without `num_items`, the optimizer follows the mean of the micro-batches' losses, even if their
        numbers of items differ. With it, the optimizer follows the mean over all items of all micro-batches
        and processes: exactly the gradient of one large batch.

        Args:
            loss: The loss of one micro-batch, 0-d: its mean over the samples of this process; with
                `num_items` the sum over its items.
            num_items: How many items (tokens, samples) `loss` is the sum of; 0 or more, a number or a tensor
                of one element. The counts of all backward passes of a window add up: for several losses over
                the same items, pass the count with one of them and 0 with the others. Gradients are divided
                by the total when the window is complete.
            **kwargs: Passed to `Tensor.backward`; or `learning_rate`, as for `lomo_backward`.

        Raises:
            TypeError: The loss is not a tensor.
            ValueError: `num_items` is invalid, or was passed only in some backward passes of a window.
            UnsupportedError: The strategy cannot count items, or `num_items` was passed within
                `join_uneven_inputs` or with `learning_rate`.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> weight = torch.ones(1, requires_grad=True)
            >>> Accelerator(cpu=True).backward(3 * weight.sum())
            >>> weight.grad
            tensor([3.])
        """
        parts = self._parts
        state, accumulation = parts.gradient_state, parts.synchronizer.accumulation
        if state.accumulation is not accumulation:
            state.activate(accumulation)
        state.window.ran_backward = True
        if parts.meter is not None:
            parts.meter.count_batch()
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"backward({loss!r}): expected the loss as a tensor with gradients, not as item()."
            )
        if kwargs and "learning_rate" in kwargs:
            if num_items is not None:
                raise UnsupportedError(
                    f"backward(num_items={num_items!r}, learning_rate=…): Lomo steps in this call, so its "
                    "gradients cannot be divided by a number of items afterwards. Divide the loss."
                )
            self.lomo_backward(loss / state.num_steps, **kwargs)
            return
        if num_items is not None:
            parts.strategy.require(Feature.ITEM_COUNTS, "backward(num_items=…)")
            parts.items.add(num_items)
            sync = state.sync_gradients
            parts.backward(loss, accumulation=1, sync=sync, **kwargs)
            if sync and not parts.items.holds:
                parts.items.normalize()
            return
        if parts.items.is_open:
            raise ValueError(
                "backward() without num_items follows backward(num_items=…) before an optimizer step. "
                "Pass num_items with every loss of a step, and 0 for items that are already counted."
            )
        if kwargs:
            parts.backward(loss, accumulation=state.num_steps, sync=state.sync_gradients, **kwargs)
        else:  # a call with ** would cost more than the checks above
            parts.backward(loss, accumulation=state.num_steps, sync=state.sync_gradients)

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Compute gradients and step at once, as the optimizers Lomo and AdaLomo do.

        Args:
            loss: The loss, 0-d.
            learning_rate: The learning rate of this step.

        Raises:
            MissingDependencyError: lomo-optim is not installed.
            SettingsError: The learning rate is missing, or no such optimizer was prepared.
            UnsupportedError: There is a `StepGuard`.
        """
        parts = self._parts
        if StepGuard in parts.handlers:
            raise UnsupportedError(
                f"lomo_backward() with {parts.handlers[StepGuard]!r}: Lomo steps before all gradients are "
                "known. Remove one of the two."
            )
        fused_backward(parts.prepared.optimizers, parts.precision.scale(loss), learning_rate)
        if parts.preemption is not None:
            parts.preemption.count_optimizer_step()

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[None]:
        """Synchronise gradients in backward passes within the block, whose forward passes ran in `no_sync`.

        Use it for several forward passes followed by as many backward passes, if only the last one shall
        communicate.

        Args:
            model: A prepared model; with one process nothing happens.

        Raises:
            UnsupportedError: The model has `find_unused_parameters`, which works in the forward pass only.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> with accelerator.no_sync(model):
            ...     first, second = model(torch.ones(1)), model(torch.zeros(1))
            >>> accelerator.backward(first)
            >>> with accelerator.trigger_sync_in_backward(model):
            ...     accelerator.backward(second)
        """
        return sync_in_backward(model)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Run one of the `gradient_accumulation_steps` micro-batches of an optimizer step.

        Within it, prepared optimizers and schedulers act only if the micro-batch completes the step. The last
        micro-batch of a loader always does. Until then, gradients stay local.

        Args:
            *models: The models that are trained within the block.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            >>> weight = torch.nn.Parameter(torch.ones(1))
            >>> optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.5))
            >>> for _ in range(3):
            ...     with accelerator.accumulate():
            ...         accelerator.backward(weight.sum())
            ...         optimizer.step()
            ...         optimizer.zero_grad()
            ...         weight.item()
            1.0
            0.5
            0.5
        """
        parts = self._parts
        synchronizer = parts.synchronizer
        state = parts.gradient_state
        if state.accumulation is not synchronizer.accumulation:
            state.activate(synchronizer.accumulation)
        return synchronizer if state.num_steps == 1 else Accumulation(synchronizer, models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Keep the gradients of a model local in backward passes within the block.

        The next backward pass outside synchronises all of them.

        Args:
            model: A prepared model.
        """
        parts = self._parts
        return parts.items.hold(parts.synchronizer.local([model]))

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> Generator[None]:
        """Allow ranks to have different numbers of batches: a rank without batches still joins collectives.

        With `ProjectConfiguration(save_on_preemption=True)`, a notice is heeded at the end of the context.

        Args:
            joinables: The prepared models, and optimizers that are `torch.distributed` joinables. Several
                models each need a backward pass of their own, in this order.
            even_batches: Replaces the accelerator's `even_batches` within the context, for prepared loaders
                of map-style datasets.

        Raises:
            UnsupportedError: The strategy does not support uneven inputs, or there is a `StepGuard`.
        """
        parts = self._parts
        parts.strategy.require(Feature.UNEVEN_INPUTS, "join_uneven_inputs()")
        if parts.recipe is not None and parts.recipe.reduces_maxima and self.num_processes > 1:
            raise UnsupportedError(
                "join_uneven_inputs() with TERecipeKwargs(recipe='delayed'): this recipe reduces maxima over "
                "all ranks in each forward pass, and would wait for ranks without batches. Use "
                "recipe='current' or another, or even_batches=True."
            )
        if StepGuard in parts.handlers and self.num_processes > 1:
            raise UnsupportedError(
                f"join_uneven_inputs() with {parts.handlers[StepGuard]!r}: all ranks decide about each "
                "step, and would wait for ranks without batches. Use even_batches=True."
            )
        inner = [without_wrapper(joinable) for joinable in joinables]
        with (
            nullcontext() if parts.preemption is None else parts.preemption.postponed(),
            parts.items.refuse("join_uneven_inputs()"),
            override_even_batches(parts.prepared.dataloaders, even_batches),
            parts.strategy.join(inner),
        ):
            yield

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip gradients to a maximum total norm; use instead of `torch.nn.utils.clip_grad_norm_`.

        Args:
            parameters: Tensors with gradients.
            max_norm: The largest norm allowed.
            norm_type: The order of the norm; `float("inf")` for the largest absolute value.

        Returns:
            The norm before clipping, 0-d, the same on all processes.

        Raises:
            RuntimeError: A scaled loss is being accumulated, so the gradients are incomplete.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> weight = torch.nn.Parameter(torch.zeros(1))
            >>> weight.grad = torch.tensor([4.0])
            >>> Accelerator(cpu=True).clip_grad_norm_([weight], 1.0), weight.grad
            (tensor(4.), tensor([1.0000]))
        """
        parts = self._parts
        _check_parameters(parameters, "clip_grad_norm_")
        optimizers = self._normalized_optimizers("clip_grad_norm_()")
        return parts.strategy.clip_grad_norm(parameters, max_norm, norm_type, optimizers=optimizers)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp gradients; use instead of `torch.nn.utils.clip_grad_value_`.

        Args:
            parameters: Tensors with gradients.
            clip_value: The largest absolute value allowed.

        Raises:
            UnsupportedError: The strategy stores gradients in a form that cannot be clamped.
            RuntimeError: A scaled loss is being accumulated, so the gradients are incomplete.
        """
        what = "clip_grad_value_()"
        _check_parameters(parameters, "clip_grad_value_")
        strategy = self._parts.strategy
        strategy.require(Feature.CLIP_GRAD_VALUE, what)
        optimizers = self._normalized_optimizers(what)
        strategy.clip_grad_value(parameters, clip_value, optimizers=optimizers)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Divide gradients by the loss scale; only float16 has one.

        Args:
            optimizer: The optimizer, or optimizers, of these gradients; all prepared ones if `None`.

        Raises:
            RuntimeError: A scaled loss is being accumulated, so the gradients are incomplete.
        """
        known = self._normalized_optimizers("unscale_gradients()")
        if optimizer is not None:
            listed: Sequence[Any] = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
            known = [without_wrapper(wrapped) for wrapped in listed]
        self._parts.precision.unscale(known)

    @property
    def gradient_state(self) -> GradientState:
        """Whether gradients are synchronised, and which loader is active."""
        return self._parts.synchronizer.state

    @gradient_state.setter
    def gradient_state(self, gradient_state: GradientState) -> None:
        self._parts.gradient_state = gradient_state

    sync_gradients: bool = _attribute_of(
        "sync_gradients", "Whether gradients are synchronised now, so that optimizers step.", "gradient_state"
    )

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches that make one optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        state = self.gradient_state
        plugin = GradientAccumulationPlugin(num_steps=gradient_accumulation_steps)  # rejects invalid counts
        state.plugin_kwargs = {**state.plugin_kwargs, **plugin.to_kwargs()}
        state.num_steps = gradient_accumulation_steps

    step: int = _attribute_of("step", "Micro-batches since the last optimizer step.", "_parts.synchronizer")

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether a prepared optimizer skipped its last step because of its gradients."""
        return any(optimizer.step_was_skipped for optimizer in self._parts.prepared.optimizers)

    def _normalized_optimizers(self, what: str) -> list[Optimizer]:
        """Divide complete gradients by the counted items; return their optimizers."""
        parts = self._parts
        if parts.gradient_state.sync_gradients:
            parts.items.normalize()
        elif parts.precision.scaler is not None:
            raise RuntimeError(
                f"{what} was called while gradients are being accumulated: they are still scaled and "
                "incomplete. Call it only"
                " `if accelerator.sync_gradients:`."
            )
        return [optimizer.optimizer for optimizer in parts.prepared.optimizers]

    # Mixed precision, and the kwargs handlers.

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Run the block under autocast, in the mixed precision of the run.

        Args:
            autocast_handler: Options for this block; those of the accelerator if `None`.

        Raises:
            TypeError: `autocast_handler` has another type.
        """
        if not isinstance(autocast_handler, AutocastKwargs | None):
            raise TypeError(f"autocast({autocast_handler!r}): expected AutocastKwargs(enabled=…).")
        return self._parts.precision.autocast(autocast_handler)

    @property
    def mixed_precision(self) -> str:
        """`"no"`, `"fp16"`, `"bf16"` or `"fp8"`."""
        return self._parts.precision.name if self._parts.recipe is None else "fp8"

    @property
    def native_amp(self) -> bool:
        """Whether forward passes run in mixed precision by torch's autocast."""
        if self._native_amp is not None:
            return self._native_amp
        fp16 = self.mixed_precision == "fp16" and self.device.type != "cpu"
        return fp16 or self.mixed_precision == "bf16"

    @native_amp.setter
    def native_amp(self, native_amp: bool) -> None:
        self._parts.precision = switch_autocast(self._parts.precision, native_amp)
        self._native_amp = native_amp

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler, with float16."""
        return self._parts.precision.scaler

    @scaler.setter
    def scaler(self, scaler: GradScaler | None) -> None:
        switch_scaler(self._parts.precision, scaler)

    autocast_handler: AutocastKwargs | None = _handler(AutocastKwargs)
    scaler_handler: GradScalerKwargs | None = _handler(GradScalerKwargs)
    ddp_handler: DistributedDataParallelKwargs | None = _handler(
        DistributedDataParallelKwargs, "; `prepare` reads them"
    )
    init_handler: InitProcessGroupKwargs | None = _handler(InitProcessGroupKwargs)
    profile_handler: ProfileKwargs | None = _handler(ProfileKwargs)
    ao_recipe_handler: AORecipeKwargs | None = _handler(AORecipeKwargs)
    te_recipe_handler: TERecipeKwargs | None = _handler(TERecipeKwargs)
    msamp_recipe_handler: MSAMPRecipeKwargs | None = _handler(MSAMPRecipeKwargs)

    @property
    def fp8_recipe_handler(self) -> RecipeKwargs | None:
        """The FP8 recipe, if any; a change applies to models prepared later."""
        return self.ao_recipe_handler or self.te_recipe_handler or self.msamp_recipe_handler

    @fp8_recipe_handler.setter
    def fp8_recipe_handler(self, handler: RecipeKwargs | None) -> None:
        if handler is not self.fp8_recipe_handler:
            build.use_recipe_handler(self._parts, handler)

    # Results of all ranks.

    def gather(self, tensor: T) -> T:
        """Concatenate tensors of all processes along their first dimension, on every process.

        Args:
            tensor: A tensor, or nested lists, tuples and dicts of tensors; 0-d ones become one row each.
                First dimensions may differ between processes.

        Returns:
            The same structure, rows in the order of the processes.
        """
        return collectives.gather(tensor)

    def gather_for_metrics(
        self,
        input_data: T,
        use_gather_object: bool = False,
    ) -> T:
        """Gather the results of all processes for the batch that a prepared loader yielded last.

        Loaders pad the last batches so that all processes have equally many samples. These repeated samples
        are removed, so that every sample of the dataset occurs exactly once per epoch. Processes that compute
        parts of the same layers have the same samples, and only one of them counts. Of an incomplete last
        batch, at most as many rows are kept as it has samples.

        Args:
            input_data: Tensors as for `gather`, with one row per sample of the batch; 0-d ones are gathered
                as they are. Or a list or plain tuple with one object per sample. A named tuple, a tuple of
                containers, and a list of tensors and other objects are treated as fields.
            use_gather_object: Gather as objects even if there are only tensors.

        Returns:
            Tensors gathered as by `gather`, or the objects of all processes in one list. With a single
            process, the objects unchanged.

        Raises:
            ValueError: There is padding in the batch, and `input_data` is neither tensors nor one object per
                sample.
            DistributedOperationException: The same error on another process, or the data of the processes
                does not match.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(range(5), batch_size=2))
            >>> torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
            tensor([0, 1, 2, 3, 4])
        """
        parts = self._parts
        sharding, replicas = parts.strategy.sharding, parts.strategy.replicas
        if replicas is not None:
            logger.warning_once(
                "gather_for_metrics() covers only the samples of %s, not those of other groups.",
                replicas.covers,
            )
        return gather_real(
            input_data,
            parts.gradient_state.active_dataloader,
            as_objects=use_gather_object,
            repeats=sharding.repeats if sharding.num_shards < self.num_processes else None,
        )

    def reduce(self, tensor: T, reduction: Literal["sum", "mean", "none"] = "sum", scale: float = 1.0) -> T:
        """Combine tensors of all processes, element by element, on every process.

        Args:
            tensor: A tensor or nested tensors, of the same shapes on all processes.
            reduction: `"sum"`, `"mean"` or `"none"`.
            scale: The factor of the result.
        """
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self,
        tensor: T,
        dim: int = 0,
        pad_index: int = 0,
        pad_first: bool = False,
    ) -> T:
        """Pad the tensors of all processes to the same length along a dimension.

        Args:
            tensor: A tensor or nested tensors.
            dim: The dimension to pad.
            pad_index: The value to pad with.
            pad_first: Whether to pad at the beginning instead of the end.
        """
        return pad.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    # Checkpoints and weights.

    @overload
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: Literal[True] = True,
        flush: bool | None = None,
        **save_model_func_kwargs: Any,
    ) -> str: ...

    @overload
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool,
        flush: bool | None = None,
        **save_model_func_kwargs: Any,
    ) -> str | Saving: ...

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        flush: bool | None = None,
        **save_model_func_kwargs: Any,
    ) -> str | Saving:
        """Save models, optimizers, schedulers, positions of data loaders, random numbers, registered objects.

        The checkpoint is written to a staging folder, and committed when every rank has written its files: it
        is complete or absent. Call it on every rank. If nothing is sharded, rank 0 may save alone, with a
        warning, once the others seem not to participate; one that comes later continues with a warning.

        Args:
            output_dir: The folder, or its fsspec URL, such as `"s3://bucket/run"`. The files of a
                checkpoint in it are replaced, all at once; other files remain. Not used if checkpoints are
                numbered (`ProjectConfiguration(automatic_checkpoint_naming=True)`).
            safe_serialization: Write weights as safetensors; else as `torch.save` does.
            blocking: Return when the checkpoint is committed. Otherwise return as soon as everything is
                copied to host memory, which is kept for the next time, and write in the background. The next
                save, `load_state`, `end_training` and the end of the program wait for it, and raise what went
                wrong.
            flush: Commit the checkpoint only when it is on disk, so that it survives a crash of the machine.
                Otherwise it only survives the death of processes. If `None`, the value of
                `ProjectConfiguration(durable=…)`, which is true by default.
            **save_model_func_kwargs: Unused: no strategy of this version has such options.

        Returns:
            The folder; if not `blocking`, a handle with `wait()`, `done` and `path`.

        Raises:
            SettingsError: No folder is given, or a checkpoint of this number or a larger one exists already.
            CheckpointWriteError: A process could not write, for example because the disk is full. Older
                checkpoints remain.
            DistributedOperationException: It was not called on every process (unless rank 0 may save alone),
                or not with the same arguments.
            TypeError: An unknown argument was given.

        Example:
            >>> import tempfile, torch
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = accelerator.save_state(f"{folder}/here", flush=False)
            ...     accelerator.load_state(path)
        """
        if save_model_func_kwargs:
            names = ", ".join(sorted(save_model_func_kwargs))
            raise TypeError(
                f"save_state() got {names}, which the strategy {self._parts.strategy.name!r} does not support"
            )
        saving = checkpoint.save.save(
            self._parts.checkpoints,
            output_dir,
            safe=safe_serialization,
            blocking=blocking,
            to_disk=self.project_configuration.durable if flush is None else flush,
        )
        return saving.path if blocking else saving

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        verify: bool = True,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a checkpoint of `save_state`, with any number of processes. Call it on every process.

        The runs of trackers are resumed. A warning lists the objects that are not restored. No code in a file
        is executed: of `torch.save` files, only tensors, arrays of numbers and plain containers are read.

        Args:
            input_dir: The folder or its fsspec URL; if `None`, the newest complete numbered checkpoint.
            load_kwargs: More arguments of `torch.load`.
            verify: Compare the checksums of all files before anything changes, for which the ranks read each
                file once more. Otherwise only their sizes are compared.
            **load_model_func_kwargs: More arguments of `Module.load_state_dict`, such as `strict=False`; and
                `map_location`, where the states of optimizers are read to first: `"cpu"`, `"on_device"` or a
                device.

        Raises:
            SettingsError: No folder is given, and checkpoints are not numbered.
            TypeError: `map_location` is no device.
            CheckpointError: There is no complete checkpoint, or it does not match the prepared objects.
            DistributedOperationException: It was not called on every process, or not with the same arguments.
        """
        folder = checkpoint.load.load(
            self._parts.checkpoints,
            input_dir,
            options=load_kwargs or {},
            model_options=load_model_func_kwargs,
            verify=verify,
        )
        _resume_runs(self._parts.trackers, folder)

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a numbered checkpoint for `load_state()` to resume from. Read it on every rank.

        Example:
            >>> from accel_train import Accelerator
            >>> Accelerator(cpu=True).has_checkpoint
            False
        """
        return checkpoint.load.has_checkpoint(self._parts.checkpoints)

    save_iteration: int = _read_only("project_configuration.iteration", "The number of the next checkpoint.")

    def exit_if_preempted(self) -> None:
        """Save and exit if the job is preempted; otherwise do nothing. Call it on every rank.

        With `ProjectConfiguration(save_on_preemption=True)`. Loops over prepared loaders need no call: their
        step ends when the next batch is asked for after an optimizer step, and with the last batch. Where
        batches come from elsewhere, call it at the end of each step.

        Raises:
            SystemExit: A checkpoint was saved on all ranks; the exit code is 143.

        Example:
            >>> from accel_train import Accelerator
            >>> Accelerator(cpu=True).exit_if_preempted()
        """
        if self._parts.preemption is not None:
            self._parts.preemption.end_step()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Register further objects for `save_state` and `load_state`.

        Args:
            *objects: Each with `state_dict` and `load_state_dict`. The order counts.

        Raises:
            ValueError: An object lacks one of these methods.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> Accelerator(cpu=True).register_for_checkpointing(torch.nn.BatchNorm1d(2))
        """
        unfit = [
            f"\n\t- Item at index {index}, `{type(item).__name__}`"
            for index, item in enumerate(objects)
            if not all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict"))
        ]
        if unfit:
            raise ValueError(
                "All `objects` must include a `state_dict` and `load_state_dict` function to be stored. The "
                "following inputs are invalid:" + "".join(unfit)
            )
        self._parts.checkpoints.custom.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call a function before `save_state` writes.

        Args:
            hook: Called as `hook(models, weights, output_dir)` on every process, with the prepared models
                without their wrappers, their state dicts, and the staging folder in which the checkpoint is
                written. Files that it writes there become part of the checkpoint, unless `save_state` writes
                files of the same names. Weights that it removes from `weights` are not saved.

        Returns:
            A handle whose `remove()` undoes it.
        """
        return _register(self._parts.checkpoints.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call a function before `load_state` loads.

        Args:
            hook: Called as `hook(models, input_dir)` on every process, with a list of the prepared models
                without their wrappers, and the folder of the checkpoint. Models that it removes from `models`
                are not loaded.

        Returns:
            A handle whose `remove()` undoes it.
        """
        return _register(self._parts.checkpoints.load_hooks, hook)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
        safe_serialization: bool = True,
        *,
        names: Literal["hub", "model"] = "hub",
    ) -> None:
        """Save the weights of a model in the format that other libraries load. Call it on every process.

        Of a sharded model, the process that writes holds no more than one file at a time.
        Offloaded weights are included, even if they are saved into the folder from which they are mapped.

        Args:
            model: Prepared or not.
            save_directory: The folder, created if absent, or its fsspec URL.
            max_shard_size: The largest size of a file, in bytes or as `"5GB"`; a larger model gets several
                files and an index. A tensor larger than that has a file of its own.
            safe_serialization: Write safetensors; else as `torch.save` does.
            names: `"hub"` for the names and layouts of the Hub where transformers 5 converts a model while it
                loads it (one tensor per expert), as `save_pretrained` writes; `"model"` for those in memory.

        Raises:
            TypeError: `model` is not a module.
            SettingsError: `save_directory` is a URL with a scheme that fsspec does not know; or `names` is
                another word.
            FileExistsError: `save_directory` is a file; raised on every process.

        Example:
            >>> import os, tempfile, torch
            >>> from accel_train import Accelerator
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     Accelerator(cpu=True).save_model(torch.nn.Linear(2, 1), folder)
            ...     os.listdir(folder)
            ['model.safetensors']
        """
        _expect_model(model, "save_model")
        folder = any_path(save_directory, "save_model(save_directory)")
        if isinstance(folder, Path):
            folder.mkdir(parents=True, exist_ok=True)  # on every rank, so that each can list it at once
        parts = self._parts
        commits = parts.checkpoints.commits
        parts.checkpoints.meet("save_model()")
        tensors = parts.strategy.states.iter_full_state_dict(model, keep=commits)
        if getattr(self.get_state_dict, "__func__", None) is not _GET_STATE_DICT:
            tensors, names = iter([self.get_state_dict(model)]), "model"  # overridden by the program
        loaded = _with_hub_names(model, names, (with_offloaded_weights(part, model) for part in tensors))
        try:
            if commits:
                weights.write.save_state_dict(
                    loaded,
                    folder,
                    max_shard_size=max_shard_size,
                    safe_serialization=safe_serialization,
                )
        finally:
            deque(tensors, maxlen=0)  # each remaining tensor is a collective that the other ranks wait in

    def named_full_parameters(
        self,
        model: nn.Module | None = None,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        to_main_only: bool = False,
        merge_adapters: bool = False,
        names: Literal["hub", "model"] = "hub",
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and full parameters of a model bucket by bucket, as for an inference engine.

        Call it on every process, and iterate to the end on each: every bucket is a collective, and the order
        is the same everywhere. Tensors are on the device of the run, and bit for bit those of
        `get_state_dict`; tied weights come under all their names. Buffers are not among them. Beyond the
        shards this takes the memory of a bucket, and of a second one while tensors of the bucket before are
        held; a larger parameter is a bucket of its own. Where every process has full parameters, there is no
        collective and no bucket: the parameters themselves are yielded, detached but not copied.
        Megatron gathers one of its weights at a time.

        Args:
            model: Prepared or not; if `None`, the only one that was prepared.
            dtype: To which floating-point parameters are converted before they are gathered, such as
                `torch.bfloat16`; their own if `None`.
            bucket_bytes: Size of a bucket in bytes.
            to_main_only: Yield tensors on the main process alone; on others the iteration yields nothing. It
                halves the traffic.
            merge_adapters: Add LoRA adapters of peft to their weights, and use the names of the base model,
                as `merge_and_unload` does. The model stays as it is. The matrices of all adapters are
                gathered first, and buckets have the dtype of the model.
            names: As in `save_model`. Tensors that are converted together are held until the last has come.

        Returns:
            An iterator over `(name, tensor)`.

        Raises:
            SettingsError: `model` is `None`, and not exactly one model is prepared; or an argument is not a
                valid size or floating-point dtype.
            TypeError: `model` is not a module.
            UnsupportedError: No adapters can be merged, or the weights of a Megatron model have no names in
                transformers.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> for name, tensor in accelerator.named_full_parameters(dtype=torch.bfloat16):
            ...     print(name, tuple(tensor.shape), tensor.dtype)
            weight (1, 2) torch.bfloat16
            bias (1,) torch.bfloat16
        """
        return iter(
            self.weight_source(
                model,
                dtype=dtype,
                bucket_bytes=bucket_bytes,
                to_main_only=to_main_only,
                merge_adapters=merge_adapters,
                names=names,
            )
        )

    def weight_source(
        self,
        model: nn.Module | None = None,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        to_main_only: bool = False,
        merge_adapters: bool = False,
        names: Literal["hub", "model"] = "hub",
        track_changes: bool = False,
    ) -> WeightSource:
        """Return a source of the full parameters of a model, which an inference engine gets again and again.

        Its `metadata()` names what will come without reading a weight; each iteration yields the parameters
        as they are then; `changes()` yields only the elements that changed since the last time.

        Args:
            model: As in `named_full_parameters`, like the next five.
            dtype: To which floating-point parameters are converted.
            bucket_bytes: Size of a bucket in bytes.
            to_main_only: Yield tensors on the main process alone.
            merge_adapters: Add LoRA adapters to their weights.
            names: `"hub"` or `"model"`.
            track_changes: Keep a copy of what was sent of this rank's shards, in the dtype in which it is
                sent, in host memory: `changes()` compares with it. A rank whose parameters are not sharded
                has a copy if it gets tensors.

        Raises:
            SettingsError, TypeError, UnsupportedError: As of `named_full_parameters`; and for changes of
                merged adapters, whose weights no rank has, of ZeRO stage 3 and of pipeline stages.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
            >>> source = accelerator.weight_source(track_changes=True)
            >>> [(spec.name, spec.shape) for spec in source.metadata()]
            [('weight', (1, 2)), ('bias', (1,))]
            >>> sent = {name: tensor.clone() for name, tensor in source}
            >>> with torch.no_grad():
            ...     _ = model.weight[0, 1].fill_(7)
            >>> [(patch.name, patch.indices, patch.values) for patch in source.changes()]
            [('weight', tensor([1], dtype=torch.int32), tensor([7.]))]
        """
        prepared, states = self._parts.checkpoints.prepared.models, self._parts.strategy.states
        if model is None and len(prepared) != 1:
            raise SettingsError(
                f"named_full_parameters() needs a model, since {len(prepared)} models are prepared: "
                "pass one of them."
            )
        unwrapped: nn.Module = prepared[0] if model is None else model
        _expect_model(unwrapped, "named_full_parameters")
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise SettingsError(f"bucket_bytes={bucket_bytes!r} is not a positive number of bytes.")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise SettingsError(f"dtype={dtype!r} is not a floating-point dtype such as torch.bfloat16.")
        if merge_adapters and track_changes:
            raise UnsupportedError(
                "weight_source(merge_adapters=True, track_changes=True): no rank has shards of merged "
                "weights to compare. Send the adapters alone, or all weights."
            )
        if names not in {"hub", "model"}:
            raise SettingsError(f'names={names!r} is neither "hub" nor "model"')
        if track_changes:
            states.sources(unwrapped)  # raises where there are none

        def sources() -> Sequence[ParameterSource]:
            offload.require(self._parts.strategy, "changes()", {"parameters"})
            return states.sources(unwrapped)

        def stream(request: FullParameters) -> Iterator[dict[str, Tensor]]:
            if request.values:
                offload.require(self._parts.strategy, "an iteration over weights", {"parameters"})
            iterate = partial(states.iter_full_parameters, unwrapped)
            if merge_adapters:
                tensors = sharding.adapters.iter_merged(unwrapped, request, iterate)
            else:
                tensors = iterate(request)
            if not request.values:
                return ({name: tensor} for name, tensor in tensors)
            return (
                {name: with_offloaded_weights({name: tensor}, unwrapped)[name].to(tensor.dtype)}
                for name, tensor in tensors
            )

        return WeightSource(
            stream,
            partial(_with_hub_names, unwrapped, names, merged=merge_adapters),
            FullParameters(
                bucket_bytes=bucket_bytes,
                dtype=dtype,
                keep=not to_main_only or self._parts.runtime.topology.is_main,
                is_reduced=to_main_only,
            ),
            sources if track_changes else None,
            self.device,
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Gather the full state dict of a model. Call it on every process.

        The state dict of a sharded model is gathered on the CPU of the main process (with
        `save_on_each_node`, of the first process of every node), and is empty on the others.

        Args:
            model: Prepared or not.
            unwrap: Whether to use the names of the unwrapped model.

        Raises:
            TypeError: `model` is not a module.
        """
        _expect_model(model, "get_state_dict")
        self._parts.checkpoints.meet("get_state_dict()")
        if not unwrap:
            return model.state_dict()
        state = self._parts.strategy.states.full_state_dict(model, keep=self._parts.checkpoints.commits)
        return with_offloaded_weights(state, model)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Save an object on the main process; on one of every host with `save_on_each_node`.

        Args:
            obj: Any object for `torch.save`; with `safe_serialization`, a dictionary of tensors.
            f: The file, replaced when the new one is complete.
            safe_serialization: Write safetensors; else as `torch.save` does.
        """
        weights.write.save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def skip_first_batches(self, dataloader: DataLoader[T], num_batches: int = 0) -> PreparedLoader[T]:
        """Return a loader that skips batches in its next epoch; later epochs are complete.

        Args:
            dataloader: Prepared or not.
            num_batches: Number of batches of this rank to skip.
        """
        return skip_first_batches(dataloader, num_batches)

    _custom_objects: list[Any] = _attribute_of("custom", "The registered objects.", "_parts.checkpoints")
    _save_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = _attribute_of(
        "save_hooks", "The hooks before saving.", "_parts.checkpoints"
    )
    _load_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = _attribute_of(
        "load_hooks", "The hooks before loading.", "_parts.checkpoints"
    )

    # Trackers: call methods on any process; only the main process logs.

    @property
    def log_with(self) -> list[str | GeneralTracker]:
        """The trackers of `Accelerator(log_with=…)`; `init_trackers` also starts trackers assigned here."""
        return self._parts.trackers.log_with

    @log_with.setter
    def log_with(self, log_with: Trackers | None) -> None:
        self._parts.trackers.logging_dir = self.project_configuration.logging_dir
        self._parts.trackers.choose(log_with)

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers, after `init_trackers`; on other ranks, placeholders that do nothing."""
        return self._parts.trackers.trackers

    @trackers.setter
    def trackers(self, trackers: list[GeneralTracker]) -> None:
        self._parts.trackers.use(trackers)

    def init_trackers(
        self,
        project_name: str,
        config: Any = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start every tracker of `log_with`, and store hyperparameters.

        It may be called on the main process alone, unless a custom tracker logs on every process.
        After `load_state`, the runs that the checkpoint names are resumed. Runs of an earlier `init_trackers`
        are finished first.

        Args:
            project_name: Name of the project, or of the run if a tracker has no projects.
            config: Hyperparameters: a dictionary, a dataclass or an argparse namespace. It is not changed.
            init_kwargs: More arguments for a tracker's construction, by its name, such as
                `{"wandb": {"name": "baseline"}}`.

        Raises:
            SettingsError: `config` has another type.
            Exception: The error of a tracker, with `on_tracker_error="raise"`.

        Example:
            >>> import tempfile
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.init_trackers("digits", config={"lr": 0.1})
            >>> accelerator.log({"loss": 0.5}, step=1)
            >>> accelerator.end_training()
        """
        trackers, checkpoints = self._parts.trackers, self._parts.checkpoints
        trackers.logging_dir = self.project_configuration.logging_dir  # read now: scripts may have changed it
        trackers.start(project_name, config, init_kwargs)

        # `save_state` flushes logged values, and writes the ids of the runs.
        def save(models: Any, weights: Any, folder: str | os.PathLike[str]) -> None:
            del models, weights
            trackers.write()
            run_ids = trackers.run_ids()
            if run_ids and checkpoints.rank == 0:
                (Path(folder) / checkpoint.layout.TRACKERS_NAME).write_text(json.dumps(run_ids))

        checkpoints.save_hooks[-1] = save  # a key that no user's hook has: those are not negative

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values with every tracker; do nothing without trackers.

        It does not wait for a device: tensors there are copied on the side and written by a later call, in
        order, by `save_state`, by `end_training`, or at the end of the program, also by an exception. Every
        ten seconds a call lets the trackers flush. With `log_system_metrics=True`, the metrics measured
        since the last call are added.

        Args:
            values: By name: numbers, strings, tensors, dictionaries of these, and library-specific objects.
                Tensors with several elements become histograms if the library supports them. Unsupported
                values are skipped, with one warning for each name.
            step: The step.
            log_kwargs: More arguments of a tracker's `log`, by its name.

        Raises:
            TrackerError: It was called before `init_trackers`, after `end_training`, or in a process forked
                from the one that called `init_trackers`.
            UnsupportedError: `values` is not a dictionary.
            Exception: The error of a tracker, with `on_tracker_error="raise"`.
        """
        parts = self._parts
        if parts.meter is not None and isinstance(values, Mapping):
            values = {**parts.meter.read(), **values}
        parts.trackers.log(values, step, log_kwargs)

    @overload
    def get_tracker(self, name: str, unwrap: Literal[False] = ...) -> GeneralTracker: ...

    @overload
    def get_tracker(self, name: str, unwrap: bool) -> Any: ...

    def get_tracker(self, name: str, unwrap: bool = False) -> GeneralTracker | Any:
        """Find a tracker, to call its own methods such as `log_images`.

        Args:
            name: Its name.
            unwrap: Whether to return the library's own object, such as the run of wandb.

        Returns:
            The tracker. On other ranks, and without trackers, a placeholder that does nothing.

        Raises:
            SettingsError: There are trackers, but none with that name.
        """
        return self._parts.trackers.get(name, unwrap=unwrap)

    def end_training(self) -> None:
        """Wait for a save in the background, finish the trackers, and destroy the process group.

        Call it last in a program. Without trackers and with one process it does nothing else. While an
        exception propagates, as in `finally`, it does not wait for ranks that do not respond, except a minute
        for one whose part of a save is missing.

        Raises:
            CheckpointWriteError: The state that is saved in the background could not be written.
            Exception: The error of a tracker, with `on_tracker_error="raise"`.
        """
        if self._parts.preemption is not None:
            self._parts.preemption.uninstall()
        try:
            self._parts.checkpoints.finish()
        finally:
            try:
                self._parts.trackers.finish()
            finally:
                self._partial_state.destroy_process_group()

    # The device mesh, and the coordinates of this rank on it.

    parallelism_config: ParallelismConfig | None = _read_only(
        "state.parallelism_config", "The sizes of the mesh axes."
    )
    deepspeed_plugin: DeepSpeedPlugin | None = _read_only(
        "state.deepspeed_plugin", "The active DeepSpeed plugin; `None` if DeepSpeed is not used."
    )

    @property
    def deepspeed_engine_wrapped(self) -> DeepSpeedEngineWrapper | None:
        """The wrapper of the first model's DeepSpeed engine; `None` without one."""
        models = self._parts.prepared.models
        return self._parts.strategy.engine_of(models[0]) if models else None

    torch_device_mesh: DeviceMesh | None = _read_only(
        "_parts.strategy.mesh",
        "The device mesh of this run; `None` where models are replicated on all ranks.",
    )
    is_fsdp2: bool = _read_only("state.is_fsdp2", "Whether models are sharded by `fully_shard`.")

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether parameters are `DTensor`s, which allows combining several kinds of parallelism."""
        return self._parts.strategy.mesh is not None

    tensor_parallel_rank: int = _rank_along("tp", "The tensor-parallel rank; 0 without tensor parallelism.")
    context_parallel_rank: int = _rank_along("cp", "The context-parallel rank; 0 without one.")
    data_parallel_shard_rank: int = _rank_along("dp_shard", "The rank among the shards of a replica.")
    pipeline_parallel_rank: int = _rank_along("pp", "The pipeline-parallel rank; 0 without pipelines.")

    @property
    def data_parallel_rank(self) -> int:
        """The data-parallel rank among the replicas; 0 with one replica."""
        parts = self._parts
        if parts.strategy.mesh is None:
            return parts.strategy.sharding.shard_index
        return _rank_on(parts.strategy.mesh, "dp_replicate")

    @property
    def should_save_model(self) -> bool:
        """Whether this rank belongs to the first replica, which is the one that is saved."""
        parts = self._parts
        if parts.strategy.mesh is None:
            return self.is_main_process
        return _rank_on(parts.strategy.mesh, "dp_replicate") == 0

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Shard sequences within the block under context parallelism; otherwise do nothing.

        Scaled-dot-product attention within it sees full sequences although every rank has a shard of them.

        Args:
            buffers: Tensors with a sequence dim, such as the inputs, labels and positions of a batch. They
                are cut to this rank's shard in place.
            buffer_seq_dims: The sequence dim of each.
            no_restore_buffers: Buffers that are not needed afterwards; the others are restored to full
                sequences.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> tokens = torch.arange(8).reshape(1, 8)
            >>> with Accelerator(cpu=True).maybe_context_parallel([tokens], [1], {tokens}):
            ...     tokens.shape
            torch.Size([1, 8])
        """
        split = self._parts.strategy.split_sequences
        if own := vars(self).get("_cp_context"):  # A program's own `_prepare_cp` sets it.
            return own(
                buffers=buffers, buffer_seq_dims=buffer_seq_dims, no_restore_buffers=no_restore_buffers
            )
        if split is None:
            return nullcontext()
        return split(buffers or [], buffer_seq_dims or [], no_restore_buffers or set())

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: nn.Module) -> Any:
        """Make a loader shard the sequences of its batches under Ulysses.

        `prepare` does so for loaders that are passed together with the model.

        Args:
            dl: A prepared loader, which is changed and returned. Under DeepSpeed, also any other iterable of
                dictionaries of tensors, different on every process, which DeepSpeed's
                `UlyssesSPDataLoaderAdapter` reads: the batches of the sequence-parallel ranks are used one
                after the other.
            model: The prepared model.

        Returns:
            A loader of this rank's shards; `dl` itself in other runs.

        Raises:
            SettingsError: The model is not prepared, or without DeepSpeed the loader.
        """
        parts = self._parts
        shard_sequences = parts.strategy.shard_sequences
        if shard_sequences is None:
            return dl
        if model not in parts.prepared:
            raise SettingsError(
                f"deepspeed_ulysses_dl_adapter(): {type(model).__name__} is not prepared. Pass the "
                "result of prepare()."
            )
        if isinstance(dl, PreparedLoader):
            dl.shard_sequences = shard_sequences
            return dl
        return parts.strategy.adapt_loader(dl)

    # The project, profiling, and the object's `repr`.

    project_configuration: ProjectConfiguration = _attribute_of(
        "project", "Directories, and how checkpoints are named and kept.", "_parts.checkpoints"
    )

    project_dir: str | Path | None = _read_only(
        "project_configuration.project_dir", "Directory of the project's files."
    )
    logging_dir: str | Path | None = _read_only(
        "project_configuration.logging_dir", "Directory of the trackers' files."
    )

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[profile]:
        """Record the block with `torch.profiler`.

        With `output_trace_dir`, every process writes a Chrome trace `profile_<rank>.json` there, and one
        `profile_<rank>_<n>.json` for every further cycle of `schedule_option`.

        Args:
            profile_handler: The options; the accelerator's `ProfileKwargs` if `None`.

        Raises:
            SettingsError: The profiler cannot be built with the handler's options.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> with Accelerator(cpu=True).profile() as profiler:
            ...     _ = torch.ones(2) + 1
            >>> any("add" in event.key for event in profiler.key_averages())
            True
        """
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        return accel_train.profiling.profiling(handler, self._parts.runtime)

    def __repr__(self) -> str:
        return f"Accelerator({', '.join(f'{name}={value!r}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        rows = [(name.replace("_", " "), value) for name, value in self._facts().items()]
        return html_table(rows, title="Accelerator")

    def _facts(self) -> dict[str, str | int]:
        if "_parts" not in vars(self):  # the constructor failed, and a traceback shows the object
            return {}
        return {
            "device": str(self.device),
            "process_index": self.process_index,
            "num_processes": self.num_processes,
            "distributed_type": self.state.distributed_type.value,
            "mixed_precision": self.state.mixed_precision,
            "gradient_accumulation_steps": self._parts.synchronizer.state.num_steps,
        }

    # Private methods of Accelerate's class that programs replace. Each takes the arguments of `prepare` and
    # returns them partly prepared; of one that is replaced, `prepare` leaves out its part.

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        """Set up models for context parallelism."""
        for model in (arg for arg in args if isinstance(arg, nn.Module)):
            self._parts.strategy.prepare_sequences(without_compiler(model))
        return args

    def _prepare_fsdp2(self, *args: Any) -> list[Any]:
        """Prepare all arguments: models are sharded."""
        return prepare_all(self, args, replaced={*self._replaced_methods()} - {"_prepare_fsdp2"})

    def _replaced_methods(self) -> list[str]:
        """Return those of the methods above that a program has replaced, if Accelerate would call them."""
        own, kind = vars(self), type(self)
        replaced: list[str] = []
        if "_prepare_cp" in own or kind._prepare_cp is not _PREPARE_CP:
            replaced += ["_prepare_cp"] if self._parts.strategy.split_sequences is not None else []
        if "_prepare_fsdp2" in own or kind._prepare_fsdp2 is not _PREPARE_FSDP2:
            replaced += ["_prepare_fsdp2"] if self.state.is_fsdp2 else []
        return replaced


# They stay the originals if a program replaces the methods.
_PREPARE_CP, _PREPARE_FSDP2 = Accelerator._prepare_cp, Accelerator._prepare_fsdp2
_GET_STATE_DICT = Accelerator.get_state_dict


def _register(hooks: Any, hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _expect_model(model: object, name: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{name}() takes a model, prepared or not, but got an object of type {type(model).__name__!r}: "
            "pass the torch.nn.Module itself."
        )


def _with_hub_names(
    model: nn.Module, names: str, parts: Iterable[Mapping[str, Tensor]], *, merged: bool = False
) -> Iterable[Mapping[str, Tensor]]:
    """Return parts of the state dict of a model, or of that below its adapters, with the names asked for."""
    if names == "model":
        return parts
    if names != "hub":
        raise SettingsError(f'names={names!r} is neither "hub" nor "model"')
    core: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    if merged and hasattr(core, "get_base_model"):
        core = core.get_base_model()
    own = chain(core.named_parameters(remove_duplicate=False), core.named_buffers(remove_duplicate=False))
    in_model = (sharding.state.strip_wrapper_prefixes(name) for name, _ in own)
    return weights.hub_names.to_hub(core, in_model, parts)


def _check_parameters(parameters: object, name: str) -> None:
    if not isinstance(parameters, Iterable):  # a tensor is iterable, too
        raise TypeError(
            f"{name}({parameters!r}, …): expected one or more tensors, such as model.parameters()."
        )


def _resume_runs(trackers: TrackerSession, folder: AnyPath) -> None:
    """Resume the runs whose ids are in a checkpoint, on the main process."""
    file = folder / checkpoint.layout.TRACKERS_NAME
    if not (trackers.log_with and current_topology().is_main and file.exists()):
        return
    try:
        read: Any = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(
            f"{file} is damaged: {error}. Load another checkpoint, or remove this file."
        ) from error
    if not isinstance(read, dict) or not all(isinstance(value, str) for value in read.values()):
        raise CheckpointError(
            f"{file} contains no run ids by tracker. Load another checkpoint, or remove this file."
        )
    trackers.resume(read)
