"""The strategies of the check: which run as they are, and fakes of the engines.

Strategies that shard models with PyTorch's own API run as they are, on a fake process group. Under the others
models stay unsharded, and their memory is estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from accel_inspect.estimate.memory import Buckets
from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.deepspeed.config import DummyOptim, DummyScheduler
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.deepspeed.strategy import check_request, configuration_of, tensor_size_of
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin, form_of
from accel_plugins.megatron import strategy as megatron
from accel_plugins.megatron.data import MegatronLMDummyScheduler, with_all_micro_batches
from accel_plugins.megatron.plugin import MegatronLMPlugin
from accel_plugins.megatron.strategy import batch_sharding, groups_of
from accel_plugins.precision import EnginePrecision
from accel_plugins.sharding.state import StateForm
from accel_plugins.strategy import Bundle, Feature, Strategy
from accel_plugins.unsharded import States, check_materialised
from accel_state.accelerator_state import AcceleratorState
from accel_train.checkpoint import layout

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_inspect.check.recorder import CollectiveRecorder


REAL = frozenset({"fsdp2", "pipeline", "tp"})
"""Strategies whose own code runs in the check: FSDP2, pipelines, tensor and context parallelism."""


class EngineStates(States):
    """The checkpoints of an engine whose own code does not run: the folder of its files."""

    is_sharded = True

    def __init__(self, form: StateForm, folder_name: Callable[[int], str]) -> None:
        self._form, self._folder_name = form, folder_name

    def form(self) -> StateForm:
        """Return the form that `save_state` would write; shards are files of the engine here."""
        return StateForm.FULL if self._form is StateForm.FULL else StateForm.NATIVE

    def save_native(self, model: nn.Module, directory: Path, index: int, *, write: Any = torch.save) -> None:
        del model
        write(None, directory / self._folder_name(index))


class FakeStrategy(Strategy):
    """Strategy that leaves models as they are; unless it says otherwise, it is estimated as DDP."""

    features = frozenset(Feature)

    def __init__(self, recorder: CollectiveRecorder, name: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.recorder, self.name, self.handlers = recorder, name, arguments[-1]
        in_buckets = self.handler(DistributedDataParallelKwargs).gradient_as_bucket_view
        several = "DDP, gradients in buckets" if in_buckets else "DDP"
        recorder.counted_as = "one device" if name == "single" else several

    def handler(self, kind: type[Any]) -> Any:
        """Return the handler of the run of a type, or the default one."""
        return self.handlers.get(kind) or kind()

    def check(self, bundle: Bundle) -> None:
        del bundle

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        del evaluation
        return bundle

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        if sync:
            self.recorder.record("backward")
        super().backward(loss, accumulation=accumulation, sync=sync, **kwargs)

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        del closure
        optimizer.step()
        return True


class FakeFsdp1(FakeStrategy):
    """Fake of FSDP1, which is estimated as FSDP2."""

    keeps_weight_types = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        plugin = self.handler(FullyShardedDataParallelPlugin)
        self.states = EngineStates(form_of(plugin), layout.sharded_model_name)
        sharding = getattr(plugin.sharding_strategy, "name", "")
        is_offloaded = getattr(plugin.cpu_offload, "offload_params", plugin.cpu_offload)
        names = {"NO_SHARD": "DDP", "SHARD_GRAD_OP": "FSDP2, gathered once"}
        self.recorder.counted_as = "FSDP2, offloaded" if is_offloaded else names.get(sharding, "FSDP2")


class FakeDeepSpeed(FakeStrategy):
    """Fake of DeepSpeed's engine: it fills and checks the configuration, and casts the model."""

    keeps_weight_types = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        handler = self.handler(DeepSpeedPlugin)
        self.plugin: Any = next(iter(handler.values())) if isinstance(handler, dict) else handler
        self.plugin.set_mixed_precision(self.precision.name)
        self.stage = int(self.plugin.get_value("zero_optimization.stage", 0))
        self.precision = EnginePrecision(self.plugin.mixed_precision, self.runtime.device.type)
        self.states = EngineStates(StateForm.NATIVE, layout.engine_name)
        keys = (f"zero_optimization.offload_{what}.device" for what in ("optimizer", "param"))
        optimizer, weights = (self.plugin.get_value(key, None) not in {None, "none"} for key in keys)
        weights = weights if self.stage == 3 else optimizer
        what = "" if weights and optimizer else "weights " if weights else "optimizer "
        offloaded = f", {what}offloaded" if weights or optimizer else ""
        self.recorder.counted_as = f"ZeRO-{self.stage}{offloaded}" if self.stage else "DDP"

    def check(self, bundle: Bundle) -> None:
        check_materialised(bundle)
        check_request(self.plugin.hf_ds_config, bundle, trains=False)
        if not bundle.models:
            return
        world_size = self.runtime.topology.world_size // tensor_size_of(self.plugin)
        configuration = configuration_of(self.plugin, bundle.models[0], bundle, world_size, self.handlers)
        zero = configuration.get("zero_optimization", {})
        keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters")
        names = zip(("reduce", "prefetch", "live"), keys, strict=True)
        buckets = {name: int(zero[key]) for name, key in names if key in zero}
        self.recorder.setup["buckets"] = Buckets(**buckets)

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        if not bundle.models or evaluation:
            return bundle
        optimizers: list[Any] = [
            torch.optim.AdamW(optimizer.params) if isinstance(optimizer, DummyOptim) else optimizer
            for optimizer in bundle.optimizers
        ]
        models: list[Any] = [model.to(self.precision.dtype) for model in bundle.models]
        for model in models:
            model.get_global_grad_norm = lambda: 1.0  # of the engine, which scripts ask
        return _with_real_schedulers(replace(bundle, models=models, optimizers=optimizers), DummyScheduler)


class FakeMegatron(FakeStrategy):
    """Fake of Megatron's engine with its checks: models stay unsharded, and their memory is not estimated."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        topology, self.plugin = self.runtime.topology, self.handler(MegatronLMPlugin)
        self.plugin.set_mixed_precision(AcceleratorState().mixed_precision)
        groups = groups_of(self.plugin, topology.world_size, topology.rank)
        self.sharding = batch_sharding(self.plugin, groups)
        self.recorder.counted_as = ""

    def check(self, bundle: Bundle) -> None:
        megatron.check_request(self.plugin, bundle)

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        del evaluation
        loaders = [with_all_micro_batches(loader, self.plugin) for loader in bundle.dataloaders]
        return _with_real_schedulers(replace(bundle, dataloaders=loaders), MegatronLMDummyScheduler)


def _with_real_schedulers(bundle: Bundle, placeholder: type[Any]) -> Bundle:
    schedulers: list[Any] = [
        LambdaLR(bundle.optimizers[0], lambda _: 1.0) if isinstance(scheduler, placeholder) else scheduler
        for scheduler in bundle.schedulers
    ]
    return replace(bundle, schedulers=schedulers)


FAKES: Mapping[str, Any] = {"fsdp1": FakeFsdp1, "deepspeed": FakeDeepSpeed, "megatron": FakeMegatron}
"""The fakes of engines by the name of the strategy; others are `FakeStrategy`."""
