"""A small Llama with groups of attention heads, for tests of what happens along its sequences."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 17,
    "attn_implementation": "sdpa",
}
"""Options that the configurations of Llama, Mistral, Gemma and Qwen have in common."""


def make_llama(**options: Any) -> LlamaForCausalLM:
    """Return a model of these sizes and other options, always with the same weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | options))
