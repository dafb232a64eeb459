"""BERT: norms after the residual connections, and heads for masked tokens, sentence pairs and classes."""

from __future__ import annotations

from typing import Any

from accel_plugins.megatron.gpt2 import ACTIVATIONS
from accel_plugins.megatron.model_family import ModelFamily, Weight, weight_and_bias
from accel_plugins.megatron.packing import attention, same, vocabulary
from accel_state.errors import UnsupportedError

_LAYER = "encoder.layers.{layer}."
_OURS = "bert.encoder.layer.{layer}."


def _transformer_config(config: Any) -> dict[str, Any]:
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "activation_func": ACTIVATIONS[config.hidden_act],
        "layernorm_epsilon": config.layer_norm_eps,
        "normalization": "LayerNorm",
        "attention_dropout": config.attention_probs_dropout_prob,
        "hidden_dropout": config.hidden_dropout_prob,
    }


def _model_arguments(model: Any) -> dict[str, Any]:
    config, architecture = model.config, type(model).__name__
    is_classifier = architecture == "BertForSequenceClassification"
    dropout = getattr(config, "classifier_dropout", None)
    return {
        "max_sequence_length": config.max_position_embeddings,
        "num_tokentypes": config.type_vocab_size,
        "add_binary_head": architecture != "BertForMaskedLM",
        "share_embeddings_and_output_weights": config.tie_word_embeddings and not is_classifier,
        "num_labels": config.num_labels if is_classifier else None,
        "classifier_dropout": config.hidden_dropout_prob if dropout is None else dropout,
    }


def _weights(config: Any) -> list[Weight]:
    heads = config.num_attention_heads
    qkv = attention(heads, heads, config.hidden_size // heads)
    rows = vocabulary(config.vocab_size)
    embeddings = "bert.embeddings.word_embeddings.weight"
    decoder = embeddings if config.tie_word_embeddings else "cls.predictions.decoder.weight"
    found = [
        Weight(parameter=one, names=(name,), packing=packing)
        for one, name, packing in (
            ("embedding.word_embeddings.weight", embeddings, rows),
            ("embedding.position_embeddings.weight", "bert.embeddings.position_embeddings.weight", same()),
            ("embedding.tokentype_embeddings.weight", "bert.embeddings.token_type_embeddings.weight", same()),
            ("output_layer.weight", decoder, rows),
            ("output_layer.bias", "cls.predictions.bias", rows),
        )
    ]
    for end in ("weight", "bias"):
        names = tuple(f"{_OURS}attention.self.{one}.{end}" for one in ("query", "key", "value"))
        found.append(Weight(parameter=f"{_LAYER}self_attention.linear_qkv.{end}", names=names, packing=qkv))
    for theirs, ours, weight, bias in (
        ("embedding.norm", "bert.embeddings.LayerNorm", same(), same()),
        (f"{_LAYER}self_attention.linear_proj", f"{_OURS}attention.output.dense", same(1), same()),
        (f"{_LAYER}self_attn_bda.norm", f"{_OURS}attention.output.LayerNorm", same(), same()),
        (f"{_LAYER}mlp.linear_fc1", f"{_OURS}intermediate.dense", same(0), same(0)),
        (f"{_LAYER}mlp.linear_fc2", f"{_OURS}output.dense", same(1), same()),
        (f"{_LAYER}mlp_bda.norm", f"{_OURS}output.LayerNorm", same(), same()),
        ("pooler.dense", "bert.pooler.dense", same(), same()),
        ("lm_head.dense", "cls.predictions.transform.dense", same(), same()),
        ("lm_head.layer_norm", "cls.predictions.transform.LayerNorm", same(), same()),
        ("binary_head", "cls.seq_relationship", same(), same()),
        ("binary_head.1", "classifier", same(), same()),
    ):
        found += weight_and_bias(theirs, ours, weight, bias)
    return found


def _check(config: Any) -> None:
    wrong: list[str] = []
    if config.hidden_act not in ACTIVATIONS:
        wrong.append(f"hidden_act={config.hidden_act!r} (it has {', '.join(ACTIVATIONS)})")
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        wrong.append(f"position_embedding_type={config.position_embedding_type!r}")
    if getattr(config, "is_decoder", False):
        wrong.append("is_decoder=True")
    if wrong:
        raise UnsupportedError(f"The row of BERT for Megatron has no {', '.join(wrong)}.")


BERT = ModelFamily(
    name="bert",
    kind="bert",
    architectures=("BertForPreTraining", "BertForMaskedLM", "BertForSequenceClassification"),
    transformer_config=_transformer_config,
    model_arguments=_model_arguments,
    weights=_weights,
    build="accel_plugins.megatron.bert_stages:build_bert",
    check=_check,
)
