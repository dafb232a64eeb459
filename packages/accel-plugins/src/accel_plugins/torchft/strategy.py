"""The strategies of replica groups: DDP or FSDP2 in each, averaged over the groups that are alive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accel_ops.modules import without_compiler
from accel_plugins.ddp import DdpStrategy, DistributedDataParallelKwargs
from accel_plugins.fsdp.fsdp2 import Fsdp2Strategy
from accel_plugins.kwargs import ReplicaSyncKwargs
from accel_plugins.strategy import Bundle, Feature
from accel_plugins.torchft.groups import ReplicaGroups
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.labels import DDPCommunicationHookType
from accel_state.runtime import Runtime
from accel_state.settings.model import Settings


class ReplicaStrategy(DdpStrategy):
    """Put models into DDP, with gradients averaged over replica groups."""

    name = "torchft"
    keeps_sharded = False

    def setup(self) -> None:
        _check(self.settings, self.runtime)
        super().setup()
        self.options = self.handlers.get(DistributedDataParallelKwargs) or DistributedDataParallelKwargs()
        if self.options.comm_hook is not DDPCommunicationHookType.NO:
            raise SettingsError(
                f"DistributedDataParallelKwargs(comm_hook={self.options.comm_hook.value!r}): "
                "strategy='torchft' has its own communication hook, which averages over the living groups."
            )
        self.groups = _join_groups(self)

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Move models to the device and wrap the trainable ones; the groups agree in their first step."""
        if not evaluation:
            self.groups.optimizers += bundle.optimizers
        return super().wrap(bundle, evaluation=evaluation)

    def wrap_model(self, model: nn.Module) -> DistributedDataParallel:
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

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        return _step(self, self.precision.step, optimizer, closure)

    def release(self) -> None:
        self.groups.release()


class ShardedReplicaStrategy(Fsdp2Strategy):
    """Shard models over a group, and average the shards' gradients over all groups."""

    name = "torchft_fsdp2"
    keeps_sharded = False

    def setup(self) -> None:
        _check(self.settings, self.runtime)
        apart = self.handlers.get(ReplicaSyncKwargs)
        if apart is not None and apart.outer_optimizer is not None:
            raise UnsupportedError(
                "ReplicaSyncKwargs(outer_optimizer=...): torchft's DiLoCo cannot send the state of sharded "
                "parameters to a group that heals. Train without it, or by DDP in each group."
            )
        super().setup()
        self.groups = _join_groups(self, is_sharded=True)

    def wrap(self, bundle: Bundle, *, evaluation: bool = False, **options: Any) -> Bundle:
        """Shard models; `options` are those of `ShardedStrategy.wrap`."""
        known = [self.is_prepared(without_compiler(model)) for model in bundle.models]
        bundle = super().wrap(bundle, evaluation=evaluation, **options)
        if evaluation:
            return bundle
        for model, is_known in zip(map(without_compiler, bundle.models), known, strict=True):
            if is_known or not any(parameter.requires_grad for parameter in model.parameters()):
                continue
            for module in model.modules():
                if isinstance(module, FSDPModule) and self.groups.apart is None:
                    module.set_all_reduce_hook(self.groups.average_shard)
            _open_before(model, self.groups)
            self.groups.models.append(model)
        self.groups.optimizers += bundle.optimizers
        return bundle

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        return _step(self, super().step, optimizer, closure)

    def release(self) -> None:
        self.groups.release()
        super().release()


def _check(settings: Settings, runtime: Runtime) -> None:
    """Refuse engines that would ignore the other groups, and untested axes."""
    sizes = settings.parallelism
    others = [
        f"{axis}_size"
        for axis in ("pp", "tp", "cp", "sp", "ep")
        if (getattr(sizes, f"{axis}_size", 0) or 1) > 1
    ]
    others += [name for name in ("deepspeed", "megatron") if getattr(settings, name) is not None]
    others += ["XLA"] if runtime.device.type == "xla" else []
    if others:
        raise UnsupportedError(
            f"Replica groups train by DDP or FSDP2 in each group, and not with {others[0]}: leave it out."
        )


def _join_groups(
    strategy: ReplicaStrategy | ShardedReplicaStrategy, *, is_sharded: bool = False
) -> ReplicaGroups:
    """Extend the strategy of one group's ranks to all groups."""
    own, settings = strategy.sharding, strategy.settings.replicas
    groups = ReplicaGroups(strategy, is_sharded=is_sharded)
    strategy.sharding = replace(
        own,
        num_shards=settings.groups * own.num_shards,
        shard_index=settings.group * own.num_shards + own.shard_index,
    )
    # Counts and norms would cover only one group.
    strategy.features -= {Feature.UNEVEN_INPUTS, Feature.ITEM_COUNTS, Feature.STEP_GUARD}
    strategy.generators = strategy.replicas = groups
    return groups


def _step(
    strategy: ReplicaStrategy | ShardedReplicaStrategy,
    step: Callable[..., bool | Tensor],
    optimizer: Optimizer,
    closure: Callable[[], float] | None,
) -> bool | Tensor:
    """Step if the groups agree; otherwise the step is skipped."""
    groups = strategy.groups
    if groups.commits():
        stepped = step(optimizer, closure)
        if stepped is not False:
            groups.after_step()
        return stepped
    if (scaler := strategy.precision.scaler) is not None:
        scaler.update(scaler.get_scale())  # clears the state of already unscaled gradients
    return False


def _open_before(model: nn.Module, groups: ReplicaGroups) -> None:
    """Begin a step of the groups in the first forward pass in training, before the model's other hooks."""

    def open_step(model: nn.Module, _: Any) -> None:
        if model.training and torch.is_grad_enabled():
            groups.open()

    model.register_forward_pre_hook(open_step, prepend=True)
