"""DeepSpeed: an engine trains a model with its optimizer and shards the states of its ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accel_ops.modules import compiled_in_place, unwrap_once
from accel_plugins.deepspeed.autofill import RunFacts, autofill, batch_size_of, hidden_size_of
from accel_plugins.deepspeed.dummy import DummyOptim, DummyScheduler
from accel_plugins.deepspeed.engine import DeepSpeedEngineWrapper
from accel_plugins.deepspeed.fill import KnownValue
from accel_plugins.deepspeed.gathered import is_sharded
from accel_plugins.deepspeed.library import start
from accel_plugins.deepspeed.optimizers import map_pytorch_optim_to_deepspeed
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.deepspeed.ulysses import sequences_of
from accel_plugins.deepspeed.validate import check_device_support, check_request, config_names, parsed
from accel_plugins.kwargs.run import DataLoaderConfiguration, GradientAccumulationPlugin
from accel_plugins.precision.amp import EnginePrecision
from accel_plugins.strategies.deepspeed_save import DeepSpeedPersister, DeepSpeedShards
from accel_plugins.strategies.deepspeed_step import DeepSpeedStepper
from accel_plugins.strategies.replicated import check_materialised
from accel_plugins.strategy import BatchSharding, Feature, Strategy
from accel_state import hang_monitor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from accel_plugins.bundle import Bundle
    from accel_plugins.deepspeed.ulysses import SequenceParallel
    from accel_plugins.roles import PrecisionPolicy
    from accel_state.runtime import Runtime
    from accel_state.settings.model import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedWrapper:
    """Model wrapper that makes an engine from a model and its optimizer."""

    runtime: Runtime
    deepspeed: Any
    plugins: Mapping[str, DeepSpeedPlugin]
    accumulation: KnownValue
    split_batches: bool
    stepper: DeepSpeedStepper
    sequences: SequenceParallel | None = None

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The selected plugin."""
        return _selected(self.plugins)

    def check(self, bundle: Bundle) -> None:
        """Refuse objects that no engine can be made of, and configurations that contradict them."""
        fresh = [model for model in bundle.models if not self._is_engine(model)]
        unsharded = [model for model in fresh if not any(map(is_sharded, model.parameters()))]
        check_materialised(replace(bundle, models=unsharded))
        plugin = self.plugin
        check_device_support(plugin.hf_ds_config)
        check_request(plugin.hf_ds_config, replace(bundle, models=fresh), trains=self.stepper.has_engine)
        if self.sequences is not None:
            for model in fresh:
                self.sequences.validate(model)
        if fresh:
            self._config_for(fresh[0], bundle)
        if fresh and plugin.transformer_moe_cls_names:
            plugin.set_moe_leaf_modules(fresh[0])

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Put the model into an engine, which takes over its optimizer and the schedule of its configuration.

        A model without an optimizer gets an engine only if its parameters are to be sharded (ZeRO stage 3).
        """
        models = [*bundle.models]
        optimizers, schedulers = [*bundle.optimizers], [*bundle.schedulers]
        for index, model in enumerate(models):
            if self._is_engine(model):
                continue
            if self.sequences is not None:
                self.sequences.register(model)
            if not bundle.optimizers and (evaluation or not self.plugin.hf_ds_config.is_zero3()):
                models[index] = model.to(self.runtime.device)
                continue
            engine, optimizer, scheduler = self._initialize(model, bundle)
            models[index] = engine
            if bundle.optimizers:
                optimizers = [optimizer]
            if scheduler is not None and schedulers:
                schedulers = [scheduler if isinstance(one, DummyScheduler) else one for one in schedulers]
        return replace(bundle, models=models, optimizers=optimizers, schedulers=schedulers)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside."""
        return cast("nn.Module", cast("Any", model).module) if self._is_engine(model) else model

    def _is_engine(self, model: nn.Module) -> bool:
        return isinstance(model, self.deepspeed.DeepSpeedEngine)

    def _config_for(self, model: nn.Module, bundle: Bundle) -> dict[str, Any]:
        """Complete the configuration of one engine."""
        config = configuration_of(
            self.plugin,
            model,
            bundle,
            world_size=self.runtime.topology.world_size // (self.sequences.size if self.sequences else 1),
            accumulation=self.accumulation,
            split_batches=self.split_batches,
        )
        return parsed(config, config_names())

    def _initialize(self, model: nn.Module, bundle: Bundle) -> tuple[Any, Any, Any]:
        if self.plugin.hf_ds_config.is_zero3():
            # Its hooks replace the dictionaries of parameters, which the compiler's wrapper keeps from them.
            model = compiled_in_place(model)
        config = self._config_for(model, bundle)
        arguments: dict[str, Any] = {"model": model, "config": config}
        groups: list[list[torch.Tensor]] = []
        if bundle.optimizers:
            optimizer: Any = bundle.optimizers[0]
            if isinstance(optimizer, DummyOptim):
                arguments["model_parameters"] = optimizer.params
                groups = (
                    [optimizer.tensors()]
                    if not optimizer.params or not isinstance(optimizer.params[0], dict)
                    else [[*group["params"]] for group in optimizer.params]
                )
            else:
                groups = [[*group["params"]] for group in optimizer.param_groups]
                arguments["optimizer"] = _for_offloading(optimizer, config)
                _follow(bundle.schedulers, optimizer, arguments["optimizer"])
        schedule = next((one for one in bundle.schedulers if isinstance(one, DummyScheduler)), None)
        if schedule is not None and schedule.lr_scheduler_callable is not None:
            arguments["lr_scheduler"] = schedule.lr_scheduler_callable
        if self.sequences is not None:
            arguments["mpu"] = self.sequences.as_mpu()
        with hang_monitor.collective_scope("prepare"):
            engine, optimizer, _, scheduler = self.deepspeed.initialize(**arguments)
        if self.sequences is not None:
            _average_over_all_ranks(engine, engine.optimizer)
        if "optimizer" in arguments:
            _restore_adagrad(optimizer, arguments["optimizer"])
        _undo_first_step(optimizer)
        if bundle.optimizers:
            self.stepper.register(DeepSpeedEngineWrapper(engine, groups=groups))
        return engine, optimizer, scheduler


