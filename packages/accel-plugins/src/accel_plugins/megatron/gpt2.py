"""GPT-2: learned positions, `Conv1D` layers, all projections of the attention in one weight."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.nn.functional import gelu

from accel_plugins.megatron.model_family import ModelFamily, Weight, weight_and_bias
from accel_plugins.megatron.packing import attention_in_one, same, transposed, vocabulary
from accel_state.errors import UnsupportedError

ACTIVATIONS: dict[str, Any] = {
    "gelu_new": partial(gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
    "gelu": gelu,
}
"""Activations of transformers by name, as megatron-core's layers call them."""

_LAYER = "decoder.layers.{layer}."
_OURS = "transformer.h.{layer}."


def _transformer_config(config: Any) -> dict[str, Any]:
    return {
        "num_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "ffn_hidden_size": config.n_inner or 4 * config.n_embd,
        "num_attention_heads": config.n_head,
        "activation_func": ACTIVATIONS[config.activation_function],
        "layernorm_epsilon": config.layer_norm_epsilon,
        "normalization": "LayerNorm",
        "attention_dropout": config.attn_pdrop,
        "hidden_dropout": config.resid_pdrop,
    }


def _model_arguments(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "max_sequence_length": config.n_positions,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
    }


def _weights(config: Any) -> list[Weight]:
    size = config.n_embd // config.n_head
    head = "transformer.wte.weight" if config.tie_word_embeddings else "lm_head.weight"
    found = [
        Weight(parameter=one, names=(name,), packing=packing)
        for one, name, packing in (
            ("embedding.word_embeddings.weight", "transformer.wte.weight", vocabulary(config.vocab_size)),
            ("embedding.position_embeddings.weight", "transformer.wpe.weight", same()),
            ("output_layer.weight", head, vocabulary(config.vocab_size)),
        )
    ]
    for theirs, ours, weight, bias in (
        ("decoder.final_layernorm", "transformer.ln_f", same(), same()),
        (f"{_LAYER}input_layernorm", f"{_OURS}ln_1", same(), same()),
        (f"{_LAYER}pre_mlp_layernorm", f"{_OURS}ln_2", same(), same()),
        (
            f"{_LAYER}self_attention.linear_qkv",
            f"{_OURS}attn.c_attn",
            attention_in_one(config.n_head, size, transpose=True),
            attention_in_one(config.n_head, size, transpose=False),
        ),
        (f"{_LAYER}self_attention.linear_proj", f"{_OURS}attn.c_proj", transposed(1), same()),
        (f"{_LAYER}mlp.linear_fc1", f"{_OURS}mlp.c_fc", transposed(0), same(0)),
        (f"{_LAYER}mlp.linear_fc2", f"{_OURS}mlp.c_proj", transposed(1), same()),
    ):
        found += weight_and_bias(theirs, ours, weight, bias)
    return found


def _check(config: Any) -> None:
    wrong = [
        f"{name}={getattr(config, name)!r}"
        for name, needed in (
            ("scale_attn_weights", True),
            ("scale_attn_by_inverse_layer_idx", False),
            ("add_cross_attention", False),
        )
        if getattr(config, name, needed) != needed
    ]
    if config.activation_function not in ACTIVATIONS:
        wrong.append(f"activation_function={config.activation_function!r} (it has {', '.join(ACTIVATIONS)})")
    if config.embd_pdrop != config.resid_pdrop:
        wrong.append(
            f"embd_pdrop={config.embd_pdrop!r} beside resid_pdrop={config.resid_pdrop!r} (one serves both)"
        )
    if wrong:
        raise UnsupportedError(f"megatron-core does not compute a GPT-2 with {', '.join(wrong)}.")


GPT2 = ModelFamily(
    name="gpt2",
    kind="gpt",
    architectures=("GPT2LMHeadModel",),
    transformer_config=_transformer_config,
    model_arguments=_model_arguments,
    weights=_weights,
    check=_check,
)
