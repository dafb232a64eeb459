"""The strategy `deepspeed`: checks of prepared objects, model wrapper, configuration of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accel_ops.modules import compiled_in_place, replaced_attributes, unwrap_once, without_compiler
from accel_plugins.deepspeed.config import (
    DummyOptim,
    DummyScheduler,
    HfDeepSpeedConfig,
    autofill,
    batch_size_of,
    hidden_size_of,
)
from accel_plugins.deepspeed.engine import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
)
from accel_plugins.deepspeed.library import (
    ds_module,
    is_flattened,
    is_sharded,
    map_pytorch_optim_to_deepspeed,
    plain_masters,
    start,
)
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.deepspeed.state import DeepSpeedStates
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.host_copies import StateKind
from accel_plugins.kwargs import DataLoaderConfiguration, GradientAccumulationPlugin
from accel_plugins.optimizers.host_adamw import HostAdamW
from accel_plugins.optimizers.muon import Muon
from accel_plugins.parallelism.config import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchTensorParallelPlugin,
)
from accel_plugins.parallelism.sequence import Ulysses
from accel_plugins.precision import EnginePrecision
from accel_plugins.strategy import BatchSharding, Bundle, Feature, Optimizers, Parameters, Strategy
from accel_plugins.unsharded import check_materialised
from accel_state import hang_monitor
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.runtime import Runtime


class DeepSpeedStrategy(Strategy):
    """Build an engine from a model and its optimizer; it computes gradients and steps."""

    name = "deepspeed"
    compiles_in_place = True
    keeps_weight_types = False

    def setup(self) -> None:
        runtime, handlers = self.runtime, self.handlers
        # 1. Import the library, and resolve the plugin.
        self.deepspeed: Any = start(runtime)
        unwrap_once.register(self.deepspeed.DeepSpeedEngine, lambda engine: engine.module)
        handler = handlers.get(DeepSpeedPlugin) or DeepSpeedPlugin()
        self.plugins = cast(
            "Mapping[str, DeepSpeedPlugin]", handler if isinstance(handler, dict) else {"default": handler}
        )
        for each in self.plugins.values():
            each.set_mixed_precision(self.precision.name)
        plugin = self.plugin
        stage = plugin.get_value("zero_optimization.stage", 0)
        is_plain = stage == 0 and plugin.mixed_precision == "no"
        features = {Feature.NO_SYNC, Feature.CLIP_GRAD_VALUE} if is_plain else set[Feature]()
        if stage:
            features.add(Feature.OFFLOADED_STATES)
        self.features = frozenset({Feature.OPTIMIZER_FROM_CONFIGURATION, *features})
        self.precision = EnginePrecision(name=plugin.mixed_precision, device_type=runtime.device.type)
        # 2. Shard batches, and sequences. DeepSpeed itself need not know of the latter: all ranks shard the
        # state of the model, and gradients are the mean over all.
        topology, self.mesh, self.ulysses = runtime.topology, _mesh_of(runtime, handlers), None
        if self.mesh is not None:
            options = handlers[ParallelismConfig].sp_handler or DeepSpeedSequenceParallelConfig()
            self.ulysses, self.sequence_options = Ulysses(self.mesh["sp"], averages_losses=False), options
            length = None if options.sp_seq_length_is_variable else options.sp_seq_length
            self.shard_sequences = replace(self.ulysses.shard, length=length)
        self.tensor_size, self.shapes = tensor_size_of(plugin), dict[str, torch.Size]()
        size = self.tensor_size
        if plugin.get_value("expert_parallel.enabled"):
            raise UnsupportedError(
                "expert_parallel in the DeepSpeed configuration: accel shards experts with FSDP2 alone. Use "
                "ParallelismConfig(ep_size=…) without a DeepSpeedPlugin."
            )
        if size > 1 and (stage not in {1, 2} or self.ulysses is not None or topology.world_size % size):
            raise SettingsError(
                f"tensor_parallel.autotp_size={size} in the DeepSpeed configuration, with zero stage {stage} "
                f"and {topology.world_size} processes: use stage 1 or 2, a size that divides the number of "
                "processes, and no sp_size."
            )
        sharers = self.tensor_size if self.ulysses is None else self.ulysses.size
        self.sharding = BatchSharding(
            num_shards=topology.world_size // sharers,
            shard_index=topology.rank // sharers,
            repeats=topology.rank % self.tensor_size != 0,
        )
        self._wrapper: DeepSpeedEngineWrapper | None = None
        self.states = DeepSpeedStates(self)

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The selected plugin."""
        first, *_ = self.plugins.values()
        return next((plugin for plugin in self.plugins.values() if plugin.selected), first)

    def check(self, bundle: Bundle) -> None:
        fresh = [model for model in bundle.models if not self._is_engine(model)]
        unsharded = [model for model in fresh if not any(map(is_sharded, model.parameters()))]
        check_materialised(replace(bundle, models=unsharded))
        plugin = self.plugin
        check_request(plugin.hf_ds_config, replace(bundle, models=fresh), trains=self.has_engine)
        for model in fresh:
            if self.ulysses is None:
                break
            self.ulysses.validate(model)
            wanted = self.sequence_options.sp_attn_implementation or "sdpa"
            used = getattr(getattr(model, "config", None), "_attn_implementation", wanted)
            if used != wanted:
                raise SettingsError(
                    f"DeepSpeedSequenceParallelConfig(sp_attn_implementation={wanted!r}): "
                    f"{type(model).__name__} computes attention with {used!r}: build it with "
                    f"attn_implementation={wanted!r}."
                )
        if fresh:
            self._configuration(fresh[0], bundle)
        if fresh and plugin.transformer_moe_cls_names:
            plugin.set_moe_leaf_modules(fresh[0])

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Build an engine from the model, its optimizer and the scheduler of the configuration.

        A model without an optimizer gets an engine only if its parameters are sharded (ZeRO stage 3).
        """
        models = [*bundle.models]
        optimizers, schedulers = [*bundle.optimizers], [*bundle.schedulers]
        for index, model in enumerate(models):
            if self._is_engine(model):
                continue
            if self.ulysses is not None:
                self.ulysses.prepare(model)
            if not bundle.optimizers and (evaluation or not self.plugin.hf_ds_config.is_zero3()):
                models[index] = model.to(self.runtime.device)
                continue
            engine, optimizer, scheduler = self._initialize(model, bundle)
            models[index] = engine
            if bundle.optimizers:
                optimizers = [optimizer]
            if scheduler is not None and schedulers:
                schedulers = [scheduler if isinstance(item, DummyScheduler) else item for item in schedulers]
        return replace(bundle, models=models, optimizers=optimizers, schedulers=schedulers)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return cast("nn.Module", cast("Any", model).module) if self._is_engine(model) else model

    def _is_engine(self, model: nn.Module) -> bool:
        return isinstance(model, self.deepspeed.DeepSpeedEngine)

    def _configuration(self, model: nn.Module, bundle: Bundle) -> dict[str, Any]:
        config = configuration_of(self.plugin, model, bundle, self.sharding.num_shards, self.handlers)
        # DeepSpeed divides the number of ranks by it to check batch sizes.
        return config if self.ulysses is None else {**config, "sequence_parallel_size": self.ulysses.size}

    def _initialize(self, model: nn.Module, bundle: Bundle) -> tuple[Any, Any, Any]:
        if self.plugin.hf_ds_config.is_zero3():
            # Stage 3's hooks replace dictionaries of parameters, which a compiler's wrapper would hide.
            model = compiled_in_place(model)
        # 1. Collect the arguments: configuration, optimizer and its parameters, schedule.
        config = self._configuration(model, bundle)
        arguments: dict[str, Any] = {"model": model, "config": config}
        groups: list[list[torch.Tensor]] = []
        if bundle.optimizers:
            optimizer: Any = bundle.optimizers[0]
            groups = _groups_of(optimizer)
            if isinstance(optimizer, DummyOptim):
                arguments["model_parameters"] = optimizer.params
            else:
                arguments["optimizer"] = optimizer
                is_offloaded = config["zero_optimization"].get("offload_optimizer") is not None
                if is_offloaded and config.get("zero_force_ds_cpu_optimizer", True):
                    arguments["optimizer"] = map_pytorch_optim_to_deepspeed(optimizer)
                for item in bundle.schedulers:
                    if isinstance(item, LRScheduler) and item.optimizer is optimizer:
                        item.optimizer = arguments["optimizer"]
        schedule = _find_placeholder(bundle)
        if schedule is not None and schedule.lr_scheduler_callable is not None:
            arguments["lr_scheduler"] = schedule.lr_scheduler_callable
        # 2. Build the engine, and undo changes that affect training. AutoTP splits layers: note their shapes.
        if self.tensor_size > 1:
            named = model.named_parameters(remove_duplicate=False)
            self.shapes = {name: parameter.shape for name, parameter in named}
        with hang_monitor.collective_scope("prepare"):
            engine, optimizer, _, scheduler = self.deepspeed.initialize(**arguments)
        # ZeRO replaces the user's Adagrad with a new one without its groups and scheduler.
        original, replacement = arguments.get("optimizer"), getattr(optimizer, "optimizer", None)
        if isinstance(original, Adagrad) and isinstance(replacement, Adagrad):
            original.state = replacement.state
            optimizer.optimizer = original
        # 16-bit optimizers of stage 0 initialise their state by a step, which would count and decay weights.
        if (inner := getattr(optimizer, "optimizer", None)) is not None and not is_flattened(optimizer):
            inner.state.clear()
            for tensor, master in plain_masters(optimizer, groups):
                master.copy_(tensor.detach())
        if bundle.optimizers:
            self._wrapper = DeepSpeedEngineWrapper(engine, groups=groups)
        return engine, optimizer, scheduler

    @property
    def has_engine(self) -> bool:
        """Whether `prepare()` has built an engine."""
        return self._wrapper is not None

    @property
    def wrapper(self) -> DeepSpeedEngineWrapper:
        """The engine that is trained."""
        if self._wrapper is None:
            raise SettingsError(
                "DeepSpeed has no model to train yet: pass the model and its optimizer to one call of "
                "accelerator.prepare() first."
            )
        return self._wrapper

    def release(self) -> None:
        """Destroy the engine and release it."""
        wrapper, self._wrapper = self._wrapper, None
        if wrapper is not None:
            wrapper.engine.destroy()
        if self.ulysses is not None:
            self.ulysses.release()

    def adapt_loader(self, loader: Any) -> Any:
        sequences = cast("Any", self.mesh)["sp"]
        return ds_module("runtime.sequence_parallel.ulysses_sp").UlyssesSPDataLoaderAdapter(
            loader,
            sp_rank=sequences.get_local_rank(),
            sp_group=sequences.get_group(),
            sp_world_size=sequences.size(),
            device=self.runtime.device,
        )

    def engine_of(self, model: nn.Module) -> DeepSpeedEngineWrapper | None:
        """Return the engine of a model if it is the trained one, else `None`."""
        wrapper, inner = self._wrapper, without_compiler(model)
        is_own = wrapper is not None and inner in {wrapper.engine, wrapper.engine.module}
        return wrapper if is_own else None

    def offload_states(
        self, kinds: Iterable[StateKind], models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:
        """Let the engine move its states, which stay on the host if the configuration has them there."""
        del models, optimizers  # the engine has its own
        if self.wrapper.has_gradients:
            raise UnsupportedError(
                "offload_states() between backward() and optimizer.step(): DeepSpeed's engine would lose the "
                "gradients. Call it after the step."
            )
        enum = ds_module("runtime.zero.offload_config").OffloadStateTypeEnum
        names: dict[StateKind, list[str]] = {
            "parameters": ["lp_params"],
            "gradients": ["lp_grads", "contiguous_grad_buffer"],
            "optimizer": ["hp_params", "optim_states"],
        }
        kinds = [*kinds]
        include = [enum[name] for kind in kinds for name in names[kind]]
        try:
            self.wrapper.engine.offload_states(include, pin_memory=self.runtime.device.type != "cpu")
        except AssertionError as error:  # raised before it moves anything
            raise UnsupportedError(f"offload_states() with DeepSpeed: {error}") from error
        self.offloaded.update({kind: [] for kind in kinds})

    def reload_states(self, kinds: Iterable[StateKind]) -> None:
        if rest := self.offloaded.keys() - {*kinds}:
            raise UnsupportedError(
                f"reload_states() without {sorted(rest)}: DeepSpeed's engine reloads all states at once."
            )
        self.wrapper.engine.reload_states()
        self.offloaded.clear()

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        """Add the gradients of `loss / accumulation`; with `scale_wrt_gas=False`, of `loss`."""
        scale = kwargs.pop("scale_wrt_gas", True)
        if scale and accumulation != 1:
            loss = loss / accumulation
        self.wrapper.backward(loss, sync_gradients=sync, scale_wrt_gas=False, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        owner = self.engine_of(model)
        return nullcontext() if owner is None else replaced_attributes(owner, {"accumulates": True})

    def clip_grad_norm(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2.0, *, optimizers: Optimizers = ()
    ) -> Tensor | None:
        """Schedule clipping of the engine's gradients for its next step; clip other parameters now."""
        del optimizers  # The engine has only one.
        clipped = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        wrapper = self.wrapper
        own = {id(parameter) for parameter in wrapper.engine.module.parameters()}
        if clipped and own.isdisjoint(map(id, clipped)):
            return torch.nn.utils.clip_grad_norm_(clipped, max_norm, norm_type=norm_type)
        return wrapper.clip(max_norm, norm_type)

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool:
        if closure is not None:
            raise UnsupportedError(
                "optimizer.step(closure): DeepSpeed's engine steps without a closure. Remove it."
            )
        if optimizer is not self.wrapper.optimizer:
            raise UnsupportedError(
                "optimizer.step() of an earlier prepare(), whose engine free_memory() has released: step the "
                "optimizer that the last prepare() returned."
            )
        return self.wrapper.step()

    def discard(self, optimizer: Optimizer) -> None:
        del optimizer
        self.wrapper.discard()

    def wrap_optimizer(self, optimizer: Any, **options: Any) -> Any:
        return DeepSpeedOptimizerWrapper(optimizer, step=options["step"], discard=self.discard)

    def wrap_scheduler(self, scheduler: Any, optimizers: Sequence[Any], **options: Any) -> Any:
        """Wrap the scheduler; the engine steps its own by itself."""
        if self._wrapper is not None and self._wrapper.engine.lr_scheduler is scheduler:
            return DeepSpeedSchedulerWrapper(scheduler, optimizers)
        return super().wrap_scheduler(scheduler, optimizers, **options)