def build(
    settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
) -> Strategy:
    """Make the strategy of a run with DeepSpeed."""
    del settings
    deepspeed = start(runtime)
    unwrap_once.register(deepspeed.DeepSpeedEngine, lambda engine: engine.module)
    handler = handlers.get(DeepSpeedPlugin) or DeepSpeedPlugin()
    plugins = cast(
        "Mapping[str, DeepSpeedPlugin]", handler if isinstance(handler, dict) else {"default": handler}
    )
    for plugin in plugins.values():
        plugin.set_mixed_precision(precision.name)
    first = _selected(plugins)
    topology = runtime.topology
    sequences = sequences_of(runtime, handlers)
    sharers = 1 if sequences is None else sequences.size
    stepper = DeepSpeedStepper()
    persister = DeepSpeedPersister(runtime=runtime, stepper=stepper)
    loading = handlers.get(DataLoaderConfiguration) or DataLoaderConfiguration()
    return Strategy(
        name="deepspeed",
        wrapper=DeepSpeedWrapper(
            runtime=runtime,
            deepspeed=deepspeed,
            plugins=plugins,
            accumulation=accumulation_of(handlers.get(GradientAccumulationPlugin)),
            split_batches=loading.split_batches,
            stepper=stepper,
            sequences=sequences,
        ),
        stepper=stepper,
        persister=persister,
        sharding=BatchSharding(
            num_shards=topology.world_size // sharers, shard_index=topology.rank // sharers
        ),
        mesh=None if sequences is None else sequences.full_mesh,
        shard_sequences=None if sequences is None else sequences.shard,
        features=_features(first),
        precision=EnginePrecision(name=first.mixed_precision, device_type=runtime.device.type),
        release=partial(_release, stepper, sequences),
        shards=DeepSpeedShards(persister=persister),
        native=persister,
        wrap_optimizer=stepper.wrap_optimizer,
        wrap_scheduler=stepper.wrap_scheduler,
        compiles_in_place=True,
    )


