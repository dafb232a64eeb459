"""Record what strategies do, and fake the engines.

Strategies that shard models with PyTorch's own API run as they are, on a fake process group. Under the others
models stay unsharded, and their memory is estimated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim.lr_scheduler import LambdaLR

from accel_inspect.check.recorder import CollectiveRecorder, nbytes_of
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
from accel_plugins.parallelism.config import ParallelismConfig
from accel_plugins.precision import EnginePrecision
from accel_plugins.sharding.state import StateForm, local_metadata_file
from accel_plugins.strategy import Bundle, Feature, Strategy, StrategySpec
from accel_plugins.unsharded import States, check_materialised
from accel_state.accelerator_state import AcceleratorState
from accel_state.torch_private import tree_map
from accel_train.checkpoint import layout
from accel_train.observing import Observer

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_state.remote import AnyPath
    from accel_train.checkpoint.context import CheckpointContext


REAL = frozenset({"fsdp2", "pipeline", "tp"})
"""Strategies whose own code runs in the check: FSDP2, pipelines, tensor and context parallelism."""


class CheckObserver(Observer):
    """Records what strategies do, and replaces those that are not `REAL` by fakes; reads few batches."""

    def __init__(self, recorder: CollectiveRecorder, batches: int) -> None:
        self.recorder, self._num_batches = recorder, batches

    def build(self, spec: StrategySpec, *arguments: Any) -> Strategy:
        """Build a strategy, or its fake, whose models and steps are recorded."""
        recorder, handlers, name = self.recorder, arguments[-1], spec.name
        recorder.is_sharded = name in REAL
        with recorder.on_real_tensors():  # Meshes need real values.
            if recorder.is_sharded:
                built = super().build(spec, *arguments)
            else:
                built = FAKES.get(name, FakeStrategy)(recorder, name, *arguments)
        if built.mesh is not None:
            axes = dict(zip(built.mesh.mesh_dim_names or (), built.mesh.shape, strict=True))
            if (config := handlers.get(ParallelismConfig)) is not None and config.ep_enabled:
                axes["ep"] = config.ep_size
            sizes = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
            name = f"{name}: {sizes}" if sizes else name
        recorder.strategy = name
        recorder.setup["width"] = 4 if built.precision.name == "no" else 2
        offload = getattr(handlers.get(FullyShardedDataParallelPlugin), "cpu_offload", None)
        recorder.is_offloaded = spec.name == "fsdp2" and isinstance(offload, CPUOffloadPolicy)
        wrap, step = built.wrap, built.step

        def wrap_recorded(bundle: Bundle, *, evaluation: bool = False, **options: Any) -> Bundle:
            is_trained = bool(bundle.models) and not evaluation
            if is_trained:
                with recorder.having(is_silent=False):
                    recorder.record("prepare")
            wrapped = wrap(bundle, evaluation=evaluation, **options)
            if is_trained:
                recorder.track(wrapped.models)
            return wrapped

        def step_recorded(optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
            with recorder.tracker.stepping(optimizer):
                return step(optimizer, closure)

        built.wrap, built.step = wrap_recorded, step_recorded
        return built

    def prepare(self, accelerator: Any, bundle: Bundle, run: Callable[[], Bundle]) -> Bundle:
        """Prepare objects; of models, what this sends is recorded as one operation."""
        del accelerator
        with self.recorder.having(is_silent=bool(bundle.models)):
            return run()

    def batches(self, loader: Any, read: Callable[[], Iterator[Any]]) -> Generator[Any]:
        """Yield the first batches as fake tensors, read outside of fake mode; mark the last one."""
        recorder = self.recorder
        vars(loader).update(num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False)
        with recorder.on_real_tensors():
            real_batches = read()
        for number in range(1, self._num_batches + 1):
            with recorder.on_real_tensors():
                upcoming = [*itertools.islice(real_batches, 1)]
                recorder.record_batch(loader, upcoming)
            if not upcoming:
                return
            if number == self._num_batches:
                vars(loader)["end_of_dataloader"] = True
            yield tree_map(_fake_like, upcoming[0])
        with recorder.on_real_tensors():
            del real_batches

    def saved(self, run: CheckpointContext, target: AnyPath, parts: Callable[[Path], list[Any]]) -> bool:
        """Record the files that this rank would write, and write none."""
        self.recorder.record("save_state")
        folder = Path(str(target))
        with suppress(FileExistsError):  # another rank was first
            folder.mkdir(parents=True)  # a copy, for hooks
        is_engine = isinstance(run.strategy.states, EngineStates)
        with self.recorder.having(is_silent=True), self.recorder.paused() if is_engine else nullcontext():
            for part in parts(folder):
                # The metadata of shards are there while others are written.
                if Path(part.name).name != local_metadata_file(run.rank):
                    self.recorder.record_file(str(folder / part.name), nbytes_of(part.state))
        return False


def _fake_like(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf


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