def _mesh_of(runtime: Runtime, handlers: Mapping[type, Any]) -> Any:
    """Return the mesh of a run, whose axis `sp` shards sequences, if there is one; refuse all other axes."""
    config: ParallelismConfig | None = handlers.get(ParallelismConfig)
    refused = [
        f"Accelerator({name}={handlers[kind]!r})"
        for name, kind in (
            ("fsdp_plugin", FullyShardedDataParallelPlugin),
            ("torch_tp_plugin", TorchTensorParallelPlugin),
        )
        if handlers.get(kind) is not None
    ]
    if config is not None:
        sizes: dict[str, Any] = {name: getattr(config, name) for name in ("tp_size", "cp_size", "ep_size")}
        refused += [f"ParallelismConfig({name}={size})" for name, size in sizes.items() if size > 1]
        if config.sp_enabled and config.sp_backend == "torch":
            refused.append("ParallelismConfig(sp_backend='torch')")
    if refused:
        raise SettingsError(
            f"{', '.join(refused)} cannot be combined with a DeepSpeedPlugin: remove one of the two. FSDP2 "
            "has all axes, and DeepSpeed has sp_size without sp_backend."
        )
    if config is None:
        return None
    config.check_world(runtime.topology.world_size)
    return config.get_device_mesh(runtime.device.type) if config.sp_enabled else None


