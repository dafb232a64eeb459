"""XLA devices: a whole model on each; what is recorded is executed after every backward pass and step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accel_plugins.strategies.replicated import ReplicatedPersister, check_materialised
from accel_plugins.strategies.torch_step import TorchStepper
from accel_plugins.strategies.xla_move import move_to_xla
from accel_plugins.strategy import PLAIN_FEATURES, BatchSharding, Feature, Strategy
from accel_plugins.xla.gradients import GradientAverage
from accel_plugins.xla.library import xla_module
from accel_plugins.xla.support import refuse_unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn

    from accel_plugins.bundle import Bundle
    from accel_plugins.roles import PrecisionPolicy
    from accel_state.runtime import Runtime
    from accel_state.settings.model import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class XlaWrapper:
    """Model wrapper that moves models to an XLA device.

    Args:
        device: The device of the run.
        average: Averages gradients over the ranks; `None` if there is one.
    """

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
                xla_module("core.xla_model").broadcast_master_param(model)
                self.average.add(model)
        return replace(bundle, models=models)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model."""
        return model


def build(
    settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
) -> Strategy:
    """Make the strategy of a run on XLA devices.

    Args:
        settings: May ask for what XLA does not offer.
        runtime: Device and topology.
        precision: Steps optimizers.
        handlers: May ask for what XLA does not offer.

    Raises:
        UnsupportedError: Something is asked for that XLA devices do not offer.
    """
    refuse_unsupported(settings, runtime, precision, handlers)
    topology, own = runtime.topology, runtime.kind.own_runtime
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
