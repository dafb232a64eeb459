"""The modules of a T5: megatron-core's, with an attention that adds relative positions on any device."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from accel_plugins.megatron.attention import BiasedAttention
from accel_plugins.megatron.library import core
from accel_plugins.megatron.stages import TorchNorm, mask_padding, padded_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from torch import nn


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
    """Make a T5, which has one stage."""
    del vp_stage
    granularity, method = config.recompute_granularity, config.recompute_method
    number = config.recompute_num_layers
    # megatron-core's own recompute loses the gradient of relative positions.
    config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None
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
    if granularity == "selective":
        recompute(one for one in made.modules() if isinstance(one, BiasedAttention))
    elif granularity == "full":
        for side in (made.encoder, made.decoder):
            recompute(side.layers[: number if method == "block" else None])
    return made


def recompute(modules: Iterable[nn.Module]) -> None:
    """Let modules recompute their activations in the backward pass.

    What they draw comes from the random states of tensor parallelism or the default ones.
    """
    for module in modules:
        module.forward = partial(_recomputed, module.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    tracker = core("tensor_parallel").get_cuda_rng_tracker()
    before = tracker.get_states()

    @contextmanager
    def as_before() -> Generator[None]:
        now = tracker.get_states()
        tracker.set_states(before)
        try:
            yield
        finally:
            tracker.set_states(now)

    def contexts() -> Any:
        return nullcontext(), as_before()

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
