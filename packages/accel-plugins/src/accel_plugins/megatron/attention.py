"""PyTorch's attention with megatron-core's arguments, for what megatron-core's own does not compute."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from accel_plugins.megatron.context import gather_chunks
from accel_plugins.megatron.library import core

if TYPE_CHECKING:
    from torch import Tensor


class _TorchAttention(nn.Module):
    """What megatron-core makes in place of its own attention; further arguments are not used."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.scale = softmax_scale


class BiasedAttention(_TorchAttention):
    """Attention that adds a bias to the scores, as relative positions are."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        attention_bias: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the context of shape `[queries, batch, heads * features]`.

        Queries have the shape `[queries, batch, heads, features]`, keys and values likewise. The mask is true
        where attention is masked; it and the bias are broadcast to `[batch, heads, queries, keys]`.
        """
        bias = query.new_zeros(()) if attention_bias is None else attention_bias.to(query.dtype)
        bias = torch.where(attention_mask, torch.finfo(query.dtype).min, bias)
        return _attend(self.config, query, key, value, bias, self.scale, training=self.training)


class ContextAttention(_TorchAttention):
    """Causal attention of context-parallel ranks, each of which gathers the keys and values of all."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> Tensor:
        """Return the context of shape `[queries, batch, heads * features]`.

        All have this rank's chunks, of shape `[queries, batch, heads, features]`; keys and values may have
        fewer heads. The mask, of shape `[batch, 1, queries, sequence]`, is true where attention is masked;
        `None` stands for that of the future.
        """
        keys, values = gather_chunks(key), gather_chunks(value)
        if attention_mask is None:
            positions = torch.arange(len(keys), device=query.device)
            attention_mask = positions > _own_positions(positions)[:, None]
        each = query.shape[2] // keys.shape[2]
        keys, values = (one.repeat_interleave(each, dim=2) for one in (keys, values))
        mask = ~attention_mask
        return _attend(self.config, query, keys, values, mask, self.scale, training=self.training)


def _own_positions(positions: Tensor) -> Tensor:
    group = core("parallel_state").get_context_parallel_group()
    chunks = positions.chunk(2 * group.size())
    return torch.cat([chunks[group.rank()], chunks[-1 - group.rank()]])


def _attend(
    config: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float | None,
    *,
    training: bool,
) -> Tensor:
    queries, keys, values = (one.permute(1, 2, 0, 3) for one in (query, key, value))
    tracker = core("tensor_parallel").get_cuda_rng_tracker()
    with nullcontext() if config.sequence_parallel else tracker.fork():
        dropout = config.attention_dropout if training else 0.0
        found = functional.scaled_dot_product_attention(queries, keys, values, mask, dropout, scale=scale)
    return found.permute(2, 0, 1, 3).flatten(2)
