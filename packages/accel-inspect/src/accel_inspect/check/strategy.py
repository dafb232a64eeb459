"""Record what strategies do; fake engines; list the files of their checkpoints.

Strategies that shard models with PyTorch's own API run as they are, on a fake process group. Under the others
models stay unsharded, and their memory is estimated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim.lr_scheduler import LambdaLR

from accel_inspect.check.record import SelectedStrategy
from accel_inspect.estimate.megatron import stage_elements
from accel_inspect.estimate.memory import ADAM, MASTER, MEGATRON, Buckets
from accel_inspect.estimate.trace import storage_key
from accel_ops.tree import local_part
from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.deepspeed.config import DummyOptim, DummyScheduler
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.deepspeed.strategy import accumulation_of, check_request, configuration_of
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin, form_of
from accel_plugins.kwargs import DataLoaderConfiguration, GradientAccumulationPlugin
from accel_plugins.megatron import strategy as megatron
from accel_plugins.megatron.data import MegatronLMDummyScheduler, with_all_micro_batches
from accel_plugins.megatron.plugin import MegatronLMPlugin
from accel_plugins.megatron.strategy import batch_sharding, groups_of
from accel_plugins.parallelism.config import ParallelismConfig
from accel_plugins.precision import EnginePrecision
from accel_plugins.sharding.folder import ShardWriter
from accel_plugins.sharding.state import INDEX_NAME, StateForm, shard_file
from accel_plugins.strategy import Bundle, Feature, PrecisionPolicy, Strategy, StrategySpec
from accel_plugins.unsharded import States, check_materialised
from accel_state.accelerator_state import AcceleratorState
from accel_state.runtime import Runtime
from accel_state.settings.model import Settings
from accel_state.torch_private import tree_leaves
from accel_train.checkpoint import layout
from accel_train.checkpoint.context import CheckpointContext
from accel_train.checkpoint.save import form_of_run
from accel_train.observing import Observer

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_inspect.check.recorder import CollectiveRecorder


REAL = frozenset({"fsdp2", "pipeline", "tp"})
"""Strategies whose own code runs in the check: FSDP2, pipelines, tensor and context parallelism."""


class CheckObserver(Observer):
    """Records what strategies do, and replaces those that are not `REAL` by fakes; reads few batches."""

    def __init__(self, recorder: CollectiveRecorder, batches: int) -> None:
        self.recorder, self._num_batches = recorder, batches

    def build(self, spec: StrategySpec, *arguments: Any) -> Strategy:
        """Build a strategy, or its fake, that is recorded."""
        recorder, handlers = self.recorder, arguments[-1]
        is_real = spec.name in REAL
        with recorder.on_real_tensors():  # Meshes need real values.
            built = super().build(spec, *arguments) if is_real else _fake(recorder, spec.name, *arguments)
        recorder.strategy = _describe(spec.name, built, handlers)
        _record(recorder, built, is_real=is_real)
        return built

    def batches(self, loader: Any, read: Callable[[], Iterator[Any]]) -> Generator[Any]:
        """Yield the first batches as fake tensors, read outside of fake mode; mark the last one."""
        recorder = self.recorder
        vars(loader).update(num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False)
        with recorder.on_real_tensors():
            real_batches = read()
            upcoming = next(real_batches, _END)
            recorder.record_batch(loader, upcoming)
        for number in itertools.count(1):
            if upcoming is _END:
                return
            current = recorder.make_fake(upcoming)
            if number == self._num_batches:
                vars(loader)["end_of_dataloader"] = True
            yield current
            if number == self._num_batches:
                break
            with recorder.on_real_tensors():
                upcoming = next(real_batches, _END)
                recorder.record_batch(loader, upcoming)
        with recorder.on_real_tensors():
            del real_batches


_END: Any = object()


def _record(recorder: CollectiveRecorder, strategy: Any, *, is_real: bool) -> None:
    """Record which models a strategy prepares, and when it would all-reduce gradients.

    `is_real`: it shards models and communicates by itself, so that the recorder sees it anyway.
    """
    check, wrap, backward, step = strategy.check, strategy.wrap, strategy.backward, strategy.step

    def check_silently(bundle: Bundle) -> None:
        with recorder.silence():
            check(bundle)

    def wrap_recorded(bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        if bundle.models and not evaluation:
            recorder.record("prepare")
        with recorder.silence():
            wrapped = wrap(bundle, evaluation=evaluation)
        if wrapped.models and not evaluation:
            recorder.track(wrapped.models, sharded=is_real)
        return wrapped

    def backward_recorded(loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        if sync and not is_real:
            recorder.record("backward")
        backward(loss, accumulation=accumulation, sync=sync, **kwargs)

    def step_recorded(optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        with recorder.stepping(optimizer):
            if is_real:
                return step(optimizer, closure)
            optimizer.step()
        return True

    strategy.check, strategy.wrap = check_silently, wrap_recorded
    strategy.backward, strategy.step = backward_recorded, step_recorded


def _describe(name: str, strategy: Strategy, handlers: Mapping[type, Any]) -> SelectedStrategy:
    axes: dict[str, int] = {}
    if isinstance(strategy, FakeMegatron):
        axes = {**strategy.groups.axes}
    elif strategy.mesh is not None:
        axes = dict(zip(strategy.mesh.mesh_dim_names or (), strategy.mesh.shape, strict=True))
        if (config := handlers.get(ParallelismConfig)) is not None and config.ep_enabled:
            axes["ep"] = config.ep_size
    offloads = name == "fsdp2" and isinstance(_fsdp_plugin(handlers).cpu_offload, CPUOffloadPolicy)
    counted_as = "" if name in REAL else _COUNTED.get(name, _as_ddp)(handlers)
    return SelectedStrategy(
        name=name, counted_as=counted_as, axes=axes, offloaded=offloads, precision=strategy.precision.name
    )


def _as_ddp(handlers: Mapping[type, Any]) -> str:
    options = handlers.get(DistributedDataParallelKwargs)
    return "DDP, gradients in buckets" if options and options.gradient_as_bucket_view else "DDP"


def _as_fsdp(handlers: Mapping[type, Any]) -> str:
    plugin = _fsdp_plugin(handlers)
    offload = plugin.cpu_offload
    if getattr(offload, "offload_params", offload):
        return "FSDP2, offloaded"
    return {"NO_SHARD": "DDP", "SHARD_GRAD_OP": "FSDP2, gathered once"}.get(
        getattr(plugin.sharding_strategy, "name", ""), "FSDP2"
    )


def _as_zero(handlers: Mapping[type, Any]) -> str:
    plugin = _deepspeed_plugin(handlers)
    stage = int(plugin.get_value("zero_optimization.stage", 0))
    optimizer, weights = (
        plugin.get_value(f"zero_optimization.offload_{what}.device", None) not in {None, "none"}
        for what in ("optimizer", "param")
    )
    suffix = _OFFLOADED[optimizer, weights if stage == 3 else optimizer]
    return f"ZeRO-{stage}{suffix}" if stage else "DDP"


_OFFLOADED = {
    (False, False): "",
    (True, True): ", offloaded",
    (True, False): ", optimizer offloaded",
    (False, True): ", weights offloaded",
}
"""The end of the name of the estimate, by whether the optimizer and the weights are offloaded."""

_COUNTED: Mapping[str, Callable[[Mapping[type, Any]], str]] = {
    "single": lambda _: "one device",
    "ddp": _as_ddp,
    "fsdp1": _as_fsdp,
    "deepspeed": _as_zero,
    "megatron": lambda handlers: MEGATRON[bool(_megatron_plugin(handlers).use_distributed_optimizer)],
}
"""The strategy whose estimate counts, by the name of the strategy; others are estimated as DDP."""


def _fsdp_plugin(handlers: Mapping[type, Any]) -> FullyShardedDataParallelPlugin:
    return handlers.get(FullyShardedDataParallelPlugin) or FullyShardedDataParallelPlugin()


def _deepspeed_plugin(handlers: Mapping[type, Any]) -> DeepSpeedPlugin:
    handler = handlers.get(DeepSpeedPlugin) or DeepSpeedPlugin()
    return next(iter(handler.values())) if isinstance(handler, dict) else handler


def _megatron_plugin(handlers: Mapping[type, Any]) -> MegatronLMPlugin:
    return handlers.get(MegatronLMPlugin) or MegatronLMPlugin()


def _fake(
    recorder: CollectiveRecorder,
    name: str,
    settings: Settings,
    runtime: Runtime,
    precision: PrecisionPolicy,
    handlers: Mapping[type, Any],
) -> Strategy:
    if name == "megatron":
        return FakeMegatron(recorder, settings, runtime, precision, handlers)
    if name == "deepspeed":
        return FakeDeepSpeed(recorder, settings, runtime, precision, handlers)
    plain = FakeStrategy(settings, runtime, precision, handlers)
    plain.name = name
    if name == "fsdp1":
        plain.states = Sharded(form_of(_fsdp_plugin(handlers)))
    return plain


class Sharded(States):
    """The sharding of checkpoints by a strategy whose own code does not run in the check.

    Args:
        saved: Form of the checkpoint.
        stage: ZeRO stage, 0 to 3; None for FSDP.
        width: Bytes of an element of DeepSpeed's weights.
    """

    is_sharded = True

    def __init__(self, saved: StateForm, stage: int | None = None, width: int = MASTER) -> None:
        self.saved, self.stage, self.width = saved, stage, width

    def form(self) -> StateForm:
        """Return the form that `save_state` would write."""
        return self.saved


class FakeStrategy(Strategy):
    """Strategy that leaves models as they are."""

    features = frozenset(Feature)

    def check(self, bundle: Bundle) -> None:
        del bundle

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        del evaluation
        return bundle


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The element types of engines by the name of their precision."""


