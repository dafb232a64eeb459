"""The training problem of the checks, solved by plain PyTorch in one process for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_state.errors import AccelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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

        Args:
            steps: Number of optimizer steps.
            optimizer: Makes the optimizer of the parameters.
            before_step: Called with the model between backward pass and step.
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
