"""Models that the tests of this package share."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Block(nn.Module):
    """A residual block with a buffer, and a bare parameter beside its layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.second(self.norm(self.first(x)))


class Toy(nn.Module):
    """Tied embeddings around blocks, and a bare parameter at the top."""

    def __init__(self, blocks: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.gain = nn.Parameter(torch.rand(width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.gain
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def toy_class() -> type[Toy]:
    return Toy


@pytest.fixture
def toy() -> Toy:
    torch.manual_seed(0)
    return Toy().eval()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.tensor([1, 2, 3, 10])
