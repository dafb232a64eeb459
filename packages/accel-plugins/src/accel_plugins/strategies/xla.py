"""XLA devices: a whole model on each; what is recorded is executed after every backward pass and step."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from accel_ops import broadcast
from accel_plugins.strategies.replicated import ReplicatedPersister, check_materialised, move_to_device
from accel_plugins.strategies.torch_step import TorchStepper
from accel_plugins.strategy import PLAIN_FEATURES, BatchSharding, Feature, Strategy
from accel_plugins.xla.spmd import xla_module
from accel_plugins.xla.support import SPMD_PLUGIN, refuse_unsupported
from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from torch import nn

    from accel_plugins.bundle import Bundle
    from accel_plugins.roles import PrecisionPolicy
    from accel_state.runtime import Runtime
    from accel_state.settings.model import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class XlaWrapper:
    """Model wrapper that moves models to an XLA device."""

    device: torch.device
    average: GradientAverage | None = None

    def check(self, bundle: Bundle) -> None:
        """Refuse models with parameters on the meta device."""
        check_materialised(bundle)

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Move the models to the device, with the values of rank 0 on all ranks."""
        models = move_to_xla(bundle, self.device)
        if self.average is not None and not evaluation:
            for model in models:
                broadcast([*model.parameters(), *model.buffers()])
                self.average.add(model)
        return replace(bundle, models=models)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model."""
        return model


def build(
    settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
) -> Strategy:
    """Make the strategy of a run on XLA devices."""
    refuse_unsupported(settings, runtime, precision, handlers)
    topology, own = runtime.topology, runtime.kind.own_runtime
    if topology.world_size > 1 and not own.is_replicated():
        raise UnsupportedError(
            f"PJRT runs {topology.world_size} processes, each of which drives all devices of its host: let "
            f"the compiler shard over them, with {SPMD_PLUGIN}, or start one for every device, with "
            "`accel launch --tpu`."
        )
    own.start(spmd=False)
    average = GradientAverage(topology.world_size) if topology.world_size > 1 else None
    stepper = TorchStepper(precision=precision)
    if average is not None:
        stepper = replace(stepper, no_sync_of=average.no_sync, around_backward=average.around_backward)
    return Strategy(
        name="xla",
        wrapper=XlaWrapper(device=runtime.device, average=average),
        stepper=stepper,
        persister=ReplicatedPersister(),
        sharding=BatchSharding(num_shards=topology.world_size, shard_index=topology.rank),
        features=PLAIN_FEATURES - ({Feature.UNEVEN_INPUTS} if average is not None else set()),
        after_micro_batch=own.flush,
        after_step=own.flush,
    )


class GradientAverage:
    """Averages the gradients of models after backward passes.

    Gradients that are averages already stay as they are, so several backward passes may run before a step.
    """

    def __init__(self, world_size: int) -> None:
        self._scale = 1.0 / world_size
        self._models: WeakSet[nn.Module] = WeakSet()
        self._is_local = False

    def add(self, model: nn.Module) -> None:
        """Average the gradients of a model from now on."""
        self._models.add(model)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None]:
        """Leave gradients local in backward passes within the block."""
        del model
        before, self._is_local = self._is_local, True
        try:
            yield
        finally:
            self._is_local = before

    @contextmanager
    def around_backward(self) -> Generator[None]:
        """Average gradients at the end of the block."""
        yield
        gradients = {
            id(parameter): parameter.grad
            for model in self._models
            for parameter in model.parameters()
            if parameter.grad is not None
        }
        if gradients and not self._is_local:
            xla_module("core.xla_model").all_reduce("sum", [*gradients.values()], scale=self._scale)


def move_to_xla(bundle: Bundle, device: torch.device) -> list[nn.Module]:
    """Move models to the device, as `move_to_device` does; parameters stay the same objects."""
    with _swapped():
        return move_to_device(bundle, device)


@contextmanager
def _swapped() -> Generator[None]:
    """Let `Module.to` swap contents of parameters, which it otherwise replaces by new ones on XLA devices.

    https://docs.pytorch.org/docs/stable/future_mod.html
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
