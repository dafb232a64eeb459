"""A model family for Megatron: Qwen2, which is Llama with biases of queries, keys and values."""

from __future__ import annotations

from types import SimpleNamespace

from accel_plugins.megatron.families import LLAMA, ModelFamily, Weight, attention
from accel_state.errors import UnsupportedError

_LAYER, _OURS = "decoder.layers.{layer}.self_attention.", "model.layers.{layer}.self_attn."


def _as_llama(config):
    sizes = {"attention_bias": False, "mlp_bias": False}
    return SimpleNamespace(
        **config.to_dict() | sizes, head_dim=config.hidden_size // config.num_attention_heads
    )


def _transformer_config(config):
    return {**LLAMA.transformer_config(_as_llama(config)), "add_qkv_bias": True}


def _weights(config):
    one = _as_llama(config)
    packing = attention(one.num_attention_heads, one.num_key_value_heads, one.head_dim)
    biases = tuple(f"{_OURS}{name}_proj.bias" for name in "qkv")
    return [*LLAMA.weights(one), Weight(parameter=f"{_LAYER}linear_qkv.bias", names=biases, packing=packing)]


def _check(config):
    LLAMA.check(_as_llama(config))
    if config.use_sliding_window:
        raise UnsupportedError("The row of Qwen2 for Megatron has no use_sliding_window=True.")


QWEN2 = ModelFamily(
    name="qwen2",
    kind="gpt",
    architectures=("Qwen2ForCausalLM",),
    transformer_config=_transformer_config,
    model_arguments=LLAMA.model_arguments,
    weights=_weights,
    check=_check,
)