def configuration_of(
    plugin: DeepSpeedPlugin,
    model: nn.Module,
    bundle: Bundle,
    *,
    world_size: int,
    accumulation: KnownValue,
    split_batches: bool,
) -> dict[str, Any]:
    """Complete the configuration of one engine."""
    optimizer = next(iter(bundle.optimizers), None)
    facts = RunFacts(
        world_size=world_size,
        micro_batch=batch_size_of(
            bundle.dataloaders,
            smallest=plugin.is_train_batch_min,
            split_into=world_size if split_batches else 1,
        ),
        accumulation=accumulation,
        hidden_size=hidden_size_of(model),
        optimizer=optimizer,
        scheduler=next((one for one in bundle.schedulers if isinstance(one, DummyScheduler)), None),
        schedule_shards=1 if split_batches else world_size,
    )
    config = autofill(plugin.deepspeed_config, facts)
    stage = config["zero_optimization"].get("stage")
    if isinstance(optimizer, Optimizer) and stage and "zero_allow_untested_optimizer" not in config:
        config["zero_allow_untested_optimizer"] = True  # who passes it wants it
    return config


def accumulation_of(plugin: GradientAccumulationPlugin | None) -> KnownValue:
    """Return the micro-batches of an optimizer step, with their source; the default of 1 may be overruled."""
    steps = None if plugin is None else plugin.num_steps
    source = f"Accelerator(gradient_accumulation_steps={steps!r})"
    return KnownValue(value=steps or 1, source=source, binding=steps is not None)


def _selected(plugins: Mapping[str, DeepSpeedPlugin]) -> DeepSpeedPlugin:
    several = [*plugins.values()]
    return next((one for one in several if one.selected), several[0])


def _release(stepper: DeepSpeedStepper, sequences: SequenceParallel | None) -> None:
    stepper.release()
    if sequences is not None:
        sequences.release()


def _features(plugin: DeepSpeedPlugin) -> frozenset[Feature]:
    stage = plugin.get_value("zero_optimization.stage", 0)
    plain = stage == 0 and plugin.mixed_precision == "no"
    found = {Feature.OPTIMIZER_FROM_CONFIGURATION}
    return frozenset(found | {Feature.NO_SYNC, Feature.CLIP_GRAD_VALUE} if plain else found)


def _restore_adagrad(engine_optimizer: Any, optimizer: Any) -> None:
    """Put the user's Adagrad back where ZeRO has made a new one of its defaults: no groups, no schedule."""
    replacement = getattr(engine_optimizer, "optimizer", None)
    if isinstance(replacement, torch.optim.Adagrad) and isinstance(optimizer, torch.optim.Adagrad):
        optimizer.state = replacement.state
        engine_optimizer.optimizer = optimizer


def _undo_first_step(optimizer: Any) -> None:
    """Undo the step with zero gradients by which 16-bit optimizers of stage 0 initialise their state.

    That step would count and decay weights.
    """
    if hasattr(optimizer, "fp32_groups") and hasattr(optimizer, "refresh_fp32_params"):
        optimizer.optimizer.state.clear()
        optimizer.refresh_fp32_params()


def _average_over_all_ranks(*parts: Any) -> None:
    """Average gradients over all ranks, as other strategies do.

    DeepSpeed's stages below 3 sum them over a sequence-parallel group; stage 3 does so without
    `reduce_scatter` only.
    """
    for one in parts:
        if hasattr(one, "sequence_parallel_size"):
            one.sequence_parallel_size = 1


def _for_offloading(optimizer: Optimizer, config: Mapping[str, Any]) -> Optimizer:
    offloads = config["zero_optimization"].get("offload_optimizer") is not None
    if offloads and config.get("zero_force_ds_cpu_optimizer", True):
        return map_pytorch_optim_to_deepspeed(optimizer)
    return optimizer


def _follow(schedulers: Sequence[Any], before: Optimizer, now: Optimizer) -> None:
    """Point schedulers at the optimizer that has replaced theirs."""
    for one in schedulers:
        if before is not now and isinstance(one, LRScheduler) and one.optimizer is before:
            one.optimizer = now
