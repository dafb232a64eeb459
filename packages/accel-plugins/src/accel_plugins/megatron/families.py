"""Model families: map GPT-2, Llama, BERT and T5 of transformers to models of megatron-core.

A packed weight has one dim that tensor-parallel ranks split evenly; megatron-core's parameter is one rank's
shard with its leading dims flattened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from accel_state.errors import SettingsError, UnsupportedError
from accel_state.frozen import frozen
from accel_state.lazy import Registry


@frozen
class ModelFamily:
    """A family of models: the mapping of configuration and weights from transformers to megatron-core.

    Args:
        kind: `"gpt"`, `"bert"` or `"t5"`: the train step that is used.
        transformer_config: Returns fields of megatron-core's `TransformerConfig`.
        model_arguments: Returns arguments of megatron-core's model, such as `position_embedding_type`, from
            the model of transformers.
        weights: Returns rows of all possible parameters; a model may lack some.
        build: `"module:function"` that builds the module of one pipeline stage, called as
            `build(transformer_config, arguments, vocabulary, pre_process, post_process, vp_stage)`.
        check: Raises if the configuration needs a feature that megatron-core lacks.

    Example:
        >>> from accel_plugins.megatron.families import find_family
        >>> find_family("llama").kind
        'gpt'
    """

    name: str
    kind: str
    architectures: tuple[str, ...]
    transformer_config: Callable[[Any], Mapping[str, Any]]
    model_arguments: Callable[[Any], Mapping[str, Any]]
    weights: Callable[[Any], Sequence[Weight]]
    build: str = "accel_plugins.megatron.stages:build_gpt"
    check: Callable[[Any], None] = lambda _: None


def find_family(model: Any) -> ModelFamily:
    """Find the family of a transformers model, its configuration or a `model_type`.

    Example:
        >>> find_family("gpt2").architectures
        ('GPT2LMHeadModel',)
    """
    config = getattr(model, "config", model)
    kind = config if isinstance(config, str) else getattr(config, "model_type", None)
    known = FAMILIES.available()
    if kind not in known:
        raise SettingsError(
            f"{type(model).__name__} of type {kind!r} cannot be trained by Megatron: there are rows for "
            f"{', '.join(map(repr, known))}. Add one, a ModelFamily, by an entry point of the group "
            f"{ENTRY_POINT_GROUP!r}, or give MegatronLMPlugin a custom_model_provider_function."
        )
    family = known[kind]
    if config is not model and type(model).__name__ not in family.architectures:
        raise SettingsError(
            f"{type(model).__name__} cannot be trained by Megatron: of the type {kind!r} it trains "
            f"{', '.join(family.architectures)}."
        )
    return family


@frozen
class Weight:
    """A parameter of megatron-core and the weights of transformers that are packed into it.

    Args:
        parameter: Its name in megatron-core's model; `{layer}` stands for the index of a layer.
        names: The names of the weights in the model of transformers, with `{layer}` likewise.
    """

    parameter: str
    names: tuple[str, ...]
    packing: Packing


@frozen
class Packing:
    """Pack weights of transformers into one parameter of megatron-core, and split it over ranks.

    Args:
        pack: Builds the packed weight from the weights of transformers.
        unpack: The inverse of `pack`.
        dim: Dim of the packed weight that tensor-parallel ranks split; `None` if it is replicated.
        leading: Leading dims of a rank's shard of the packed weight, -1 for the split dim, if the parameter
            has them flattened to one dim.
    """

    pack: Callable[[Sequence[Tensor]], Tensor]
    unpack: Callable[[Tensor], Sequence[Tensor]]
    dim: int | None = None
    leading: tuple[int, ...] = ()

    def shard(self, packed: Tensor, rank: int, size: int) -> Tensor:
        """Return the parameter of one tensor-parallel rank."""
        if self.dim == 0:  # There may be more ranks than leading rows: key-value heads are split, too.
            packed = self._flat(packed)
        if self.dim is not None:
            padding = [0, 0] * (packed.ndim - 1 - self.dim) + [0, -packed.shape[self.dim] % size]
            packed = torch.nn.functional.pad(packed, padding).chunk(size, dim=self.dim)[rank]
        return packed if self.dim == 0 else self._flat(packed)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the packed weight from the parameters of all tensor-parallel ranks."""
        if self.dim == 0:
            return self._shaped(torch.cat([*shards]))
        parts = [self._shaped(shard) for shard in shards]
        return parts[0] if self.dim is None else torch.cat(parts, dim=self.dim)

    def _flat(self, packed: Tensor) -> Tensor:
        return packed.reshape(-1, *packed.shape[len(self.leading) :]) if self.leading else packed

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.reshape(*self.leading, *flat.shape[1:]) if self.leading else flat


