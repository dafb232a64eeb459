"""The strategy of a checked rank, with a recorder of its collectives.

Strategies that shard models with PyTorch's own API run as they are, on a fake process group. Under the others
models stay unsharded, and their memory is estimated.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import CPUOffloadPolicy

from accel_cli.commands.check.checkpoint import Sharded
from accel_cli.commands.check.engines import FakeDeepSpeed, FakeMegatron, plugin_of
from accel_cli.commands.check.parts import on_parts
from accel_cli.commands.check.trace import Chosen
from accel_cli.commands.estimate.memory import MASTER
from accel_plugins.dcp.protocol import StateForm
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.fsdp.fields import form_of
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs.ddp import DistributedDataParallelKwargs
from accel_plugins.kwargs.run import DataLoaderConfiguration, GradientAccumulationPlugin
from accel_plugins.megatron.groups import groups_of
from accel_plugins.precision.amp import EnginePrecision
from accel_plugins.strategies.deepspeed import accumulation_of
from accel_plugins.strategies.megatron import batch_sharding
from accel_plugins.strategies.replicated import ReplicatedPersister
from accel_plugins.strategies.torch_step import TorchStepper
from accel_plugins.strategy import BatchSharding, Feature, Strategy, StrategySpec
from accel_state.accelerator_state import AcceleratorState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_cli.commands.check.recorder import CollectiveRecorder
    from accel_plugins.bundle import Bundle
    from accel_plugins.roles import PrecisionPolicy
    from accel_state.runtime import Runtime
    from accel_state.settings.model import Settings

REAL = frozenset({"fsdp2", "tp"})
"""Strategies whose own code runs in the check: DDP, FSDP2, tensor and context parallelism."""


class UnchangedWrapper:
    """Model wrapper that leaves models as they are."""

    def check(self, bundle: Bundle) -> None:
        """Accept everything."""

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Return the bundle."""
        del evaluation
        return bundle

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model."""
        return model


class ObservedWrapper:
    """Model wrapper that records which models are prepared."""

    def __init__(self, recorder: CollectiveRecorder, inner: Any, *, shards: bool) -> None:
        self._recorder = recorder
        self._inner = inner
        self._shards = shards

    def check(self, bundle: Bundle) -> None:
        """Check as the strategy's wrapper does."""
        with self._recorder.silence():
            self._inner.check(bundle)

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Wrap, and record the models."""
        if bundle.models and not evaluation:
            self._recorder.saw("prepare")
        with self._recorder.silence():
            wrapped = self._inner.wrap(bundle, evaluation=evaluation)
        if wrapped.models and not evaluation:
            self._recorder.prepared(wrapped.models, sharded=self._shards)
        return wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside."""
        return self._inner.unwrap(model)


