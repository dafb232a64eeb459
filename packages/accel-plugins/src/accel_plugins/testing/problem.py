"""The training problem of the checks: solved by plain PyTorch in one process, and by a strategy."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_plugins.bundle import Bundle
from accel_plugins.strategy import Feature
from accel_state.errors import AccelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from accel_plugins.strategy import Strategy

FEATURES, HIDDEN, TARGETS, ROWS = 6, 5, 3, 12  # ROWS: samples per shard, divisible by 2, 3 and 4


class ConformanceError(AccelError, AssertionError):
    """An implementation violates its seam's contract."""


def demand(condition: object, message: str) -> None:
    """Raise `ConformanceError` with a message unless a condition holds."""
    if not condition:
        raise ConformanceError(message)


def demand_equal(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float, what: str
) -> None:
    """Demand that named tensors have the same names, shapes and, but for a tolerance, values."""
    demand([*found] == [*wanted], f"{what}: the names are {[*found]} where they should be {[*wanted]}.")
    for name, right in wanted.items():
        result = found[name].detach().to("cpu", right.dtype)
        demand(
            result.shape == right.shape,
            f"{what}: {name!r} has the shape {tuple(result.shape)}; expected {tuple(right.shape)}.",
        )
        worst = (result - right).abs().max().item() if right.numel() else 0.0
        demand(worst <= tolerance, f"{what}: {name!r} is off by {worst:.3g} (tolerance {tolerance:.3g}).")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A regression problem whose samples are sharded."""

    dtype: torch.dtype
    device: torch.device
    num_shards: int
    shard_index: int

    def model(self, seed: int = 0) -> nn.Module:
        """Return a new network on the CPU, the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, TARGETS)).to(
                self.dtype
            )

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of all shards for one step, on the CPU."""
        generator = torch.Generator().manual_seed(1000 + step)
        rows = ROWS * self.num_shards
        inputs = torch.randn(rows, FEATURES, generator=generator, dtype=self.dtype)
        return inputs, torch.randn(rows, TARGETS, generator=generator, dtype=self.dtype)

    def shard(self, step: int, index: int | None = None) -> tuple[Tensor, Tensor]:
        """Return a shard of a step's batch, this rank's by default, on the device."""
        start = ROWS * (self.shard_index if index is None else index)
        inputs, targets = self.batch(step)
        return inputs[start : start + ROWS].to(self.device), targets[start : start + ROWS].to(self.device)

    def solve(
        self,
        steps: int,
        optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
        before_step: Callable[[nn.Module], Any] | None = None,
    ) -> nn.Module:
        """Train the network of seed 0 on full batches with plain PyTorch.

        `before_step` is called with the model between backward pass and step.
        """
        model = self.model()
        stepping = optimizer([*model.parameters()])
        for step in range(steps):
            stepping.zero_grad()
            loss_of(model, self.batch(step)).backward()
            if before_step is not None:
                before_step(model)
            stepping.step()
        return model


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error of a model on a batch."""
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer without state, whose steps show the gradients."""
    return torch.optim.SGD(parameters, lr=0.5)


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer with state."""
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


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

        The loss, a mean, is multiplied with the number of `items`.
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
