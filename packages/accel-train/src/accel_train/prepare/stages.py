"""The stages of `prepare`, each a function from bundle to bundle, and the loop over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel_ops.compile import compile_regions
from accel_ops.modules import (
    extract_model_from_parallel,
    has_compiled_regions,
    is_compiled_module,
    model_has_dtensor,
)
from accel_plugins import sharding
from accel_plugins.deepspeed.dummy import DummyOptim, DummyScheduler
from accel_plugins.megatron.dummy import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from accel_plugins.recipe import check_converted, parameter_ids
from accel_plugins.strategy import Feature
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.labels import DynamoBackend
from accel_train.bound import bind_step
from accel_train.data.prepare import prepare_data_loader
from accel_train.deepspeed import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
from accel_train.optimizer import AcceleratedOptimizer
from accel_train.prepare import STAGE_NAMES
from accel_train.scheduler import AcceleratedScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from accel_plugins.bundle import Bundle
    from accel_plugins.kwargs.dynamo import TorchDynamoPlugin
    from accel_plugins.recipe import Recipe
    from accel_state.runtime import Runtime
    from accel_train.parts import Parts
    from accel_train.scheduler import StepPer


@final
class Converter:
    """Converter that applies a precision recipe to prepared objects, also to optimizers that come later."""

    def __init__(self, recipe: Recipe, runtime: Runtime) -> None:
        self.recipe = recipe
        self._runtime = runtime
        self._replaced: Any = WeakIdKeyDictionary()

    def convert(self, bundle: Bundle, mesh: DeviceMesh | None) -> Bundle:
        """Convert the models of a bundle, and point its optimizers at their parameters."""
        if self.recipe.initialize is not None:
            bundle = self.recipe.initialize(bundle)
        if bundle.models:
            before = parameter_ids(bundle.models)
            replaced = self.recipe.convert(bundle, self._runtime, mesh)
            check_converted(self.recipe, before, bundle, replaced)
            for old, new in replaced.items():
                self._replaced[old] = new
        for optimizer in bundle.optimizers:
            own = [one for group in optimizer.param_groups for one in group["params"]]
            sharding.optimizers.switch_parameters(
                optimizer, {one: self._replaced[one] for one in own if one in self._replaced}
            )
        return bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of the stages of one call of `prepare`, besides the bundle."""

    parts: Parts
    placements: Mapping[str, Sequence[bool]]
    evaluation: bool = False
    slice_fn: Callable[..., Any] | None = None
    step_per: StepPer | None = None


def run_stages(bundle: Bundle, request: Request) -> Bundle:
    """Run every stage in order, and record the prepared objects."""
    for name in STAGE_NAMES:
        bundle = STAGES[name](bundle, request)
    for one in (*bundle.models, *bundle.optimizers, *bundle.schedulers, *bundle.dataloaders):
        vars(one)["_is_accelerate_prepared"] = True  # by which libraries tell what is prepared already
    prepared = request.parts.prepared
    prepared.models.extend(bundle.models)
    prepared.optimizers.extend(bundle.optimizers)  # pyright: ignore[reportArgumentType] - wrapped by now
    prepared.schedulers.extend(bundle.schedulers)
    prepared.dataloaders.extend(bundle.dataloaders)
    return bundle


def has_device_map(model: nn.Module) -> bool:
    """Return whether a device map has spread a model, or a part of it, over several devices."""
    return any(len(getattr(part, "hf_device_map", ())) > 1 for part in model.modules())


def _check_quantised(model: nn.Module, device: torch.device) -> None:
    """Refuse to train a quantised model of which some parts are not where it runs."""
    for part in model.modules():
        bits = [n for n in (8, 4) if getattr(part, f"is_loaded_in_{n}bit", False)]
        devices = {str(device) for device in getattr(part, "hf_device_map", {}).values()}
        offloaded = (
            devices & {"disk", "cpu"} if len(devices) > 1 or device.type != "cpu" else devices & {"disk"}
        )
        if bits and offloaded:
            raise SettingsError(
                f"{type(part).__qualname__} is quantised to {bits[0]} bits and has parts on "
                f"{' and '.join(sorted(offloaded))}, by its device map: such a model cannot be trained. Load "
                "it with all parts on one device, or prepare it with evaluation_mode=True."
            )


