"""DDP: the model is replicated on every rank; gradients are all-reduced during the backward pass."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from accel_ops.modules import without_compiler
from accel_plugins.kwargs.ddp import DistributedDataParallelKwargs
from accel_plugins.parallelism.config import check_axes
from accel_plugins.strategies.replicated import ReplicatedPersister, check_materialised, move_to_device
from accel_plugins.strategies.torch_step import TorchStepper
from accel_plugins.strategy import PLAIN_FEATURES, BatchSharding, Strategy
from accel_state import hang_monitor
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from accel_plugins.bundle import Bundle
    from accel_plugins.roles import PrecisionPolicy
    from accel_state.runtime import Runtime
    from accel_state.settings.model import Settings

_graphs_seen: WeakSet[nn.Module] = WeakSet()


class MonitoredDDP(DistributedDataParallel):
    """DDP whose own collectives in the forward pass, for buffers and for new buckets, are monitored."""

    @torch._disable_dynamo(recursive=False)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportUntypedFunctionDecorator] - torch.compiler.disable imports the compiler
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with hang_monitor.collective_scope("forward"):
            return super()._pre_forward(*inputs, **kwargs)

    @torch._disable_dynamo(recursive=False)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportUntypedFunctionDecorator] - as above
    def _post_forward(self, output: Any) -> Any:
        with hang_monitor.collective_scope("forward"):
            return super()._post_forward(output)

    def _get_name(self) -> str:
        return DistributedDataParallel.__name__  # printed as what it is


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpWrapper:
    """Model wrapper that puts models into `DistributedDataParallel`."""

    device: torch.device
    options: DistributedDataParallelKwargs

    def check(self, bundle: Bundle) -> None:
        """Refuse models with parameters on the meta device."""
        check_materialised(bundle)

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Move models to the device and wrap the trainable ones, which broadcasts the values of rank 0."""
        models = move_to_device(bundle, self.device)
        if not evaluation:
            models = [self._wrap(model) if _is_to_wrap(model) else model for model in models]
        return replace(bundle, models=models)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def _wrap(self, model: nn.Module) -> nn.Module:
        with hang_monitor.collective_scope("prepare"), warnings.catch_warnings():
            # The documented option, with the documented meaning, is deprecated by newer versions of torch.
            warnings.filterwarnings("ignore", message=".*`broadcast_buffers` is deprecated")
            wrapped = MonitoredDDP(model, device_ids=_device_ids(model), **self.options.to_kwargs())
        self.options.register_comm_hook(wrapped)
        return wrapped


def build(
    settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
) -> Strategy:
    """Make the strategy of a run with several processes."""
    del settings
    topology = runtime.topology
    check_axes(handlers, topology.world_size)
    options = handlers.get(DistributedDataParallelKwargs) or DistributedDataParallelKwargs()
    return Strategy(
        name="ddp",
        wrapper=DdpWrapper(device=runtime.device, options=options),
        stepper=TorchStepper(
            precision=precision,
            no_sync_of=_no_sync,
            join_of=_join,
            around_backward=partial(hang_monitor.collective_scope, "backward"),
        ),
        persister=ReplicatedPersister(),
        sharding=BatchSharding(num_shards=topology.world_size, shard_index=topology.rank),
        features=PLAIN_FEATURES,
    )


def _is_to_wrap(model: nn.Module) -> bool:
    if isinstance(without_compiler(model), DistributedDataParallel):
        return False
    return any(parameter.requires_grad for parameter in model.parameters())


def _device_ids(model: nn.Module) -> list[torch.device] | None:
    """Return the one accelerator of a model; `None` on the CPU or if it spans several devices."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    only = devices.pop()
    return None if devices or only.type == "cpu" else [only]


def _no_sync(model: nn.Module) -> AbstractContextManager[None]:
    inner = without_compiler(model)
    if not isinstance(inner, DistributedDataParallel):
        return nullcontext()
    if inner.static_graph and inner not in _graphs_seen:
        # torch learns a static graph in the first pass and fails if that is not synchronised. Averaging the
        # first micro-batch early gives the same sum: later averages of a part that all ranks share keep it.
        _graphs_seen.add(inner)
        return nullcontext()
    return inner.no_sync()


def _join(joinables: Sequence[Any], divide_by_initial_world_size: bool) -> AbstractContextManager[None]:
    inside = [without_compiler(one) for one in joinables]
    members: list[Joinable] = [one for one in inside if isinstance(one, Joinable)]
    if not members:
        raise SettingsError(
            f"join_uneven_inputs({[type(one).__name__ for one in joinables]}): none of these takes part in "
            "joining; give prepared models that have something to train."
        )
    return Join(members, divide_by_initial_world_size=divide_by_initial_world_size)  # pyright: ignore[reportReturnType] - a context manager without annotations
