"""Move, save and load models that are replicated on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from accel_ops.modules import extract_model_from_parallel
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from accel_plugins.bundle import Bundle
    from accel_plugins.roles import StateDict


def check_materialised(bundle: Bundle) -> None:
    """Refuse models with parameters that are not materialised."""
    for model in bundle.models:
        for name, parameter in model.named_parameters():
            if is_lazy(parameter):
                raise SettingsError(
                    f"{type(model).__name__}: the parameter {name!r} of a lazy module has no shape yet; "
                    "run one batch through the model before prepare()."
                )
            if parameter.is_meta:
                raise SettingsError(
                    f"{type(model).__name__}: the parameter {name!r} is on the meta device; "
                    "load the weights before prepare()."
                )


def move_to_device(bundle: Bundle, device: torch.device) -> list[nn.Module]:
    """Move models to the device, in order, except those whose placement the caller has forbidden.

    Parameters stay the same objects, so that optimizers keep pointing at them.
    """
    return [
        model.to(device) if bundle.may_move(index) else model for index, model in enumerate(bundle.models)
    ]


class ReplicatedPersister:
    """Persister of replicated models."""

    __slots__ = ()

    def full_state_dict(self, model: nn.Module, *, keep: bool = True) -> StateDict:
        """Return the state dict of the unwrapped model."""
        del keep
        return _core(model).state_dict()

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        """Yield the state dict at once: it needs no gathering."""
        yield self.full_state_dict(model, keep=keep)

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        """Load a state dict into the unwrapped model."""
        return _core(model).load_state_dict(state, **options)

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        """Return the state dict of the optimizer."""
        del models, keep
        return optimizer.state_dict()

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load a state dict into the optimizer."""
        del models
        optimizer.load_state_dict(dict(state))


def _core(model: nn.Module) -> nn.Module:
    return extract_model_from_parallel(model, keep_torch_compile=False)