class FakeDeepSpeed(FakeStrategy):
    """Fake of DeepSpeed's engine: it fills and checks the configuration, and casts the model."""

    name = "deepspeed"

    def __init__(self, recorder: CollectiveRecorder, *arguments: Any) -> None:
        super().__init__(*arguments)
        _, runtime, precision, handlers = arguments
        self.plugin = plugin = _deepspeed_plugin(handlers)
        plugin.set_mixed_precision(precision.name)
        self.precision = EnginePrecision(name=plugin.mixed_precision, device_type=runtime.device.type)
        stage = int(plugin.get_value("zero_optimization.stage", 0))
        self.states = Sharded(StateForm.NATIVE, stage, MASTER if self.precision.name == "no" else 2)
        loading = handlers.get(DataLoaderConfiguration) or DataLoaderConfiguration()
        self.configuration = partial(
            configuration_of,
            plugin,
            world_size=runtime.topology.world_size,
            accumulation=accumulation_of(handlers.get(GradientAccumulationPlugin)),
            split_batches=loading.split_batches,
        )
        self.recorder = recorder

    def check(self, bundle: Bundle) -> None:
        check_materialised(bundle)
        check_request(self.plugin.hf_ds_config, bundle, trains=False)
        if bundle.models:
            self.configuration(bundle.models[0], bundle)

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        if not bundle.models or evaluation:
            return bundle
        self.recorder.buckets = buckets_of(self.configuration(bundle.models[0], bundle))
        dtype = DTYPES.get(self.plugin.mixed_precision)
        models = [model if dtype is None else model.to(dtype) for model in bundle.models]
        optimizers: list[Any] = [
            torch.optim.AdamW(optimizer.params) if isinstance(optimizer, DummyOptim) else optimizer
            for optimizer in bundle.optimizers
        ]
        return _with_real_schedulers(replace(bundle, models=models, optimizers=optimizers), DummyScheduler)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model