def _check_not_sharded(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Refuse a model that others have sharded; with tensor parallelism, layers may be DTensors already."""
    at_load = getattr(model, "is_distributed_loading_by_transformers", False)
    has_tp = mesh is not None and "tp" in (mesh.mesh_dim_names or ())
    known = has_tp or "_is_accelerate_prepared" in vars(model)
    if at_load or (model_has_dtensor(model) and not known):
        raise UnsupportedError(
            f"{type(model).__qualname__} is sharded already, as by from_pretrained(distributed_config=...) "
            "or from_pretrained(tp_plan=...), and training such a model is not supported yet. Load it "
            "without these arguments, and let prepare() shard it: by "
            "FullyShardedDataParallelPlugin(fsdp_version=2) or ParallelismConfig(tp_size=...)."
        )


def _check(bundle: Bundle, request: Request) -> Bundle:
    for model in bundle.models if not request.evaluation else ():
        _check_quantised(model, request.parts.process.device)
    if request.parts.process.use_distributed and not request.evaluation:
        for model in bundle.models:
            if has_device_map(model):
                raise UnsupportedError(
                    f"{type(model).__qualname__} is spread over several devices by a device map, and cannot "
                    "be trained by several processes; load it without device_map, or start one process."
                )
            _check_not_sharded(model, request.parts.strategy.mesh)
    for one in (*bundle.optimizers, *bundle.schedulers):
        if isinstance(one, (DummyOptim, DummyScheduler, MegatronLMDummyScheduler)):
            request.parts.strategy.require(Feature.OPTIMIZER_FROM_CONFIGURATION, type(one).__name__)
    for one in bundle.dataloaders:
        if isinstance(one, MegatronLMDummyDataLoader):
            request.parts.strategy.require(Feature.LOADERS_FROM_CONFIGURATION, type(one).__name__)
    request.parts.strategy.wrapper.check(bundle)
    return bundle


def _recipe(bundle: Bundle, request: Request) -> Bundle:
    if request.parts.converter is not None:
        return request.parts.converter.convert(bundle, request.parts.strategy.mesh)
    return bundle


def _wrap(bundle: Bundle, request: Request) -> Bundle:
    bundle = request.parts.strategy.wrapper.wrap(bundle, evaluation=request.evaluation)
    engine = request.parts.engine
    if engine is not None and not request.evaluation:
        for model in bundle.models:
            engine.route(model)
    return bundle


def _compile(bundle: Bundle, request: Request) -> Bundle:
    in_place = request.parts.strategy.compiles_in_place
    compiler = request.parts.compiler
    return replace(
        bundle, models=tuple(compile_model(one, compiler, in_place=in_place) for one in bundle.models)
    )


def _optimizers(bundle: Bundle, request: Request) -> Bundle:
    parts, wrap = request.parts, request.parts.strategy.wrap_optimizer
    if wrap is not None:

        def engine(optimizer: Any, *, step: Callable[..., Any], discard: Any) -> DeepSpeedOptimizerWrapper:
            step = bind_step(step, parts.after_step)
            return DeepSpeedOptimizerWrapper(optimizer, step=step, discard=discard)

        return replace(bundle, optimizers=tuple(wrap(one, engine) for one in bundle.optimizers))
    wrapped = tuple(
        AcceleratedOptimizer(optimizer, move, parts.precision.scaler, step=parts.step, window=parts.items)
        for optimizer, move in zip(bundle.optimizers, request.placements["optimizers"], strict=True)
    )
    return replace(bundle, optimizers=wrapped)


def _dataloaders(bundle: Bundle, request: Request) -> Bundle:
    parts = request.parts
    config, sharding = parts.dataloading, parts.strategy.sharding
    loaders = tuple(
        prepare_data_loader(
            loader,
            parts.process.device,
            num_processes=sharding.num_shards,
            process_index=sharding.shard_index,
            split_batches=config.split_batches,
            put_on_device=move and sharding.put_on_device,
            rng_types=[*parts.rng_types],
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=request.slice_fn,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            torch_device_mesh=parts.strategy.mesh,
            micro_batches=sharding.micro_batches,
            already_sharded=config.already_sharded,
        )
        for loader, move in zip(bundle.dataloaders, request.placements["dataloaders"], strict=True)
    )
    for loader in loaders:
        loader.resume_mid_epoch = config.resume_mid_epoch
    for loader in loaders if parts.meter is not None else ():
        loader.meter = parts.meter
    for loader in loaders if bundle.models else ():
        loader.shard_sequences = parts.strategy.shard_sequences
    return replace(bundle, dataloaders=loaders)


def _schedulers(bundle: Bundle, request: Request) -> Bundle:
    parts = request.parts
    known = [*parts.prepared.optimizers, *bundle.optimizers]
    wrap = parts.strategy.wrap_scheduler
    wrapped = tuple(
        (wrap and wrap(scheduler, known, DeepSpeedSchedulerWrapper))
        or AcceleratedScheduler(
            scheduler,
            _optimizers_of(scheduler, known),
            step_with_optimizer=parts.step_scheduler_with_optimizer,
            split_batches=parts.dataloading.split_batches,
            step_per=request.step_per or parts.step_scheduler_per,
            num_shards=parts.strategy.sharding.num_shards,
        )
        for scheduler in bundle.schedulers
    )
    return replace(bundle, schedulers=wrapped)


def _optimizers_of(scheduler: Any, known: list[Any]) -> list[Any]:
    own = getattr(scheduler, "optimizer", None)  # a scheduler that is not PyTorch's may keep it elsewhere
    return [one for one in known if own is not None and (own is one or own is one.optimizer)] or known


STAGES: Mapping[str, Callable[[Bundle, Request], Bundle]] = {
    "check": _check,
    "recipe": _recipe,
    "precision": lambda bundle, request: request.parts.precision.convert(bundle),
    "wrap": _wrap,
    "compile": _compile,
    "optimizers": _optimizers,
    "dataloaders": _dataloaders,
    "schedulers": _schedulers,
}
"""What each of `STAGE_NAMES` does."""


def compile_model(model: nn.Module, plugin: TorchDynamoPlugin, *, in_place: bool = False) -> nn.Module:
    """Compile a model with the plugin's options; leave a compiled one as it is.

    Regions are compiled in place, inside the model's wrappers; otherwise the result wraps all.
    """
    if plugin.backend == DynamoBackend.NO or is_compiled_module(model):
        return model
    if plugin.use_regional_compilation:
        inner = extract_model_from_parallel(model)
        if not has_compiled_regions(inner):
            compile_regions(inner, **plugin.to_kwargs())
        return model
    if in_place:
        inner = extract_model_from_parallel(model)
        if not has_compiled_regions(inner):
            inner.compile(**plugin.to_kwargs())
        return model
    return cast("nn.Module", torch.compile(model, **plugin.to_kwargs()))