def tensor_size_of(plugin: DeepSpeedPlugin) -> int:
    """Return over how many ranks AutoTP of a configuration splits layers."""
    return plugin.get_value("tensor_parallel.autotp_size") or 1


def configuration_of(
    plugin: DeepSpeedPlugin, model: nn.Module, bundle: Bundle, world_size: int, handlers: Mapping[type, Any]
) -> dict[str, Any]:
    """Complete the configuration of one engine, over so many data-parallel ranks."""
    optimizer = next(iter(bundle.optimizers), None)
    split_batches = (handlers.get(DataLoaderConfiguration) or DataLoaderConfiguration()).split_batches
    steps = (handlers.get(GradientAccumulationPlugin) or GradientAccumulationPlugin()).num_steps
    source = "" if steps is None else f"Accelerator(gradient_accumulation_steps={steps!r})"
    config = autofill(
        plugin.deepspeed_config,
        world_size=world_size * tensor_size_of(plugin),  # DeepSpeed counts all ranks
        micro_batch=batch_size_of(
            bundle.dataloaders,
            smallest=plugin.is_train_batch_min,
            split_into=world_size if split_batches else 1,
        ),
        accumulation=(steps or 1, source),
        hidden_size=hidden_size_of(model),
        optimizer=optimizer,
        scheduler=_find_placeholder(bundle),
        schedule_shards=1 if split_batches else world_size,
    )
    stage = config["zero_optimization"].get("stage")
    if isinstance(optimizer, Optimizer) and stage and "zero_allow_untested_optimizer" not in config:
        config["zero_allow_untested_optimizer"] = True  # The caller has chosen the optimizer.
    return config