_BUCKET_KEYS = {
    "reduce": "reduce_bucket_size",
    "prefetch": "stage3_prefetch_bucket_size",
    "live": "stage3_max_live_parameters",
}


def buckets_of(configuration: dict[str, Any]) -> Buckets:
    """Return the buckets that a configuration allocates, with DeepSpeed's defaults.

    Example:
        >>> buckets_of({"zero_optimization": {"reduce_bucket_size": 1e6}}).reduce
        1000000
    """
    zero = configuration.get("zero_optimization", {})
    return Buckets(**{name: int(zero[key]) for name, key in _BUCKET_KEYS.items() if key in zero})


class FakeMegatron(FakeStrategy):
    """Fake of Megatron's engine with its checks: models stay unsharded."""

    name = "megatron"

    def __init__(self, recorder: CollectiveRecorder, *arguments: Any) -> None:
        super().__init__(*arguments)
        _, runtime, _, handlers = arguments
        self.plugin = _megatron_plugin(handlers)
        self.plugin.set_mixed_precision(AcceleratorState().mixed_precision)
        self.groups = groups_of(self.plugin, runtime.topology.world_size, runtime.topology.rank)
        self.sharding = batch_sharding(self.plugin, self.groups)
        self.recorder = recorder

    def check(self, bundle: Bundle) -> None:
        megatron.check_request(self.plugin, bundle)

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        del evaluation
        plugin, groups = self.plugin, self.groups
        if plugin.custom_model_provider_function is None:
            for model in bundle.models:
                last = plugin.decoder_last_pipeline_num_layers
                stages = stage_elements(model, groups.tensor, groups.pipeline, last=last)
                self.recorder.on_rank = stages[groups.pipeline_rank]
        loaders = [with_all_micro_batches(loader, plugin) for loader in bundle.dataloaders]
        return _with_real_schedulers(replace(bundle, dataloaders=loaders), MegatronLMDummyScheduler)


def _with_real_schedulers(bundle: Bundle, placeholder: type[Any]) -> Bundle:
    schedulers: list[Any] = [
        LambdaLR(bundle.optimizers[0], lambda _: 1.0) if isinstance(scheduler, placeholder) else scheduler
        for scheduler in bundle.schedulers
    ]
    return replace(bundle, schedulers=schedulers)


FORMS: Mapping[StateForm, str] = {
    StateForm.FULL: "whole",
    StateForm.SHARDED: "sharded",
    StateForm.NATIVE: "by rank",
}
"""The names of the forms: one rank writes everything; all ranks write shards that any number of ranks can
read; all ranks write shards in the strategy's own way."""


