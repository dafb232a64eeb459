"""The small transformer of the table of equality: sharded by blocks, with a plan of tensor parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from torch.nn import functional

from accel_plugins import sequence_parallel_attention

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

LONGEST, WIDTH, HEAD_WIDTH, DEPTH, EXPERTS = 64, 64, 16, 2, 4


class Experts(nn.Module):
    """Small networks, each byte in some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the outputs of each byte's experts, times their weights."""
        output = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            rows, slots = torch.where(indices == expert)
            inside = functional.gelu(hidden[rows] @ self.up[expert]) @ self.down[expert]
            output = output.index_add(0, rows, (inside * weights[rows, slots, None]).to(output.dtype))
        return output


class Mixture(nn.Module):
    """Every byte goes to all experts, so that rounding sends none of them elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        """Return as many vectors as were given."""
        tokens = x.flatten(0, -2)
        weights, indices = self.router(tokens).softmax(-1).topk(EXPERTS)
        return self.experts(tokens, indices, weights).view_as(x)


class Block(nn.Module):
    """Attention to earlier bytes, then a small network on every byte, or a mixture of them."""

    def __init__(self, *, experts: bool = False) -> None:
        super().__init__()
        self.attention_norm, self.network_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        if experts:
            self.mixture = Mixture()
        else:
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self._has_experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """Return as many vectors as were given."""
        normed = self.attention_norm(x)
        # as many heads as there are here: tensor parallelism gives each rank some of them
        inner = (self.query, self.key, self.value)
        heads = [part(normed).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for part in inner]
        # looked up here: context parallelism replaces it, and sequence parallelism exchanges heads
        attention = sequence_parallel_attention(functional.scaled_dot_product_attention)
        mixed = attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        normed = self.network_norm(x)
        return x + (
            self.mixture(normed) if self._has_experts else self.down(functional.gelu(self.up(normed)))
        )


class LanguageModel(nn.Module):
    """Predicts every next byte."""

    _no_split_modules = ("Block",)
    _tp_plan: ClassVar[Mapping[str, str]] = {
        "blocks.*.query": "colwise",
        "blocks.*.key": "colwise",
        "blocks.*.value": "colwise",
        "blocks.*.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    }

    def __init__(self, *, experts: bool = False) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block(experts=experts) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        shift_labels: Tensor | None = None,
        factor: float = 1.0,
    ) -> Tensor:
        """Return the logits of the next bytes, or with labels the mean loss, times a factor.

        `positions` are for ranks that have a part of each sequence.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if shift_labels is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten()) * factor