def same(dim: int | None = None) -> Packing:
    """Return the packing of a weight that is the same in both libraries.

    Example:
        >>> same(0).shard(torch.arange(4), 1, 2)
        tensor([2, 3])
    """
    return Packing(pack=lambda tensors: tensors[0], unpack=lambda packed: [packed], dim=dim)


def vocabulary(rows: int) -> Packing:
    """Return the packing of an embedding or output layer, padded with zero rows to split evenly over ranks.

    Example:
        >>> vocabulary(3).shard(torch.ones(3), 1, 2)
        tensor([1., 0.])
    """
    return Packing(pack=lambda tensors: tensors[0], unpack=lambda packed: [packed[:rows]], dim=0)


def transposed(dim: int) -> Packing:
    """Return the packing of a weight that one of the libraries transposes, as in `Conv1D`."""
    return Packing(pack=lambda tensors: tensors[0].T, unpack=lambda packed: [packed.T], dim=dim)


def gated() -> Packing:
    """Return the packing of gate and up projections: every rank has its shards of both, concatenated."""
    return Packing(
        pack=lambda tensors: torch.stack([*tensors]), unpack=lambda packed: [*packed], dim=1, leading=(2, -1)
    )


def attention(heads: int, groups: int, size: int) -> Packing:
    """Return the packing of query, key and value projections: by groups, queries before their key and value.

    Example:
        >>> tensors = torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6]), torch.tensor([7, 8])
        >>> packed = attention(2, 1, 2).pack(tensors)
        >>> packed.tolist()
        [[[1, 2], [3, 4], [5, 6], [7, 8]]]
    """
    queries = heads // groups

    def pack(tensors: Sequence[Tensor]) -> Tensor:
        parts = [
            tensor.reshape(groups, number, size, *tensor.shape[1:])
            for tensor, number in zip(tensors, (queries, 1, 1), strict=True)
        ]
        return torch.cat(parts, dim=1)

    def unpack(packed: Tensor) -> list[Tensor]:
        parts = packed.split([queries, 1, 1], dim=1)
        return [part.reshape(-1, *part.shape[3:]) for part in parts]

    return Packing(pack=pack, unpack=unpack, dim=0, leading=(-1, queries + 2, size))


