"""Llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention."""

from __future__ import annotations

from typing import Any

from torch.nn.functional import silu

from accel_plugins.megatron.model_family import ModelFamily, Weight
from accel_plugins.megatron.packing import attention, gated, same, vocabulary
from accel_state.errors import UnsupportedError

_LAYER = "decoder.layers.{layer}."
# What megatron-core's RotaryEmbedding computes with; it takes only the factor.
_LLAMA_3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
_OURS = "model.layers.{layer}."


def _transformer_config(config: Any) -> dict[str, Any]:
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "activation_func": silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "attention_dropout": config.attention_dropout,
        "hidden_dropout": 0.0,
    }


def _model_arguments(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "max_sequence_length": config.max_position_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": _rope(config)["rope_theta"],
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
        **_scaling(config),
    }


def _scaling(config: Any) -> dict[str, Any]:
    rope = _rope(config)
    if _rope_type(rope) != "llama3":
        return {}
    return {"rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}


def _rope_type(rope: Any) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _rope(config: Any) -> dict[str, Any]:
    found = getattr(config, "rope_parameters", None)  # transformers 5
    if found is None:
        scaling = getattr(config, "rope_scaling", None) or {}
        found = {**scaling, "rope_theta": config.rope_theta}
    return found


def _weights(config: Any) -> list[Weight]:
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    projections = attention(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    rows = (
        ("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary(config.vocab_size)),
        ("decoder.final_layernorm.weight", ("model.norm.weight",), same()),
        ("output_layer.weight", (head,), vocabulary(config.vocab_size)),
        (f"{_LAYER}input_layernorm.weight", (f"{_OURS}input_layernorm.weight",), same()),
        (f"{_LAYER}pre_mlp_layernorm.weight", (f"{_OURS}post_attention_layernorm.weight",), same()),
        (
            f"{_LAYER}self_attention.linear_qkv.weight",
            tuple(f"{_OURS}self_attn.{one}_proj.weight" for one in "qkv"),
            projections,
        ),
        (f"{_LAYER}self_attention.linear_proj.weight", (f"{_OURS}self_attn.o_proj.weight",), same(1)),
        (
            f"{_LAYER}mlp.linear_fc1.weight",
            tuple(f"{_OURS}mlp.{one}_proj.weight" for one in ("gate", "up")),
            gated(),
        ),
        (f"{_LAYER}mlp.linear_fc2.weight", (f"{_OURS}mlp.down_proj.weight",), same(1)),
    )
    return [Weight(parameter=one, names=names, packing=packing) for one, names, packing in rows]


def _check(config: Any) -> None:
    wrong = [f"{name}=True" for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)]
    if config.hidden_act not in {"silu", "swish"}:
        wrong.append(f"hidden_act={config.hidden_act!r}")
    rope = _rope(config)
    kind = _rope_type(rope)
    if kind not in {"default", "llama3"}:
        wrong.append(f"rope_type={kind!r}")
    if kind == "llama3":
        wrong += [
            f"{name}={rope.get(name)!r} of rope_type='llama3' (megatron-core computes {value})"
            for name, value in _LLAMA_3.items()
            if rope.get(name) != value
        ]
    if wrong:
        raise UnsupportedError(
            f"The row of Llama for Megatron has no {', '.join(wrong)}: shard the model by FSDP, or by "
            "parallelism_config_tp_size."
        )


LLAMA = ModelFamily(
    name="llama",
    kind="gpt",
    architectures=("LlamaForCausalLM",),
    transformer_config=_transformer_config,
    model_arguments=_model_arguments,
    weights=_weights,
    check=_check,
)