def files_of(
    run: CheckpointContext, full_models: Mapping[nn.Module, nn.Module], *, safe: bool
) -> Iterator[tuple[str, int, int]]:
    """Yield the files that a rank would write, with their bytes and those of all ranks' shards.

    Small files count as 0 bytes. Of models that are cut into stages, `full_models` are the full ones.
    """
    prepared, shards = run.prepared, run.strategy.states
    sharded = shards if isinstance(shards, Sharded) else None
    if sharded is not None and sharded.stage is not None:
        yield from _engine_files(run, sharded.stage, sharded.width)
    else:
        yield from _state_files(run, full_models, safe, sharded is not None)
    if run.commits:
        yield from ((layout.scheduler_name(index), 0, 0) for index, _ in enumerate(prepared.schedulers))
        yield from ((layout.custom_name(index), 0, 0) for index, _ in enumerate(run.custom))
    if prepared.dataloaders:
        yield layout.position_name(run.rank), 0, 0
    yield layout.rng_name(run.rank), 0, 0


def _state_files(
    run: CheckpointContext, full_models: Mapping[nn.Module, nn.Module], safe: bool, estimated: bool
) -> Iterator[tuple[str, int, int]]:
    """Yield the files of models and optimizers in the form of the run."""
    rank, ranks, form = run.rank, run.runtime.topology.world_size, form_of_run(run)
    if form is StateForm.FULL and not run.commits:
        return
    for names, nbytes, shards in _states(run, full_models, safe):
        if form is StateForm.FULL:
            yield names[form], nbytes, nbytes
        else:
            planned = (
                0
                if estimated
                else ShardWriter({"state": shards()}, rank, run.strategy.states.planners).nbytes
            )
            shard_nbytes = nbytes // ranks if estimated else planned
            yield f"{names[form]}/{shard_file(rank)}", shard_nbytes, nbytes
            if run.commits:
                yield f"{names[form]}/{INDEX_NAME}", 0, 0


def _states(
    run: CheckpointContext, full_models: Mapping[nn.Module, nn.Module], safe: bool
) -> Iterator[tuple[Mapping[StateForm, str], int, Callable[[], Any]]]:
    """Yield the name by form, the bytes, and this rank's shards of each model and optimizer."""
    models, shards = run.prepared.models, run.strategy.states
    for index, model in enumerate(models):
        names = {
            StateForm.FULL: layout.full_weights_names(index)[not safe],
            StateForm.SHARDED: layout.sharded_model_name(index),
        }
        full = full_models.get(model, model)
        yield names, full_nbytes(full.state_dict()), lambda model=model: shards.model_tensors(model)
    for index, optimizer in enumerate(run.prepared.optimizers):
        names = {
            StateForm.FULL: layout.optimizer_name(index),
            StateForm.SHARDED: layout.sharded_optimizer_name(index),
        }
        inner = optimizer.optimizer
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        # Before the first step there is no state yet: count that of Adam.
        nbytes = full_nbytes([*optimizer.state.values()]) or ADAM * sum(p.numel() for p in parameters)
        if full_models:  # the states of other stages are like those of this one
            nbytes = nbytes * _trained(full_models.values()) // max(1, _trained(full_models))
        yield names, nbytes, lambda inner=inner: shards.optimizer_tensors(inner, models)


def _trained(models: Iterable[nn.Module]) -> int:
    return sum(p.numel() for model in models for p in model.parameters() if p.requires_grad)


def _engine_files(run: CheckpointContext, stage: int, width: int) -> Iterator[tuple[str, int, int]]:
    """Yield the files of DeepSpeed's engines (`accel_plugins.deepspeed.folder`)."""
    rank, ranks = run.rank, run.runtime.topology.world_size
    for index, model in enumerate(run.prepared.models):
        elements, trained = sum(parameter.numel() for parameter in model.parameters()), _trained([model])
        folder = layout.engine_name(index)
        weights, states = width * elements, (MASTER + ADAM) * trained
        if stage == 3:
            yield f"{folder}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt", weights // ranks, weights
        elif rank == 0:
            size = weights + (0 if stage else ADAM * trained)
            yield f"{folder}/mp_rank_00_model_states.pt", size, size
        if stage:
            prefix = "bf16_" if width == 2 else ""
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            yield f"{folder}/{name}", states // ranks, states


def full_nbytes(data: Any) -> int:
    """Return the bytes of all tensors in nested data, each once; a sharded one counts in full."""
    sizes: dict[int, int] = {}
    for leaf in tree_leaves(data):
        if isinstance(leaf, Tensor):
            sizes[storage_key(local_part(leaf))] = leaf.numel() * leaf.element_size()
    return sum(sizes.values())
