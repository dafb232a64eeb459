"""A model prepared by a strategy, for the checks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from accel_plugins.bundle import Bundle
from accel_plugins.strategy import Feature
from accel_plugins.testing.problem import loss_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_plugins.strategy import Strategy
    from accel_plugins.testing.problem import Problem


@dataclass(frozen=True, slots=True)
class Trained:
    """A model prepared by a strategy, with its optimizer."""

    strategy: Strategy
    model: nn.Module
    optimizer: Optimizer

    @property
    def core(self) -> nn.Module:
        """The unwrapped model."""
        return self.strategy.wrapper.unwrap(self.model)

    def backward(
        self, batch: tuple[Tensor, Tensor], *, accumulation: int = 1, sync: bool = True, items: int = 1
    ) -> None:
        """Run forward and backward on a batch; without `sync` inside `no_sync`, if there is one.

        Args:
            batch: Inputs and targets.
            accumulation: As of the stepper.
            sync: As of the stepper.
            items: What the loss, a mean, is multiplied with.
        """
        may_hold = Feature.NO_SYNC in self.strategy.features
        with nullcontext() if sync or not may_hold else self.strategy.stepper.no_sync(self.model):
            loss = loss_of(self.model, batch) * items
            self.strategy.stepper.backward(loss, accumulation=accumulation, sync=sync)

    def step(self) -> bool:
        """Step and clear the gradients; return whether the strategy stepped."""
        stepped = bool(self.strategy.stepper.step(self.optimizer))
        self.optimizer.zero_grad()
        return stepped

    def state(self) -> dict[str, Tensor]:
        """The full state dict on the CPU."""
        return {
            name: full(value) for name, value in self.strategy.persister.full_state_dict(self.model).items()
        }

    def save_full(self, folder: Path, *, keep: bool) -> None:
        """Save the full states on the rank with `keep`."""
        persister = self.strategy.persister
        weights = persister.full_state_dict(self.model, keep=keep)
        optimizer = persister.full_optimizer_state(self.optimizer, [self.model], keep=keep)
        if keep:
            torch.save([weights, optimizer], folder / "full.bin")

    def load_full(self, folder: Path) -> None:
        """Load what `save_full` has saved."""
        weights, optimizer = torch.load(folder / "full.bin", map_location="cpu", weights_only=True)
        self.strategy.persister.load_full_state_dict(self.model, weights)
        self.strategy.persister.load_full_optimizer_state(self.optimizer, [self.model], optimizer)

    def save_native(self, folder: Path) -> None:
        """Save the strategy's own files, where it has some, as of two models and optimizers."""
        for index in (0, 1):
            if (native := self.strategy.native) is not None:
                native.save_model(self.model, folder, index)
                native.save_optimizer(self.optimizer, self.model, folder, index)

    def load_native(self, folder: Path) -> None:
        """Load what `save_native` has saved, the second first."""
        for index in (1, 0):
            if (native := self.strategy.native) is not None:
                native.load_model(self.model, folder, index)
                native.load_optimizer(self.optimizer, self.model, folder, index)


def prepare(
    strategy: Strategy, model: nn.Module, make: Callable[[Sequence[nn.Parameter]], Optimizer]
) -> Trained:
    """Check and wrap a model with its optimizer by a strategy."""
    bundle = Bundle(models=[model], optimizers=[make([*model.parameters()])])
    strategy.wrapper.check(bundle)
    bundle = strategy.wrapper.wrap(bundle)
    return Trained(strategy, bundle.models[0], bundle.optimizers[0])


def accumulate(trained: Trained, batch: tuple[Tensor, Tensor], count: int) -> None:
    """Run backward passes on the micro-batches of a batch; the last one all-reduces gradients."""
    micro_batches = [*zip(*(tensor.chunk(count) for tensor in batch), strict=True)]
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        trained.backward((inputs, targets), accumulation=count, sync=number == count)


def gradients(model: nn.Module) -> dict[str, Any]:
    """Return the full gradients by parameter name; `None` for parameters without one."""
    return {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}


def gradients_alone(problem: Problem) -> dict[str, Any]:
    """Return the gradients of plain PyTorch on this rank's first shard."""
    model = problem.model()
    inputs, targets = problem.shard(0)
    loss_of(model, (inputs.cpu(), targets.cpu())).backward()
    return gradients(model)


def are_full(found: Mapping[str, Any]) -> bool:
    """Return whether gradients are in `.grad` between passes; some strategies have them in buffers."""
    return all(gradient is not None for gradient in found.values())


def full(tensor: Any) -> Any:
    """Return the full tensor on the CPU, gathered if it is a `DTensor`."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()
