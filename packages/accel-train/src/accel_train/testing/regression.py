"""A regression on two parameters, on which tests train in milliseconds."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


class RegressionDataset:
    """Points near the line `y = a x + b`, as dictionaries of float32 numbers `x` and `y`.

    Args:
        a: The slope of the line.
        b: The intercept of the line.
        length: The number of points.
        seed: The seed of the random numbers.

    Example:
        >>> dataset = RegressionDataset(length=3, seed=4)
        >>> len(dataset), sorted(dataset[0]), round(float(dataset[0]["x"]), 3)
        (3, ['x', 'y'], -0.652)
    """

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        generator = np.random.default_rng(seed)
        self.length = length
        self.x = generator.normal(size=(length,)).astype(np.float32)
        noise = generator.normal(scale=0.1, size=(length,)).astype(np.float32)
        self.y = a * self.x + b + noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, np.float32]:
        return {"x": self.x[i], "y": self.y[i]}


class RegressionModel(nn.Module):
    """The model `a x + b` of two parameters.

    Args:
        a: The initial slope.
        b: The initial intercept.
        double_output: Accepted for compatibility with Accelerate; has no effect in either.

    Example:
        >>> RegressionModel(1, 2)(torch.ones(2)).tolist()
        [3.0, 3.0]
    """

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        del double_output
        self.a = nn.Parameter(torch.tensor(a).float())
        self.b = nn.Parameter(torch.tensor(b).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `a x + b`."""
        return x * self.a + self.b
