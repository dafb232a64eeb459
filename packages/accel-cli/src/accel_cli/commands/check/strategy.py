"""The strategy of a rank that is tried: models stay as they are, and what all ranks would do is noted."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from accel_plugins.strategies.replicated import ReplicatedPersister
from accel_plugins.strategies.torch_step import TorchStepper
from accel_plugins.strategy import BatchSharding, Feature, Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_cli.commands.check.observer import Observer
    from accel_plugins.bundle import Bundle
    from accel_plugins.roles import PrecisionPolicy
    from accel_state.runtime import Runtime
    from accel_state.settings.model import Settings


class ObservedWrapper:
    """Tells an observer which models are prepared.

    Args:
        observer: Who is told.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def check(self, bundle: Bundle) -> None:
        """Let everything pass."""

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Leave the models as they are."""
        if bundle.models and not evaluation:
            self._observer.saw("prepare")
            self._observer.prepared(bundle.models)
        return bundle

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model."""
        return model


class ObservedStepper:
    """Steps as plain PyTorch does, and tells an observer when ranks would bring gradients together.

    Args:
        observer: Who is told.
        plain: Does the work.
    """

    def __init__(self, observer: Observer, plain: TorchStepper) -> None:
        self._observer = observer
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        """Add the gradients of `loss / accumulation` to the parameters."""
        if sync:
            self._observer.saw("backward")
        self._plain.backward(loss, accumulation=accumulation, sync=sync, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Nothing: the gradients are local anyway."""
        del model
        return contextlib.nullcontext()

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool:
        """Step the optimizer, whose state is not counted: an estimate knows it."""
        del closure
        ledger = self._observer.ledger
        with contextlib.nullcontext() if ledger is None else ledger.stepping():
            optimizer.step()
        return True


def loading(observer: Observer) -> Callable[[str], Callable[..., Strategy]]:
    """Make what takes the place of `accel_plugins.registry.load`.

    Args:
        observer: Who is told.
    """

    def load(name: str) -> Callable[..., Strategy]:
        def build(
            settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
        ) -> Strategy:
            del settings, handlers
            observer.strategy = name
            place = runtime.topology
            stepper: Any = ObservedStepper(observer, TorchStepper(precision=precision))
            return Strategy(
                name=name,
                wrapper=ObservedWrapper(observer),
                stepper=stepper,
                persister=ReplicatedPersister(is_main=place.is_main),
                sharding=BatchSharding(num_shards=place.world_size, shard_index=place.rank),
                features=frozenset(Feature),
            )

        return build

    return load