def keys_values(heads: int, size: int) -> Packing:
    """Return the packing of key and value projections of cross-attention: by heads, keys before values.

    Example:
        >>> keys_values(2, 1).pack([torch.tensor([1, 2]), torch.tensor([3, 4])]).tolist()
        [[[1], [3]], [[2], [4]]]
    """

    def pack(tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([tensor.reshape(heads, size, *tensor.shape[1:]) for tensor in tensors], dim=1)

    def unpack(packed: Tensor) -> list[Tensor]:
        return [part.flatten(0, 1) for part in packed.unbind(1)]

    return Packing(pack=pack, unpack=unpack, dim=0, leading=(-1, 2, size))


def attention_in_one(heads: int, size: int, *, transpose: bool) -> Packing:
    """Return the packing of projections in one weight of transformers: queries, then keys, then values."""
    separate = attention(heads, heads, size)

    def pack(tensors: Sequence[Tensor]) -> Tensor:
        full = tensors[0].T if transpose else tensors[0]
        return separate.pack(full.chunk(3))

    def unpack(packed: Tensor) -> list[Tensor]:
        full = torch.cat([*separate.unpack(packed)])
        return [full.T if transpose else full]

    return Packing(pack=pack, unpack=unpack, dim=0, leading=separate.leading)


ACTIVATIONS: dict[str, Any] = {
    "gelu_new": partial(gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
    "gelu": gelu,
}
"""Activations of transformers by name, in the form that megatron-core's layers call."""


def weight(parameter: str, names: str | tuple[str, ...], packing: Packing) -> Weight:
    """Return the row of a parameter packed from one or several weights of transformers."""
    return Weight(parameter=parameter, names=(names,) if isinstance(names, str) else names, packing=packing)


def weight_and_bias(module: str, name: str, weights: Packing, biases: Packing) -> list[Weight]:
    """Return the rows of weight and bias of a layer or norm, which transformers calls `name`."""
    return [
        weight(f"{module}.{kind}", f"{name}.{kind}", packing)
        for kind, packing in (("weight", weights), ("bias", biases))
    ]


def _gpt2_config(config: Any) -> dict[str, Any]:
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


def _gpt2_arguments(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "max_sequence_length": config.n_positions,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
    }


def _gpt2_weights(config: Any) -> list[Weight]:
    size = config.n_embd // config.n_head
    head = "transformer.wte.weight" if config.tie_word_embeddings else "lm_head.weight"
    rows = vocabulary(config.vocab_size)
    qkv, qkv_bias = (
        attention_in_one(config.n_head, size, transpose=transpose) for transpose in (True, False)
    )
    layer, name = "decoder.layers.{layer}.", "transformer.h.{layer}."
    return [
        weight("embedding.word_embeddings.weight", "transformer.wte.weight", rows),
        weight("embedding.position_embeddings.weight", "transformer.wpe.weight", same()),
        weight("output_layer.weight", head, rows),
        *weight_and_bias("decoder.final_layernorm", "transformer.ln_f", same(), same()),
        *weight_and_bias(f"{layer}input_layernorm", f"{name}ln_1", same(), same()),
        *weight_and_bias(f"{layer}pre_mlp_layernorm", f"{name}ln_2", same(), same()),
        *weight_and_bias(f"{layer}self_attention.linear_qkv", f"{name}attn.c_attn", qkv, qkv_bias),
        *weight_and_bias(f"{layer}self_attention.linear_proj", f"{name}attn.c_proj", transposed(1), same()),
        *weight_and_bias(f"{layer}mlp.linear_fc1", f"{name}mlp.c_fc", transposed(0), same(0)),
        *weight_and_bias(f"{layer}mlp.linear_fc2", f"{name}mlp.c_proj", transposed(1), same()),
    ]


def _refuse(name: str, wrong: Sequence[str]) -> None:
    if wrong:
        raise UnsupportedError(
            f"The row of {name} for Megatron has no {', '.join(wrong)}: shard the model by FSDP, or by "
            "parallelism_config_tp_size."
        )


def _others(config: Any, needed: Mapping[str, Any]) -> list[str]:
    """Return the fields of a configuration that differ from the only supported value, with theirs."""
    present = {name: getattr(config, name, value) for name, value in needed.items()}
    return [f"{name}={value!r}" for name, value in present.items() if value != needed[name]]


def _check_gpt2(config: Any) -> None:
    needed = {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    needed |= {"scale_attn_weights": True, "embd_pdrop": config.resid_pdrop}  # One dropout serves both.
    activation = config.activation_function
    _refuse(
        "GPT-2",
        _others(config, needed) + [f"activation_function={activation!r}"] * (activation not in ACTIVATIONS),
    )


GPT2 = ModelFamily(
    name="gpt2",
    kind="gpt",
    architectures=("GPT2LMHeadModel",),
    transformer_config=_gpt2_config,
    model_arguments=_gpt2_arguments,
    weights=_gpt2_weights,
    check=_check_gpt2,
)


def _llama_config(config: Any) -> dict[str, Any]:
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


def _llama_arguments(model: Any) -> dict[str, Any]:
    config = model.config
    rope = _rope(config)
    is_scaled = _rope_type(rope) == "llama3"
    return {
        "max_sequence_length": config.max_position_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
        **({"rope_scaling": True, "rope_scaling_factor": float(rope["factor"])} if is_scaled else {}),
    }


def _rope(config: Any) -> dict[str, Any]:
    parameters = getattr(config, "rope_parameters", None)
    if parameters is not None:  # transformers 5 has all of them there
        return parameters
    return {**(getattr(config, "rope_scaling", None) or {}), "rope_theta": config.rope_theta}


def _rope_type(rope: Any) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _llama_weights(config: Any) -> list[Weight]:
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    rows = vocabulary(config.vocab_size)
    qkv = attention(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    layer, name = "decoder.layers.{layer}.", "model.layers.{layer}."
    attn, mlp = f"{name}self_attn.", f"{name}mlp."
    projections = tuple(f"{attn}{letter}_proj.weight" for letter in "qkv")
    return [
        weight("embedding.word_embeddings.weight", "model.embed_tokens.weight", rows),
        weight("decoder.final_layernorm.weight", "model.norm.weight", same()),
        weight("output_layer.weight", head, rows),
        weight(f"{layer}input_layernorm.weight", f"{name}input_layernorm.weight", same()),
        weight(f"{layer}pre_mlp_layernorm.weight", f"{name}post_attention_layernorm.weight", same()),
        weight(f"{layer}self_attention.linear_qkv.weight", projections, qkv),
        weight(f"{layer}self_attention.linear_proj.weight", f"{attn}o_proj.weight", same(1)),
        weight(f"{layer}mlp.linear_fc1.weight", (f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"), gated()),
        weight(f"{layer}mlp.linear_fc2.weight", f"{mlp}down_proj.weight", same(1)),
    ]


# These are the values that megatron-core's RotaryEmbedding computes with; it takes only the factor.
_LLAMA_3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def _check_llama(config: Any) -> None:
    rope = _rope(config)
    kind = _rope_type(rope)
    wrong = _others(config, {"attention_bias": False, "mlp_bias": False})
    if config.hidden_act not in {"silu", "swish"}:
        wrong.append(f"hidden_act={config.hidden_act!r}")
    if kind not in {"default", "llama3"}:
        wrong.append(f"rope_type={kind!r}")
    for name, value in _LLAMA_3.items() if kind == "llama3" else ():
        if rope.get(name) != value:
            wrong.append(f"{name}={rope.get(name)!r} of rope_type='llama3' (megatron-core computes {value})")
    _refuse("Llama", wrong)


LLAMA = ModelFamily(
    name="llama",
    kind="gpt",
    architectures=("LlamaForCausalLM",),
    transformer_config=_llama_config,
    model_arguments=_llama_arguments,
    weights=_llama_weights,
    check=_check_llama,
)
"""The Llama family; families of the same layout derive from it with `dataclasses.replace`."""


def _bert_config(config: Any) -> dict[str, Any]:
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


def _bert_arguments(model: Any) -> dict[str, Any]:
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


def _bert_weights(config: Any) -> list[Weight]:
    heads = config.num_attention_heads
    qkv = attention(heads, heads, config.hidden_size // heads)
    rows = vocabulary(config.vocab_size)
    word_embeddings = "bert.embeddings.word_embeddings.weight"
    head = word_embeddings if config.tie_word_embeddings else "cls.predictions.decoder.weight"
    layer, name = "encoder.layers.{layer}.", "bert.encoder.layer.{layer}."
    weights = [
        weight("embedding.word_embeddings.weight", word_embeddings, rows),
        weight("embedding.position_embeddings.weight", "bert.embeddings.position_embeddings.weight", same()),
        weight(
            "embedding.tokentype_embeddings.weight", "bert.embeddings.token_type_embeddings.weight", same()
        ),
        weight("output_layer.weight", head, rows),
        weight("output_layer.bias", "cls.predictions.bias", rows),
    ]
    for kind in ("weight", "bias"):
        names = tuple(f"{name}attention.self.{part}.{kind}" for part in ("query", "key", "value"))
        weights.append(weight(f"{layer}self_attention.linear_qkv.{kind}", names, qkv))
    for module, source, packing, bias in (
        ("embedding.norm", "bert.embeddings.LayerNorm", same(), same()),
        (f"{layer}self_attention.linear_proj", f"{name}attention.output.dense", same(1), same()),
        (f"{layer}self_attn_bda.norm", f"{name}attention.output.LayerNorm", same(), same()),
        (f"{layer}mlp.linear_fc1", f"{name}intermediate.dense", same(0), same(0)),
        (f"{layer}mlp.linear_fc2", f"{name}output.dense", same(1), same()),
        (f"{layer}mlp_bda.norm", f"{name}output.LayerNorm", same(), same()),
        ("pooler.dense", "bert.pooler.dense", same(), same()),
        ("lm_head.dense", "cls.predictions.transform.dense", same(), same()),
        ("lm_head.layer_norm", "cls.predictions.transform.LayerNorm", same(), same()),
        ("binary_head", "cls.seq_relationship", same(), same()),
        ("binary_head.1", "classifier", same(), same()),
    ):
        weights += weight_and_bias(module, source, packing, bias)
    return weights


def _check_bert(config: Any) -> None:
    wrong = _others(config, {"position_embedding_type": "absolute", "is_decoder": False})
    if config.hidden_act not in ACTIVATIONS:
        wrong.append(f"hidden_act={config.hidden_act!r}")
    _refuse("BERT", wrong)


BERT = ModelFamily(
    name="bert",
    kind="bert",
    architectures=("BertForPreTraining", "BertForMaskedLM", "BertForSequenceClassification"),
    transformer_config=_bert_config,
    model_arguments=_bert_arguments,
    weights=_bert_weights,
    build="accel_plugins.megatron.stages:build_bert",
    check=_check_bert,
)

_T5_ACTIVATIONS: dict[str, Any] = {**ACTIVATIONS, "relu": relu, "silu": silu}


def _t5_config(config: Any) -> dict[str, Any]:
    return {
        "num_layers": config.num_decoder_layers,
        "hidden_size": config.d_model,
        "ffn_hidden_size": config.d_ff,
        "num_attention_heads": config.num_heads,
        "kv_channels": config.d_kv,
        "softmax_scale": 1.0,
        "activation_func": _T5_ACTIVATIONS[config.dense_act_fn],
        "gated_linear_unit": config.is_gated_act,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.layer_norm_epsilon,
        "attention_dropout": config.dropout_rate,
        "hidden_dropout": config.dropout_rate,
    }


def _t5_arguments(model: Any) -> dict[str, Any]:
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


def _t5_weights(config: Any) -> list[Weight]:
    head = "shared.weight" if config.tie_word_embeddings else "lm_head.weight"
    weights = [
        weight("embedding.word_embeddings.weight", "shared.weight", vocabulary(config.vocab_size)),
        weight("lm_head.output_layer.weight", head, vocabulary(config.vocab_size)),
    ]
    qkv = attention(config.num_heads, config.num_heads, config.d_kv)
    kv = keys_values(config.num_heads, config.d_kv)
    for side, last in (("encoder", 1), ("decoder", 2)):
        layer, name = f"{side}.layers.{{layer}}.", f"{side}.block.{{layer}}.layer."
        attn, mlp = f"{name}0.SelfAttention.", f"{name}{last}.DenseReluDense."
        projections = tuple(f"{attn}{letter}.weight" for letter in "qkv")
        first = (f"{mlp}wi_0.weight", f"{mlp}wi_1.weight") if config.is_gated_act else f"{mlp}wi.weight"
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        weights += [
            weight(f"{side}_relative_pos_emb.relative_attention_bias.weight", bias, same()),
            weight(f"{side}.final_layernorm.weight", f"{side}.final_layer_norm.weight", same()),
            weight(f"{layer}input_layernorm.weight", f"{name}0.layer_norm.weight", same()),
            weight(f"{layer}self_attention.linear_qkv.weight", projections, qkv),
            weight(f"{layer}self_attention.linear_proj.weight", f"{attn}o.weight", same(1)),
            weight(f"{layer}pre_mlp_layernorm.weight", f"{name}{last}.layer_norm.weight", same()),
            weight(f"{layer}mlp.linear_fc1.weight", first, gated() if config.is_gated_act else same(0)),
            weight(f"{layer}mlp.linear_fc2.weight", f"{mlp}wo.weight", same(1)),
        ]
    layer, name = "decoder.layers.{layer}.", "decoder.block.{layer}.layer."
    cross = f"{name}1.EncDecAttention."
    keys_and_values = (f"{cross}k.weight", f"{cross}v.weight")
    return [
        *weights,
        weight(f"{layer}pre_cross_attn_layernorm.weight", f"{name}1.layer_norm.weight", same()),
        weight(f"{layer}cross_attention.linear_q.weight", f"{cross}q.weight", same(0)),
        weight(f"{layer}cross_attention.linear_kv.weight", keys_and_values, kv),
        weight(f"{layer}cross_attention.linear_proj.weight", f"{cross}o.weight", same(1)),
    ]


def _check_t5(config: Any) -> None:
    if config.dense_act_fn not in _T5_ACTIVATIONS:
        _refuse("T5", [f"feed_forward_proj={config.feed_forward_proj!r}"])


T5 = ModelFamily(
    name="t5",
    kind="t5",
    architectures=("T5ForConditionalGeneration",),
    transformer_config=_t5_config,
    model_arguments=_t5_arguments,
    weights=_t5_weights,
    build="accel_plugins.megatron.stages:build_t5",
    check=_check_t5,
)

ENTRY_POINT_GROUP = "accel.megatron_models"
"""A distribution adds a row with `[project.entry-points."accel.megatron_models"] name = "module:FAMILY"`."""

FAMILIES = Registry(
    group=ENTRY_POINT_GROUP,
    kind=ModelFamily,
    noun="model family for Megatron",
    built_in={family.name: family for family in (BERT, GPT2, LLAMA, T5)},
)
