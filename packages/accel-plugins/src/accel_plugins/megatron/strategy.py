"""The strategy `megatron`: process groups, model wrapper and stepper of Megatron's engine."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_ops.modules import unwrap_once
from accel_plugins.kwargs import GradScalerKwargs
from accel_plugins.megatron.data import (
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    with_all_micro_batches,
    with_real_loaders,
)
from accel_plugins.megatron.engine import MegatronEngine
from accel_plugins.megatron.families import find_family
from accel_plugins.megatron.generate import generate
from accel_plugins.megatron.library import (
    ENGINE_EXTRA,
    check_device,
    core,
    load_library,
    uses_transformer_engine,
    without_core_warnings,
)
from accel_plugins.megatron.optimizer import (
    MegatronSchedule,
    check_other_args,
    clip,
    copy_hyperparameters,
    ddp_config,
    group_of,
    load_scaler_state,
    make_optimizer,
    scaler_state,
    transformer_config,
)
from accel_plugins.megatron.plugin import MegatronLMPlugin, check_model, optimizer_args
from accel_plugins.megatron.stages import build_stages
from accel_plugins.megatron.state import MegatronStates, drop_values, find_rows, load, share_values
from accel_plugins.megatron.train_steps import train_step_of
from accel_plugins.optimizer import AcceleratedScheduler
from accel_plugins.parallelism.config import mesh_of
from accel_plugins.precision import EnginePrecision
from accel_plugins.sharding.state import StateForm
from accel_plugins.strategy import BatchSharding, Bundle, Feature, Optimizers, Parameters, Strategy
from accel_plugins.unsharded import check_materialised
from accel_state import process_group
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.frozen import frozen
from accel_state.libraries import require
from accel_state.torch_private import process_groups


def batch_sharding(plugin: MegatronLMPlugin, groups: Groups) -> BatchSharding:
    """Shard batches across replicas; every rank's batch has all micro-batches."""
    return BatchSharding(
        num_shards=groups.data,
        shard_index=groups.data_rank,
        repeats=groups.repeats,
        micro_batches=plugin.num_micro_batches or 1,
    )


