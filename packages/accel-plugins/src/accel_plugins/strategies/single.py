"""One process: models are moved to the device, and otherwise left as they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accel_plugins.parallelism.config import check_axes
from accel_plugins.strategies.replicated import ReplicatedPersister, check_materialised, move_to_device
from accel_plugins.strategies.torch_step import TorchStepper
from accel_plugins.strategy import PLAIN_FEATURES, BatchSharding, Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn

    from accel_plugins.bundle import Bundle
    from accel_plugins.roles import PrecisionPolicy
    from accel_state.runtime import Runtime
    from accel_state.settings.model import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleWrapper:
    """Model wrapper that moves models to the device."""

    device: torch.device

    def check(self, bundle: Bundle) -> None:
        """Refuse models with parameters on the meta device."""
        check_materialised(bundle)

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Move the models to the device."""
        del evaluation
        return replace(bundle, models=move_to_device(bundle, self.device))

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model."""
        return model


def build(
    settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
) -> Strategy:
    """Make the strategy of a run with one process; `settings` and `handlers` change nothing about it."""
    del settings
    check_axes(handlers, 1)
    return Strategy(
        name="single",
        wrapper=SingleWrapper(device=runtime.device),
        stepper=TorchStepper(precision=precision),
        persister=ReplicatedPersister(),
        sharding=BatchSharding(num_shards=1, shard_index=0),
        features=PLAIN_FEATURES,
    )
