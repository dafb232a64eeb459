"""PyTorch's attention for megatron-core: with biases, and causal, also context-parallel.

Of each sequence, every context-parallel rank computes two chunks, one from either end.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from accel_plugins.megatron.library import core

if TYPE_CHECKING:
    from torch import Tensor


class _TorchAttention(nn.Module):
    """What megatron-core makes in place of its own attention; further arguments are not used."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.scale = softmax_scale

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """Compute attention with a bias of the scores; without one it is causal."""
        queries, keys, values = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        tracker = core("tensor_parallel").get_cuda_rng_tracker()
        with nullcontext() if self.config.sequence_parallel else tracker.fork():
            found = functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                bias,
                self.config.attention_dropout if self.training else 0.0,
                is_causal=bias is None,
                scale=self.scale,
            )
        return found.permute(2, 0, 1, 3).flatten(2)


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
        return self._attend(query, key, value, _masked(bias, attention_mask))


class CausalAttention(_TorchAttention):
    """Causal attention of decoders, whose memory grows with the length of sequences, not with its square.

    Context-parallel ranks gather the keys and values of all.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> Tensor:
        """Return the context of shape `[queries, batch, heads * features]`.

        All have this rank's chunks, of shape `[queries, batch, heads, features]`; keys and values may have
        fewer heads. The mask, of shape `[batch, 1, queries, sequence]`, is true where attention is masked;
        `None` stands for that of the future. In generation queries are the last of the sequence.
        """
        keys, values = gather_chunks(key), gather_chunks(value)
        is_square = len(query) == len(keys)
        if attention_mask is None and not is_square:
            positions = torch.arange(len(keys), device=query.device)
            is_chunked = self.config.context_parallel_size > 1
            own = _own_positions(positions) if is_chunked else positions[-len(query) :]
            attention_mask = positions > own[:, None]
        each = query.shape[2] // keys.shape[2]
        keys, values = (one.repeat_interleave(each, dim=2) for one in (keys, values))
        mask = None if attention_mask is None else _masked(query.new_zeros(()), attention_mask)
        return self._attend(query, keys, values, mask)


def _own_positions(positions: Tensor) -> Tensor:
    group = core("parallel_state").get_context_parallel_group()
    chunks = positions.chunk(2 * group.size())
    return torch.cat([chunks[group.rank()], chunks[-1 - group.rank()]])


def _masked(bias: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, torch.finfo(bias.dtype).min, bias)


_NAMES = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def own_chunks(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return this rank's chunks of a batch, cut by megatron-core."""
    group = core("parallel_state").get_context_parallel_group()
    parts = core("utils").get_batch_on_this_cp_rank(dict(zip(_NAMES, batch, strict=True)), group)
    return tuple(parts.values())


def gather_chunks(tensor: Tensor) -> Tensor:
    """Return the whole sequences of chunks, `[sequence, ...]`; gradients of all ranks are summed up."""
    group = core("parallel_state").get_context_parallel_group()
    if group.size() == 1:
        return tensor
    gather = core("tensor_parallel.mappings").gather_from_sequence_parallel_region
    chunks = gather(tensor.contiguous(), group=group).chunk(2 * group.size())
    return torch.cat([chunks[position] for position in positions(group.size())])


def positions(size: int) -> list[int]:
    """Return where each chunk of a sequence is among those of all ranks, one rank after another.

    Example:
        >>> positions(2)  # rank 0 has the first and the last
        [0, 2, 3, 1]
    """
    return [2 * chunk for chunk in range(size)] + [2 * chunk + 1 for chunk in reversed(range(size))]


def sum_over_context(value: Tensor) -> Tensor:
    """Return the sum of a number over the ranks that share sequences, without a gradient."""
    group = core("parallel_state").get_context_parallel_group()
    total = value.detach().clone()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total