class MegatronStrategy(Strategy):
    """Build this rank's stages and Megatron's optimizer; its engine computes gradients and steps."""

    name = "megatron"
    owns_forward = True
    features = frozenset(
        {Feature.LOADERS_FROM_CONFIGURATION, Feature.NO_SYNC, Feature.OPTIMIZER_FROM_CONFIGURATION}
    )

    def setup(self) -> None:
        runtime, handlers = self.runtime, self.handlers
        # 1. Import the library, and check the plugin and its groups.
        load_library("the strategy 'megatron'")
        plugin: MegatronLMPlugin = handlers.get(MegatronLMPlugin) or MegatronLMPlugin()
        if plugin.use_precision_aware_optimizer:
            what = "MegatronLMPlugin(use_precision_aware_optimizer=True)"
            require("transformer_engine", what, install=ENGINE_EXTRA)
        plugin.set_mixed_precision(AcceleratorState().mixed_precision)  # It refuses recipes.
        groups = groups_of(plugin, runtime.topology.world_size, runtime.topology.rank)
        process_group.join_single(runtime.kind.backend, runtime.device)
        unwrap_once.register(MegatronEngine, lambda engine: engine.source)
        # 2. Set the parts.
        self.plugin, self.groups = plugin, groups
        self._trained: MegatronEngine | None = None
        self._is_ready = False  # Gradients are unscaled, and finite.
        self._schedules: list[MegatronSchedule] = []
        self.clipping, self.scaling = plugin.gradient_clipping or 0.0, handlers.get(GradScalerKwargs)
        self.states = MegatronStates(runtime.device, lambda: StateForm.SHARDED)
        self.sharding, self.mesh = batch_sharding(plugin, groups), mesh_of(runtime.device.type, groups.axes)
        self.precision = EnginePrecision(
            name=self.precision.name,
            device_type=runtime.device.type,
            read_scale=lambda: {} if self._trained is None else scaler_state(self._trained.optimizer),
            write_scale=lambda state: load_scaler_state(self.engine.optimizer, state),
        )
        self.generators = MegatronGenerators(groups)

    def check(self, bundle: Bundle) -> None:
        check_request(self.plugin, bundle)

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Build the stages of a transformers model, and Megatron's optimizer from PyTorch's."""
        plugin, loaders = self.plugin, bundle.dataloaders
        sizes = [
            loader.dataset_args.get("micro_batch_size")
            if isinstance(loader, MegatronLMDummyDataLoader)
            else getattr(loader, "batch_size", None)
            for loader in loaders
        ]
        if sizes := [size for size in sizes if size]:
            plugin.set_training_args((min if plugin.is_train_batch_min else max)(sizes), self.groups.data)
        if any(isinstance(loader, MegatronLMDummyDataLoader) for loader in loaders):
            plugin.megatron_lm_default_args["megatron_dataset_flag"] = True
        optimizer = bundle.optimizers[0] if bundle.optimizers and not evaluation else None
        context = SimpleNamespace(state=AcceleratorState(), device=self.runtime.device)
        with without_core_warnings():
            models = [
                model if isinstance(model, MegatronEngine) else self._engine(model, optimizer, context)
                for model in bundle.models
            ]
        loaders = [with_all_micro_batches(one, plugin) for one in with_real_loaders(loaders, context)]
        schedulers = [
            MegatronSchedule(plugin, scheduler, bundle.optimizers[0])
            if isinstance(scheduler, MegatronLMDummyScheduler)
            else scheduler
            for scheduler in bundle.schedulers
        ]
        self._schedules += [item for item in schedulers if isinstance(item, MegatronSchedule)]
        return replace(bundle, models=models, dataloaders=loaders, schedulers=schedulers)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model of transformers, whose parameters are on the meta device."""
        return model.source if isinstance(model, MegatronEngine) else model

    def _engine(self, model: Any, optimizer: Optimizer | None, context: Any) -> MegatronEngine:
        # 1. Set the plugin's arguments from the prepared objects, and refuse untrainable ones.
        plugin, groups, precision = self.plugin, self.groups, self.precision.name
        plugin.set_network_size_args(model)
        if optimizer is not None:
            plugin.set_optimizer_type(optimizer)
        family = None if plugin.custom_model_provider_function is not None else find_family(model)
        check_device()
        check_other_args(plugin)
        step = train_step_of(plugin, context)
        backend = plugin.attention_backend
        if family and backend in {"flash", "fused"} and not uses_transformer_engine(backend):
            raise UnsupportedError(f"attention_backend={backend!r} needs the library transformer-engine.")
        # 2. Build the groups and the stages, with rank 0's weights.
        fields = family.transformer_config(model.config) if family else {}
        config = transformer_config(plugin, fields, precision)
        if self not in _users:
            start(self)
        stages = build_stages(family, plugin, config, model, groups)
        placed = [] if family is None else find_rows(stages, family.weights(model.config))
        share_values(model, self.runtime)
        load(placed, model.state_dict(), groups)
        # 3. Wrap the stages in the precision, and for training in megatron-core's data parallelism.
        modules, made = [*stages], None
        if precision != "no":
            modules = [core("transformer.module").Float16Module(config, stage) for stage in stages]
        optimizer_names: list[list[str]] = []
        if optimizer is not None:
            names = {parameter: name for name, parameter in model.named_parameters()}
            optimizer_names += [
                [names[one] for one in group["params"] if one in names] for group in optimizer.param_groups
            ]
            indices = {parameter: 0 for stage in stages for parameter in stage.parameters()}
            indices = indices if family is None else group_of(placed, model, optimizer)
            modules = [
                core("distributed").DistributedDataParallel(
                    config=config, ddp_config=ddp_config(plugin), module=module, disable_bucketing=index > 0
                )
                for index, module in enumerate(modules)
            ]
            made = make_optimizer(plugin, optimizer, modules, indices, precision, self.scaling)
        drop_values(model)
        engine = MegatronEngine(
            self,
            model,
            modules,
            family=family,
            placed=placed,
            step=step,
            generate=generate,
            optimizer=made,
            optimizer_names=optimizer_names,
        )
        if optimizer is not None:
            self._trained = engine
        return engine

    def train_step(
        self,
        model: Any,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        accumulation: int,
        sync: bool,
    ) -> Any:
        """Run the schedule."""
        del forward
        return model.run(args, kwargs, forward_only=False, accumulation=accumulation, sync=sync)

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        del loss, accumulation, sync, kwargs
        raise UnsupportedError("Megatron's engine computes gradients when the model is called.")

    def clip_grad_norm(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2.0, *, optimizers: Optimizers = ()
    ) -> Tensor | None:
        del parameters, optimizers
        if norm_type != 2.0:
            raise UnsupportedError(
                f"clip_grad_norm_(norm_type={norm_type!r}): Megatron clips by the 2-norm. Remove norm_type."
            )
        norm = clip(self.engine.optimizer, max_norm) if self._prepare() else float("inf")
        return torch.tensor(norm, device="cpu")

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool:
        if closure is not None:
            raise UnsupportedError("Megatron's engine steps without a closure: leave it out of step().")
        engine = self.engine
        copy_hyperparameters(optimizer, engine.optimizer)
        vars(optimizer)["_opt_called"] = True  # PyTorch's schedulers check it.
        is_ready = self._prepare()
        self._is_ready = False
        if not is_ready:
            return False
        if self.clipping > 0:
            clip(engine.optimizer, self.clipping)
        stepped = bool(engine.optimizer.step_with_ready_grads())
        engine.steps += stepped
        for schedule in self._schedules if stepped else ():
            schedule.advance(engine.samples)
        engine.samples = 0
        return stepped

    def discard(self, optimizer: Optimizer) -> None:
        del optimizer
        self._is_ready = False
        self.engine.discard()

    def wrap_optimizer(self, optimizer: Any, **options: Any) -> Any:
        options |= {"device_placement": False, "scaler": None, "discard": self.discard}
        return super().wrap_optimizer(optimizer, **options)

    def wrap_scheduler(self, scheduler: Any, optimizers: Sequence[Any], **options: Any) -> Any:
        """Wrap the schedule; the engine advances Megatron's own."""
        if isinstance(scheduler, MegatronSchedule):
            return AcceleratedScheduler(scheduler, [*optimizers], step_per="update")  # pyright: ignore[reportArgumentType] - of Megatron
        return super().wrap_scheduler(scheduler, optimizers, **options)

    def release(self) -> None:
        """Release the engine and the process groups."""
        self._trained = None
        self._schedules.clear()
        if self in _users:
            _users.discard(self)
            if not _users:
                _destroy_groups()

    @property
    def engine(self) -> MegatronEngine:
        """The trained engine."""
        if self._trained is None:
            raise SettingsError("No model is prepared: call prepare(model, optimizer) first.")
        return self._trained

    def _prepare(self) -> bool:
        """Unscale gradients once per step; return whether they are finite."""
        if not self._is_ready:
            self._is_ready = not self.engine.optimizer.prepare_grads()
        return self._is_ready


