"""T5: an encoder and a decoder with relative positions."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.nn.functional import gelu, relu, silu

from accel_plugins.megatron.model_family import ModelFamily, Weight
from accel_plugins.megatron.packing import attention, gated, keys_values, same, vocabulary
from accel_state.errors import UnsupportedError

_ACTIVATIONS: dict[str, Any] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_new": partial(gelu, approximate="tanh"),
    "silu": silu,
}


def _transformer_config(config: Any) -> dict[str, Any]:
    return {
        "num_layers": config.num_decoder_layers,
        "hidden_size": config.d_model,
        "ffn_hidden_size": config.d_ff,
        "num_attention_heads": config.num_heads,
        "kv_channels": config.d_kv,
        "softmax_scale": 1.0,
        "activation_func": _ACTIVATIONS[config.dense_act_fn],
        "gated_linear_unit": config.is_gated_act,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.layer_norm_epsilon,
        "attention_dropout": config.dropout_rate,
        "hidden_dropout": config.dropout_rate,
    }


def _model_arguments(model: Any) -> dict[str, Any]:
    config = model.config
    scales = getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)  # transformers 5
    return {
        "encoder_layers": config.num_layers,
        "output_factor": config.d_model**-0.5 if scales else 1.0,
        "max_sequence_length": 1,  # positions are relative
        "position_embedding_type": "relative",
        "relative_attention_num_buckets": config.relative_attention_num_buckets,
        "relative_attention_max_distance": config.relative_attention_max_distance,
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
    }


def _weights(config: Any) -> list[Weight]:
    head = "shared.weight" if config.tie_word_embeddings else "lm_head.weight"
    rows = [
        ("embedding.word_embeddings.weight", ("shared.weight",), vocabulary(config.vocab_size)),
        ("lm_head.output_layer.weight", (head,), vocabulary(config.vocab_size)),
    ]
    for side in ("encoder", "decoder"):
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rows += [
            (f"{side}_relative_pos_emb.relative_attention_bias.weight", (bias,), same()),
            (f"{side}.final_layernorm.weight", (f"{side}.final_layer_norm.weight",), same()),
            *_layer(config, side),
        ]
    return [Weight(parameter=one, names=names, packing=packing) for one, names, packing in rows]


def _layer(config: Any, side: str) -> list[tuple[str, tuple[str, ...], Any]]:
    theirs, ours = f"{side}.layers.{{layer}}.", f"{side}.block.{{layer}}.layer."
    qkv = attention(config.num_heads, config.num_heads, config.d_kv)
    last = 2 if side == "decoder" else 1
    mlp = f"{ours}{last}.DenseReluDense."
    first = ("wi_0", "wi_1") if config.is_gated_act else ("wi",)
    rows = [
        (f"{theirs}input_layernorm.weight", (f"{ours}0.layer_norm.weight",), same()),
        (
            f"{theirs}self_attention.linear_qkv.weight",
            tuple(f"{ours}0.SelfAttention.{one}.weight" for one in "qkv"),
            qkv,
        ),
        (f"{theirs}self_attention.linear_proj.weight", (f"{ours}0.SelfAttention.o.weight",), same(1)),
        (f"{theirs}pre_mlp_layernorm.weight", (f"{ours}{last}.layer_norm.weight",), same()),
        (
            f"{theirs}mlp.linear_fc1.weight",
            tuple(f"{mlp}{one}.weight" for one in first),
            gated() if config.is_gated_act else same(0),
        ),
        (f"{theirs}mlp.linear_fc2.weight", (f"{mlp}wo.weight",), same(1)),
    ]
    if side == "decoder":
        cross = f"{ours}1.EncDecAttention."
        rows += [
            (f"{theirs}pre_cross_attn_layernorm.weight", (f"{ours}1.layer_norm.weight",), same()),
            (f"{theirs}cross_attention.linear_q.weight", (f"{cross}q.weight",), same(0)),
            (
                f"{theirs}cross_attention.linear_kv.weight",
                (f"{cross}k.weight", f"{cross}v.weight"),
                keys_values(config.num_heads, config.d_kv),
            ),
            (f"{theirs}cross_attention.linear_proj.weight", (f"{cross}o.weight",), same(1)),
        ]
    return rows


def _check(config: Any) -> None:
    if config.dense_act_fn not in _ACTIVATIONS:
        raise UnsupportedError(
            f"The row of T5 for Megatron has no feed_forward_proj={config.feed_forward_proj!r} (it has "
            f"{', '.join(_ACTIVATIONS)})."
        )


T5 = ModelFamily(
    name="t5",
    kind="t5",
    architectures=("T5ForConditionalGeneration",),
    transformer_config=_transformer_config,
    model_arguments=_model_arguments,
    weights=_weights,
    build="accel_plugins.megatron.t5_stages:build_t5",
    check=_check,
)