class ObservedStepper:
    """Stepper that records when gradients would be all-reduced.

    Args:
        communicates: Whether it communicates by itself, so that the recorder sees it anyway.
    """

    def __init__(self, recorder: CollectiveRecorder, inner: Any, *, communicates: bool) -> None:
        self._recorder = recorder
        self._inner = inner
        self._communicates = communicates

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        """Add the gradients of `loss / accumulation` to the parameters."""
        if sync and not self._communicates:
            self._recorder.saw("backward")
        self._inner.backward(loss, accumulation=accumulation, sync=sync, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Accumulate gradients without reducing them."""
        return self._inner.no_sync(model) if self._communicates else contextlib.nullcontext()

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        """Step the optimizer; attribute the tensors that it creates to its state."""
        with self._recorder.stepping(optimizer):
            if self._communicates:
                with on_parts(optimizer):
                    return self._inner.step(optimizer, closure)
            optimizer.step()
        return True


def loading(
    recorder: CollectiveRecorder, load: Callable[[str], Callable[..., Strategy]]
) -> Callable[[str | StrategySpec], Any]:
    """Make the patch of `accel_plugins.registry.load`."""

    def observed(strategy: str | StrategySpec) -> Callable[..., Strategy]:
        name = strategy if isinstance(strategy, str) else strategy.name

        def build(
            settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
        ) -> Strategy:
            is_real = name in REAL
            make = load(name) if is_real else partial(_fake_strategy, recorder, name)
            with recorder.outside():  # meshes need real values
                plain = make(settings, runtime, precision, handlers)
            recorder.strategy = _chosen(name, plain, handlers, plain.precision or precision)
            if isinstance(plain.wrapper, FakeMegatron):
                recorder.strategy = replace(recorder.strategy, axes=plain.wrapper.groups.axes)
            wrapper = ObservedWrapper(recorder, plain.wrapper, shards=is_real)
            stepper: Any = ObservedStepper(recorder, plain.stepper, communicates=is_real)
            return replace(plain, wrapper=wrapper, stepper=stepper)

        return build

    return observed


def _fake_strategy(
    recorder: CollectiveRecorder,
    name: str,
    settings: Settings,
    runtime: Runtime,
    precision: PrecisionPolicy,
    handlers: Mapping[type, Any],
) -> Strategy:
    del settings
    topology = runtime.topology
    shards: Any = Sharded(saved=form_of(_plugin(handlers))) if name == "fsdp1" else None
    plain = Strategy(
        name=name,
        wrapper=UnchangedWrapper(),
        stepper=TorchStepper(precision=precision),
        persister=ReplicatedPersister(),
        sharding=BatchSharding(num_shards=topology.world_size, shard_index=topology.rank),
        features=frozenset(Feature),
        shards=shards,
    )
    if name == "megatron":
        return _fake_megatron(recorder, plain, runtime, handlers)
    if name != "deepspeed":
        return plain
    plugin = _engine(handlers)
    plugin.set_mixed_precision(precision.name)
    engine_precision: Any = EnginePrecision(name=plugin.mixed_precision, device_type=runtime.device.type)
    stage = int(plugin.get_value("zero_optimization.stage", 0))
    shards = Sharded(
        saved=StateForm.NATIVE, stage=stage, width=MASTER if engine_precision.name == "no" else 2
    )
    loading = handlers.get(DataLoaderConfiguration) or DataLoaderConfiguration()
    return replace(
        plain,
        wrapper=FakeDeepSpeed(
            plugin=plugin,
            world_size=topology.world_size,
            accumulation=accumulation_of(handlers.get(GradientAccumulationPlugin)),
            split_batches=loading.split_batches,
            on_buckets=partial(setattr, recorder, "buckets"),
        ),
        stepper=TorchStepper(precision=engine_precision),
        precision=engine_precision,
        shards=shards,
    )


def _fake_megatron(
    recorder: CollectiveRecorder, plain: Strategy, runtime: Runtime, handlers: Mapping[type, Any]
) -> Strategy:
    plugin, topology = plugin_of(handlers), runtime.topology
    plugin.set_mixed_precision(AcceleratorState().mixed_precision)
    groups = groups_of(plugin, topology.world_size, topology.rank)
    return replace(
        plain,
        wrapper=FakeMegatron(
            runtime=runtime, plugin=plugin, groups=groups, on_elements=partial(setattr, recorder, "on_rank")
        ),
        sharding=batch_sharding(plugin, groups),
    )


def _chosen(name: str, plain: Strategy, handlers: Mapping[type, Any], precision: PrecisionPolicy) -> Chosen:
    mesh = plain.mesh
    axes = {} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    offloads = name == "fsdp2" and isinstance(_plugin(handlers).cpu_offload, CPUOffloadPolicy)
    counted_as = "" if name in REAL else _COUNTED.get(name, _as_ddp)(handlers)
    return Chosen(name=name, counted_as=counted_as, axes=axes, offloaded=offloads, precision=precision.name)


def _as_ddp(handlers: Mapping[type, Any]) -> str:
    options = handlers.get(DistributedDataParallelKwargs)
    return "DDP, gradients in buckets" if options and options.gradient_as_bucket_view else "DDP"


def _as_fsdp(handlers: Mapping[type, Any]) -> str:
    plugin = _plugin(handlers)
    offload = plugin.cpu_offload
    if getattr(offload, "offload_params", offload):
        return "FSDP2, offloaded"
    return {"NO_SHARD": "DDP", "SHARD_GRAD_OP": "FSDP2, gathered once"}.get(
        getattr(plugin.sharding_strategy, "name", ""), "FSDP2"
    )


def _as_zero(handlers: Mapping[type, Any]) -> str:
    plugin = _engine(handlers)
    stage = int(plugin.get_value("zero_optimization.stage", 0))
    optimizer, weights = (
        plugin.get_value(f"zero_optimization.offload_{what}.device", None) not in {None, "none"}
        for what in ("optimizer", "param")
    )
    suffix = _OFFLOADED[optimizer, weights if stage == 3 else optimizer]
    return f"ZeRO-{stage}{suffix}" if stage else "DDP"


def _as_megatron(handlers: Mapping[type, Any]) -> str:
    sharded = plugin_of(handlers).use_distributed_optimizer
    return "Megatron, distributed optimizer" if sharded else "Megatron"


# By whether the optimizer and the weights are offloaded.
_OFFLOADED = {
    (False, False): "",
    (True, True): ", offloaded",
    (True, False): ", optimizer offloaded",
    (False, True): ", weights offloaded",
}

# By the name of the strategy; others are estimated as DDP.
_COUNTED: Mapping[str, Callable[[Mapping[type, Any]], str]] = {
    "single": lambda _: "one device",
    "ddp": _as_ddp,
    "fsdp1": _as_fsdp,
    "deepspeed": _as_zero,
    "megatron": _as_megatron,
}


def _plugin(handlers: Mapping[type, Any]) -> FullyShardedDataParallelPlugin:
    return handlers.get(FullyShardedDataParallelPlugin) or FullyShardedDataParallelPlugin()


def _engine(handlers: Mapping[type, Any]) -> DeepSpeedPlugin:
    handler = handlers.get(DeepSpeedPlugin) or DeepSpeedPlugin()
    return next(iter(handler.values())) if isinstance(handler, dict) else handler