def check_request(plugin: MegatronLMPlugin, bundle: Bundle) -> None:
    """Refuse models without a row, and sizes that the groups do not divide."""
    fresh = [model for model in bundle.models if not isinstance(model, MegatronEngine)]
    optimizers = bundle.optimizers
    check_materialised(replace(bundle, models=fresh))
    if len(optimizers) > 1 or len(fresh) > 1 or (optimizers and not fresh):
        raise SettingsError(
            f"prepare() got {len(fresh)} models and {len(optimizers)} optimizers: Megatron builds one model "
            "and one optimizer together, as in prepare(model, optimizer)."
        )
    if not optimizers and any(isinstance(item, MegatronLMDummyScheduler) for item in bundle.schedulers):
        raise SettingsError(
            "prepare() got a MegatronLMDummyScheduler without its optimizer: prepare them in one call, as in "
            "prepare(model, optimizer, scheduler)."
        )
    for optimizer in optimizers:
        optimizer_args(optimizer)
    is_custom = plugin.custom_model_provider_function is not None
    if is_custom and optimizers and len(optimizers[0].param_groups) > 1:
        raise SettingsError(
            "The optimizer has several parameter groups: with custom_model_provider_function use "
            "no_wd_decay_cond and scale_lr_cond of MegatronLMPlugin."
        )
    has_indexed = any(isinstance(loader, MegatronLMDummyDataLoader) for loader in bundle.dataloaders)
    for model in () if is_custom else fresh:
        family = check_model(plugin, model)
        if has_indexed and family.kind != "gpt" and not plugin.custom_megatron_datasets_provider_function:
            raise UnsupportedError(
                f"A MegatronLMDummyDataLoader makes data sets of decoders, not of {family.name!r}: give the "
                "plugin a custom_megatron_datasets_provider_function, or prepare a DataLoader."
            )


