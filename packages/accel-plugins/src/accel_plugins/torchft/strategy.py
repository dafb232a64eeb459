"""The strategy `torchft`: DDP in each replica group, and an average over the groups that are alive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_ops.modules import without_compiler
from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.parallelism.config import check_axes
from accel_plugins.strategy import PLAIN_FEATURES, BatchSharding, Bundle, Feature, PrecisionPolicy, Strategy
from accel_plugins.torchft.groups import ReplicaGroups
from accel_plugins.unsharded import ReplicatedPersister, TorchStepper, check_materialised, move_to_device
from accel_state.errors import SettingsError
from accel_state.frozen import frozen
from accel_state.labels import DDPCommunicationHookType
from accel_state.runtime import Runtime
from accel_state.settings.model import Settings


def build(
    settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
) -> Strategy:
    """Make the strategy of a replica group."""
    topology = runtime.topology
    check_axes(handlers, topology.world_size)
    options = handlers.get(DistributedDataParallelKwargs) or DistributedDataParallelKwargs()
    if options.comm_hook is not DDPCommunicationHookType.NO:
        raise SettingsError(
            f"DistributedDataParallelKwargs(comm_hook={options.comm_hook.value!r}): strategy='torchft' has a "
            "communication hook of its own, which averages over the groups that are alive."
        )
    groups = ReplicaGroups(settings.replicas, runtime)
    stepper = ReplicaStepper(
        groups=groups, inner=TorchStepper(precision=precision, no_sync_of=_no_sync), precision=precision
    )
    return Strategy(
        name="torchft",
        wrapper=ReplicaWrapper(runtime=runtime, groups=groups, options=options),
        stepper=stepper,
        persister=ReplicatedPersister(),
        sharding=BatchSharding(
            num_shards=settings.replicas.groups * topology.world_size,
            shard_index=settings.replicas.group * topology.world_size + topology.rank,
        ),
        features=FEATURES,
        generators=groups,
        release=groups.release,
        replicas=groups,
    )


FEATURES = PLAIN_FEATURES - {
    Feature.UNEVEN_INPUTS,
    Feature.ITEM_COUNTS,  # they would be those of one group
}
"""The features of replica groups."""


@frozen
class ReplicaWrapper:
    """Model wrapper that puts models into DDP whose gradients are averaged over replica groups."""

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
        wrapped.register_forward_pre_hook(self._open)
        self.groups.models.append(model)
        return wrapped

    def _open(self, model: nn.Module, _: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self.groups.open()


def _no_sync(model: nn.Module) -> AbstractContextManager[None]:
    inner = without_compiler(model)
    return inner.no_sync() if isinstance(inner, DistributedDataParallel) else nullcontext()


class ReplicaStepper:
    """Stepper that steps when all groups of the quorum have the gradients; see `TorchStepper`.

    Args:
        groups: The agreement of the groups.
        inner: Does everything else.
        precision: Scales losses.
    """

    def __init__(self, *, groups: ReplicaGroups, inner: TorchStepper, precision: PrecisionPolicy) -> None:
        self._groups, self._inner, self._precision = groups, inner, precision
        self.backward = inner.backward
        self.no_sync = inner.no_sync
        self.join = inner.join
        self.clip_grad_norm = inner.clip_grad_norm
        self.clip_grad_value = inner.clip_grad_value

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], float] | None = None
    ) -> bool | torch.Tensor:
        """Step if the groups have agreed to; otherwise the step was skipped."""
        if self._groups.commits():
            return self._inner.step(optimizer, closure)
        if (scaler := self._precision.scaler) is not None:
            scaler.update(scaler.get_scale())  # forgets that gradients may be unscaled already
        return False