def _groups_of(optimizer: Any) -> list[list[torch.Tensor]]:
    groups: list[Any] = optimizer.params if isinstance(optimizer, DummyOptim) else optimizer.param_groups
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    return [[*group["params"]] for group in groups]


def _find_placeholder(bundle: Bundle) -> DummyScheduler | None:
    return next((item for item in bundle.schedulers if isinstance(item, DummyScheduler)), None)


def check_request(config: HfDeepSpeedConfig, bundle: Bundle, *, trains: bool) -> None:
    """Check that an engine can be built from the prepared objects."""
    models = bundle.models
    optimizers = [item for item in bundle.optimizers if isinstance(item, (Optimizer, DummyOptim))]
    if (optimizers and not models) or (not optimizers and _find_placeholder(bundle) is not None):
        raise SettingsError(
            "DeepSpeed needs the model, its optimizer and its DummyScheduler together: pass them to one call "
            "of accelerator.prepare()."
        )
    if optimizers and (trains or len(models) > 1 or len(optimizers) > 1):
        raise UnsupportedError(
            f"prepare() got {len(models)} model(s) and {len(optimizers)} optimizer(s)"
            f"{', after a model to train was prepared' if trains else ''}: with DeepSpeed, an Accelerator "
            "trains one model with one optimizer. Create another Accelerator with its own plugin for each "
            "further one (deepspeed_plugins={name: plugin}), or call free_memory() to release the first one."
        )
    if not optimizers:
        return
    # 1. An optimizer or a schedule of the configuration has a placeholder, and only that.
    optimizer: Any = optimizers[0]
    rows = [("optimizer", optimizer, isinstance(optimizer, DummyOptim))] + [
        ("scheduler", item, getattr(item, "lr_scheduler_callable", item) is None)
        for item in bundle.schedulers
        if isinstance(item, LRScheduler | DummyScheduler)
    ]
    for key, item, is_placeholder in rows:
        if (config.get_value(key) is None) == is_placeholder:
            raise SettingsError(
                f"prepare() got {type(item).__name__}, and the DeepSpeed configuration has "
                f"{key}={config.get_value(key)!r}: with a placeholder (DummyOptim, or DummyScheduler without "
                f'lr_scheduler_callable), add "{key}" to the configuration; with any other, remove it there.'
            )
    # 2. The optimizer is one that the engine can step, of parameters of the model.
    groups = _groups_of(optimizer)
    if isinstance(optimizer, Muon | HostAdamW):
        raise SettingsError(
            f"{type(optimizer).__name__} needs parameters sharded by PyTorch, but DeepSpeed steps flat "
            "partitions of them: use FSDP2, or an optimizer of DeepSpeed's configuration."
        )
    stage = config.get_value("zero_optimization.stage")
    if isinstance(optimizer, Adagrad) and len(groups) > 1 and stage in {1, 2}:
        raise SettingsError(
            f"Adagrad with {len(groups)} parameter groups: stage {stage} of DeepSpeed keeps only the "
            "first. Use zero_stage=0 or 3, or a single group."
        )
    own = {id(parameter) for parameter in models[0].parameters()}
    tensors = [*chain.from_iterable(groups)]
    if not tensors or not own.issuperset(map(id, tensors)):
        foreign = sum(id(tensor) not in own for tensor in tensors)
        raise SettingsError(
            f"{foreign} of the {len(tensors)} parameter(s) of {type(optimizer).__name__} do not belong "
            f"to the {type(models[0]).__name__} that is prepared with it: create the optimizer from the "
            "parameters of that model (not of a copy, and after its parameters were replaced)."
        )