@frozen
class Groups:
    """Sizes of Megatron's groups, and this rank in each; tensor-parallel ranks are neighbours."""

    tensor: int
    pipeline: int
    data: int
    context: int
    tensor_rank: int
    data_rank: int
    pipeline_rank: int
    repeats: bool
    """Whether another rank computes the same results from the same batches."""

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the axes of a mesh of all ranks, the outermost first."""
        context = {"cp": self.context} if self.context > 1 else {}
        return {"pp": self.pipeline, "dp_replicate": self.data, **context, "tp": self.tensor}


def groups_of(plugin: MegatronLMPlugin, world_size: int, rank: int) -> Groups:
    """Return the sizes of a run's groups, for a rank in them.

    Example:
        >>> from accel_plugins.megatron.plugin import MegatronLMPlugin
        >>> groups_of(MegatronLMPlugin(tp_degree=2), 4, 3).axes
        {'pp': 1, 'dp_replicate': 2, 'tp': 2}
    """
    tensor, pipeline = plugin.tp_degree or 1, plugin.pp_degree or 1
    context = plugin.context_parallel_size or 1
    size = tensor * pipeline * context
    data, rest = divmod(world_size, size)
    if rest:
        raise SettingsError(
            f"tp_degree={tensor}, pp_degree={pipeline} and context_parallel_size={context} make groups of "
            f"{size} ranks, into which {world_size} cannot be divided: start a multiple of {size} processes, "
            "or make the sizes smaller."
        )
    rest, tensor_rank = divmod(rank, tensor)
    rest, context_rank = divmod(rest, context)
    stage, data_rank = divmod(rest, data)
    return Groups(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        context=context,
        tensor_rank=tensor_rank,
        data_rank=data_rank,
        pipeline_rank=stage,
        repeats=(tensor_rank, context_rank, stage) != (0, 0, 0),
    )


_users: weakref.WeakSet[MegatronStrategy] = weakref.WeakSet()  # They have prepared a model.
_made: list[Any] = []  # megatron-core keeps its groups in globals, and destroys none.
_seeds: list[int] = []  # The last seed of tensor parallelism's random states.
_LARGEST_SEED = 2**31


def start(strategy: MegatronStrategy) -> None:
    """Create the process groups and seed tensor parallelism's random states. A collective over all ranks.

    megatron-core has one set of groups per process, which strategies with the same sizes share.
    """
    groups, state = strategy.groups, core("parallel_state")
    if not state.model_parallel_is_initialized():
        _users.clear()  # Their process group was destroyed.
    if _users:
        gc.collect()  # It may collect unreferenced strategies.
    for axes in (user.groups.axes for user in _users if user.groups.axes != groups.axes):
        raise SettingsError(
            f"Another Accelerator trains with Megatron in groups of {axes}, this one in groups of "
            f"{groups.axes}, but megatron-core has one set per process: call free_memory() on it first."
        )
    if not _users:
        _destroy_groups()
        before = set(process_groups())
        state.initialize_model_parallel(
            tensor_model_parallel_size=groups.tensor,
            pipeline_model_parallel_size=groups.pipeline,
            context_parallel_size=groups.context,
            create_gloo_process_groups=False,
        )
        _made.extend(group for group in process_groups() if group not in before)
        seeds = [torch.initial_seed() % _LARGEST_SEED]
        dist.broadcast_object_list(seeds, src=0)  # Ranks with the same tensor drop out the same elements.
        _seed(seeds[0])
    _users.add(strategy)


def _destroy_groups() -> None:
    state = core("parallel_state")
    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    for group in _made:
        if group in process_groups():
            process_group.destroy(group)
    _made.clear()


def _seed(seed: int) -> None:
    """Seed tensor parallelism's random states, and the device's, which is the same on ranks of a group."""
    _seeds[:] = [seed]
    core("tensor_parallel.random").model_parallel_cuda_manual_seed(seed)


@dataclass(frozen=True, slots=True)
class MegatronGenerators:
    """Random states of tensor parallelism: dropout of sharded tensors uses a different one on each rank."""

    groups: Groups

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this rank; empty before groups are created."""
        if not _users:
            return {}
        states = core("tensor_parallel.random").get_cuda_rng_tracker().get_states()
        return {"sizes": self.groups.axes, "seed": _seeds[-1], "states": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Resume; without a state, or with one for groups of other sizes, seed again."""
        if not _users:
            return None
        if state.get("sizes") == self.groups.axes:
            _seeds[:] = [state["seed"]]
            core("tensor_parallel.random").get_cuda_rng_tracker().set_states(dict(state["states"]))
            return None
        _seed((state.get("seed", _seeds[-1]) + 1) % _LARGEST_SEED)
        origin = f"those of groups of {state['sizes']}" if state else "absent"
        return f"Megatron's, for groups of {self.groups.axes}, are {origin}, and are seeded again"
