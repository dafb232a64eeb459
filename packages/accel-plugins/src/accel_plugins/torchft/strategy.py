"""The strategies of replica groups: DDP or FSDP2 in each, averaged over the groups that are alive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from accel_ops.modules import without_compiler
from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.fsdp import fsdp2
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs import ReplicaSyncKwargs
from accel_plugins.parallelism.config import check_axes
from accel_plugins.sharding.wrap import ShardedWrapper
from accel_plugins.strategy import (
    PLAIN_FEATURES,
    BatchSharding,
    Bundle,
    Feature,
    PrecisionPolicy,
    Stepper,
    Strategy,
)
from accel_plugins.torchft.groups import ReplicaGroups
from accel_plugins.unsharded import ReplicatedPersister, TorchStepper, check_materialised, move_to_device
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.frozen import frozen
from accel_state.labels import DDPCommunicationHookType
from accel_state.runtime import Runtime
from accel_state.settings.model import Settings
from accel_state.settings.run import ReplicaSettings


def build(
    settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
) -> Strategy:
    """Build the strategy of a replica group whose ranks have full models."""
    topology = runtime.topology
    _check(settings, runtime)
    check_axes(handlers, topology.world_size)
    options = handlers.get(DistributedDataParallelKwargs) or DistributedDataParallelKwargs()
    if options.comm_hook is not DDPCommunicationHookType.NO:
        raise SettingsError(
            f"DistributedDataParallelKwargs(comm_hook={options.comm_hook.value!r}): strategy='torchft' "
            "has its own communication hook, which averages over the living groups."
        )
    groups = ReplicaGroups(settings.replicas, runtime, apart=handlers.get(ReplicaSyncKwargs))
    inner = Strategy(
        name="torchft",
        wrapper=ReplicaWrapper(runtime=runtime, groups=groups, options=options),
        stepper=TorchStepper(precision=precision, no_sync_of=_no_sync),
        persister=ReplicatedPersister(),
        sharding=BatchSharding(num_shards=topology.world_size, shard_index=topology.rank),
        features=PLAIN_FEATURES,
    )
    return _with_groups(inner, groups, settings.replicas, precision)


def build_sharded(
    settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
) -> Strategy:
    """Build the strategy of a replica group whose ranks have shards, by FSDP2."""
    _check(settings, runtime)
    plugin = handlers.get(FullyShardedDataParallelPlugin)
    if plugin is not None and plugin.version != 2:
        raise SettingsError("Replica groups shard models by FSDP2: set fsdp_version=2 (--fsdp_version 2).")
    apart = handlers.get(ReplicaSyncKwargs)
    if apart is not None and apart.outer_optimizer is not None:
        raise UnsupportedError(
            "ReplicaSyncKwargs(outer_optimizer=...): torchft's DiLoCo cannot send the state of sharded "
            "parameters to a group that heals. Train without it, or by DDP in each group."
        )
    groups = ReplicaGroups(settings.replicas, runtime, is_sharded=True, apart=apart)
    inner = fsdp2.build(settings, runtime, precision, handlers)
    wrapper: Any = inner.wrapper
    inner = replace(inner, name="torchft_fsdp2", wrapper=ShardedReplicaWrapper(inner=wrapper, groups=groups))
    return _with_groups(inner, groups, settings.replicas, precision)


def _check(settings: Settings, runtime: Runtime) -> None:
    """Refuse engines that would ignore the other groups, and untested axes."""
    sizes = settings.parallelism
    axes = [axis for axis in ("tp", "cp", "sp", "ep") if sizes and (getattr(sizes, f"{axis}_size") or 1) > 1]
    if axes:
        raise UnsupportedError(
            f"Replica groups have no axis {axes[0]}: their ranks replicate or shard a model. Leave "
            f"{axes[0]}_size at 1."
        )
    engine = "DeepSpeed" if settings.deepspeed is not None else None
    engine = "Megatron" if settings.megatron is not None else engine
    engine = "a pipeline (pp_size)" if sizes is not None and (sizes.pp_size or 1) > 1 else engine
    engine = "XLA" if runtime.device.type == "xla" else engine
    if engine is not None:
        raise SettingsError(f"Replica groups train by DDP or FSDP2 in each group, and not by {engine}.")


def _with_groups(
    inner: Strategy, groups: ReplicaGroups, settings: ReplicaSettings, precision: PrecisionPolicy
) -> Strategy:
    """Extend the strategy of one group's ranks to all groups."""
    own, release = inner.sharding, inner.release

    def release_all() -> None:
        groups.release()
        if release is not None:
            release()

    return replace(
        inner,
        stepper=ReplicaStepper(groups=groups, inner=inner.stepper, precision=precision),
        sharding=replace(
            own,
            num_shards=settings.groups * own.num_shards,
            shard_index=settings.group * own.num_shards + own.shard_index,
        ),
        features=inner.features & FEATURES,
        generators=groups,
        release=release_all,
        replicas=groups,
    )


