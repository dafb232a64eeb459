"""The modules of a T5: megatron-core's, with an attention that adds relative positions on any device."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from accel_plugins.megatron.library import core
from accel_plugins.megatron.stages import TorchNorm, mask_padding, padded_vocabulary
from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor


class BiasedAttention(nn.Module):
    """PyTorch's attention, with megatron-core's arguments; its own takes no bias.

    Args:
        config: The `TransformerConfig`.
        softmax_scale: Factor of the scores.
        **_: Further arguments of megatron-core's attention, not used.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.scale = softmax_scale

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

        Args:
            query: Of shape `[queries, batch, heads, features]`.
            key: Of shape `[keys, batch, heads, features]`.
            value: As `key`.
            attention_mask: True where attention is masked; broadcast to `[batch, heads, queries, keys]`.
            attention_bias: Added to the scores, likewise.
            **_: Not used.
        """
        queries, keys, values = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        bias = query.new_zeros(()) if attention_bias is None else attention_bias.to(query.dtype)
        bias = torch.where(attention_mask, torch.finfo(query.dtype).min, bias)
        tracker = core("tensor_parallel").get_cuda_rng_tracker()
        with nullcontext() if self.config.sequence_parallel else tracker.fork():
            dropout = self.config.attention_dropout if self.training else 0.0
            found = functional.scaled_dot_product_attention(
                queries, keys, values, bias, dropout, scale=self.scale
            )
        return found.permute(2, 0, 1, 3).flatten(2)


def _spec(layer: Any, layers: int) -> Any:
    """Return a block of layers with PyTorch's norms and attention."""
    layer = copy.deepcopy(layer)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = TorchNorm
    parts.self_attention.submodules.core_attention = BiasedAttention
    identity = core("transformer.identity_op").IdentityOp
    if parts.cross_attention is not identity:
        parts.pre_cross_attn_layernorm = TorchNorm
        parts.cross_attention.submodules.core_attention = BiasedAttention
    block = core("transformer.transformer_block").TransformerBlockSubmodules
    return block(layer_specs=[layer] * layers, layer_norm=TorchNorm)


def build_t5(
    config: Any,
    arguments: dict[str, Any],
    vocabulary: int,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> nn.Module:
    """Make a T5, which has one stage.

    Args:
        config: The `TransformerConfig` of the decoder.
        arguments: Arguments of `T5Model`; `encoder_layers`, and the `output_factor` of what the
            output layer gets.
        vocabulary: Rows of the embedding.
        pre_process: Always true.
        post_process: Always true.
        vp_stage: Not used.
    """
    del vp_stage
    if config.recompute_granularity is not None:
        raise UnsupportedError(
            "megatron-core does not recompute attention with relative positions: leave out "
            "recompute_activations and recompute_granularity."
        )
    specs = core("models.T5.t5_spec")
    encoder = copy.deepcopy(config)
    encoder.num_layers = arguments.pop("encoder_layers")
    factor = arguments.pop("output_factor")
    padded = padded_vocabulary(vocabulary, config)
    made: Any = core("models.T5.t5_model").T5Model(
        config=config,
        encoder_config=encoder,
        transformer_encoder_layer_spec=_spec(specs.encoder_model_with_local_spec(), encoder.num_layers),
        transformer_decoder_layer_spec=_spec(specs.decoder_model_with_local_spec(), config.num_layers),
        vocab_size=padded,
        pre_process=pre_process,
        post_process=post_process,
        **arguments,
    )
    made.output_layer.bias = None  # which megatron-core adds to tied weights
    made.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * factor, *inputs[1:]))
    if padded > vocabulary:
        mask_padding(made.output_layer, vocabulary)
    return made
