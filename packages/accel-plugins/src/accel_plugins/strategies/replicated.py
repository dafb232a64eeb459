"""Move, save and load models that are replicated on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from accel_ops.modules import extract_model_from_parallel
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from accel_plugins.bundle import Bundle
    from accel_plugins.roles import StateDict, Write


def check_materialised(bundle: Bundle) -> None:
    """Refuse models with parameters that are not materialised.

    Raises:
        SettingsError: A parameter is on the meta device, or is a lazy module's and has no shape.
    """
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
    """Move models to the device, except those whose placement the caller has forbidden.

    Returns:
        The models, in order; parameters stay the same objects, so that optimizers keep pointing at them.
    """
    return [
        model.to(device) if bundle.may_move(index) else model for index, model in enumerate(bundle.models)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedPersister:
    """Persister of replicated models: the main process writes, all ranks read.

    Args:
        is_main: Whether this process writes.
    """

    is_main: bool

    def save_model(self, model: nn.Module, directory: Path, index: int, *, write: Write = torch.save) -> None:
        """Write `pytorch_model.bin`, with `_<index>` before the ending from the second model on."""
        if self.is_main:
            write(self.full_state_dict(model), directory / _file("pytorch_model", index))

    def load_model(self, model: nn.Module, directory: Path, index: int) -> None:
        """Load the file that `save_model` wrote."""
        state = torch.load(directory / _file("pytorch_model", index), map_location="cpu", weights_only=True)
        _core(model).load_state_dict(state)

    def save_optimizer(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        directory: Path,
        index: int,
        *,
        write: Write = torch.save,
    ) -> None:
        """Write `optimizer.bin`, with `_<index>` before the ending from the second optimizer on."""
        del model
        if self.is_main:
            write(optimizer.state_dict(), directory / _file("optimizer", index))

    def load_optimizer(self, optimizer: Optimizer, model: nn.Module, directory: Path, index: int) -> None:
        """Load the file that `save_optimizer` wrote."""
        del model
        state = torch.load(directory / _file("optimizer", index), map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state)

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


def _file(stem: str, index: int) -> str:
    return f"{stem}.bin" if index == 0 else f"{stem}_{index}.bin"