FEATURES = PLAIN_FEATURES - {
    Feature.UNEVEN_INPUTS,
    Feature.ITEM_COUNTS,  # they would cover only one group
}
"""The features of replica groups."""


@frozen
class ReplicaWrapper:
    """Model wrapper that puts models into DDP, with gradients averaged over replica groups."""

    runtime: Runtime
    groups: ReplicaGroups
    options: DistributedDataParallelKwargs

    def check(self, bundle: Bundle) -> None:
        check_materialised(bundle)

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Move models to the device and wrap the trainable ones; the groups agree in their first step."""
        models = move_to_device(bundle, self.runtime.device)
        if not evaluation:
            models = [
                model
                if isinstance(without_compiler(model), DistributedDataParallel)
                or not any(parameter.requires_grad for parameter in model.parameters())
                else self._wrap(model)
                for model in models
            ]
            self.groups.optimizers += bundle.optimizers
        return replace(bundle, models=models)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def _wrap(self, model: nn.Module) -> nn.Module:
        self.groups.equalize([model])
        # The hook below communicates, and nothing else may: groups join and leave between steps.
        nothing = import_module("torchft.process_group").ProcessGroupDummy(0, 1)
        options: dict[str, Any] = self.options.to_kwargs() | {
            "find_unused_parameters": True,
            "process_group": nothing,
        }
        wrapped = DistributedDataParallel(model, **options)
        wrapped.register_comm_hook(self.groups, lambda groups, bucket: groups.average(bucket))
        _open_before(wrapped, self.groups)
        self.groups.models.append(model)
        return wrapped


@frozen
class ShardedReplicaWrapper:
    """Model wrapper that shards models over a group, and averages the shards' gradients over all groups."""

    inner: ShardedWrapper
    groups: ReplicaGroups

    def check(self, bundle: Bundle) -> None:
        self.inner.check(bundle)

    def wrap(self, bundle: Bundle, *, evaluation: bool = False, **options: Any) -> Bundle:
        """Shard models; `options` are those of `ShardedWrapper.wrap`."""
        known = [self.inner.remap.has(without_compiler(model)) for model in bundle.models]
        bundle = self.inner.wrap(bundle, evaluation=evaluation, **options)
        if evaluation:
            return bundle
        for model, is_known in zip(map(without_compiler, bundle.models), known, strict=True):
            if is_known or not any(parameter.requires_grad for parameter in model.parameters()):
                continue
            for module in model.modules():
                if isinstance(module, FSDPModule) and self.groups.averages_gradients:
                    module.set_all_reduce_hook(self.groups.average_shard)
            _open_before(model, self.groups)
            self.groups.models.append(model)
        self.groups.optimizers += bundle.optimizers
        return bundle

    def unwrap(self, model: nn.Module) -> nn.Module:
        return self.inner.unwrap(model)


def _open_before(model: nn.Module, groups: ReplicaGroups) -> None:
    """Begin a step of the groups in the first forward pass in training, before the model's other hooks."""

    def open_step(model: nn.Module, _: Any) -> None:
        if model.training and torch.is_grad_enabled():
            groups.open()

    model.register_forward_pre_hook(open_step, prepend=True)


def _no_sync(model: nn.Module) -> AbstractContextManager[None]:
    inner = without_compiler(model)
    return inner.no_sync() if isinstance(inner, DistributedDataParallel) else nullcontext()


class ReplicaStepper:
    """Stepper that steps when all groups of the quorum have the gradients; see `TorchStepper`.

    Args:
        groups: The agreement of the groups.
        inner: The stepper of the group, for everything else.
        precision: The precision policy, which scales losses.
    """

    def __init__(self, *, groups: ReplicaGroups, inner: Stepper, precision: PrecisionPolicy) -> None:
        self._groups, self._inner, self._precision = groups, inner, precision
        self.backward = inner.backward
        self.no_sync = inner.no_sync
        self.join = inner.join
        self.clip_grad_norm = inner.clip_grad_norm
        self.clip_grad_value = inner.clip_grad_value

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], float] | None = None
    ) -> bool | torch.Tensor:
        """Step if the groups agree; otherwise the step is skipped."""
        if self._groups.commits():
            before = self._groups.num_agreed
            stepped = self._inner.step(optimizer, closure)
            if stepped is not False:
                self._groups.after_step(before)
            return stepped
        if (scaler := self._precision.scaler) is not None:
            scaler.update(scaler.get_scale())  # clears the state of already unscaled gradients
        return False
