"""GPT-2, Llama, BERT, T5; weight packing.

A packed weight is one in which tensor-parallel ranks split one dim evenly; megatron-core's own parameter is
the part of a rank with its leading dims flattened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from accel_state.errors import SettingsError, UnsupportedError
from accel_state.lazy import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter of megatron-core and the weights of transformers that it is made of.

    Args:
        parameter: Its name in megatron-core's model; `{layer}` stands for the index of a layer.
        names: The names of the weights in the model of transformers, with `{layer}` likewise.
    """

    parameter: str
    names: tuple[str, ...]
    packing: Packing


def weight_and_bias(theirs: str, ours: str, weight: Packing, bias: Packing) -> list[Weight]:
    """Return the two parameters of a layer or norm."""
    return [
        Weight(parameter=f"{theirs}.{end}", names=(f"{ours}.{end}",), packing=packing)
        for end, packing in (("weight", weight), ("bias", bias))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A family of models: how megatron-core builds a configuration of transformers, and weights.

    Args:
        kind: `"gpt"`, `"bert"` or `"t5"`: the train step that is used.
        transformer_config: Returns fields of megatron-core's `TransformerConfig`.
        model_arguments: Returns arguments of megatron-core's model, such as `position_embedding_type`, from
            the model of transformers.
        weights: Returns all parameters; those that a model does not have do no harm.
        build: `"module:function"` of what makes the module of one pipeline stage, called as
            `build(transformer_config, arguments, vocabulary, pre_process, post_process, vp_stage)`.
        check: Raises if the configuration asks for what megatron-core does not compute.

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


Pack: TypeAlias = Callable[[Sequence["Tensor"]], "Tensor"]
Unpack: TypeAlias = Callable[["Tensor"], Sequence["Tensor"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How the weights of transformers that make one parameter of megatron-core are packed and split.

    Args:
        pack: Makes the packed weight from those of transformers.
        unpack: Undoes it.
        dim: Dim of the packed weight that tensor-parallel ranks split; `None` if each has all of it.
        leading: Leading dims of a rank's part of the packed weight, -1 for the one that is split, where the
            parameter has one dim for all of them.
    """

    pack: Pack
    unpack: Unpack
    dim: int | None = None
    leading: tuple[int, ...] = ()

    def shard(self, packed: Tensor, rank: int, size: int) -> Tensor:
        """Return the parameter of one tensor-parallel rank."""
        if self.dim == 0:  # ranks may be more than leading rows: key-value heads are split between some
            packed = self._flat(packed)
        if self.dim is not None:
            packed = _padded(packed, self.dim, size).chunk(size, dim=self.dim)[rank]
        return packed if self.dim == 0 else self._flat(packed)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the packed weight from the parameters of all tensor-parallel ranks."""
        if self.dim == 0:
            return self._shaped(torch.cat([*shards]))
        parts = [self._shaped(one) for one in shards]
        return parts[0] if self.dim is None else torch.cat(parts, dim=self.dim)

    def joined_shape(self, own: torch.Size, size: int) -> torch.Size:
        """Return the shape of the packed weight."""
        part = torch.empty(own, device="meta")
        return self.join([part] * (1 if self.dim is None else size)).shape

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
    """Return the packing of an embedding or output layer, padded with rows of zeros until ranks can split it.

    Example:
        >>> vocabulary(3).shard(torch.ones(3), 1, 2)
        tensor([1., 0.])
    """
    return Packing(pack=lambda tensors: tensors[0], unpack=lambda packed: [packed[:rows]], dim=0)


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    missing = -tensor.shape[dim] % size
    if not missing:
        return tensor
    return torch.nn.functional.pad(tensor, [0, 0] * (tensor.ndim - 1 - dim) + [0, missing])


def transposed(dim: int) -> Packing:
    """Return the packing of a weight that one of the two libraries has transposed, as `Conv1D` does."""
    return Packing(pack=lambda tensors: tensors[0].T, unpack=lambda packed: [packed.T], dim=dim)


def gated() -> Packing:
    """Return the packing of the gate and up projections, whose parts every rank has one after another."""
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
            one.reshape(groups, number, size, *one.shape[1:])
            for one, number in zip(tensors, (queries, 1, 1), strict=True)
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
        return torch.stack([one.reshape(heads, size, *one.shape[1:]) for one in tensors], dim=1)

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
"""Activations of transformers by name, as megatron-core's layers call them."""

_GPT2_LAYER = "decoder.layers.{layer}."
_GPT2_NAMES = "transformer.h.{layer}."


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
        (f"{_GPT2_LAYER}input_layernorm", f"{_GPT2_NAMES}ln_1", same(), same()),
        (f"{_GPT2_LAYER}pre_mlp_layernorm", f"{_GPT2_NAMES}ln_2", same(), same()),
        (
            f"{_GPT2_LAYER}self_attention.linear_qkv",
            f"{_GPT2_NAMES}attn.c_attn",
            attention_in_one(config.n_head, size, transpose=True),
            attention_in_one(config.n_head, size, transpose=False),
        ),
        (f"{_GPT2_LAYER}self_attention.linear_proj", f"{_GPT2_NAMES}attn.c_proj", transposed(1), same()),
        (f"{_GPT2_LAYER}mlp.linear_fc1", f"{_GPT2_NAMES}mlp.c_fc", transposed(0), same(0)),
        (f"{_GPT2_LAYER}mlp.linear_fc2", f"{_GPT2_NAMES}mlp.c_proj", transposed(1), same()),
    ):
        found += weight_and_bias(theirs, ours, weight, bias)
    return found


def _check_gpt2(config: Any) -> None:
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
    transformer_config=_gpt2_config,
    model_arguments=_gpt2_arguments,
    weights=_gpt2_weights,
    check=_check_gpt2,
)


_LLAMA_LAYER = "decoder.layers.{layer}."
# What megatron-core's RotaryEmbedding computes with; it takes only the factor.
_LLAMA_3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
_LLAMA_NAMES = "model.layers.{layer}."


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


def _llama_weights(config: Any) -> list[Weight]:
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    projections = attention(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    rows = (
        ("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary(config.vocab_size)),
        ("decoder.final_layernorm.weight", ("model.norm.weight",), same()),
        ("output_layer.weight", (head,), vocabulary(config.vocab_size)),
        (f"{_LLAMA_LAYER}input_layernorm.weight", (f"{_LLAMA_NAMES}input_layernorm.weight",), same()),
        (
            f"{_LLAMA_LAYER}pre_mlp_layernorm.weight",
            (f"{_LLAMA_NAMES}post_attention_layernorm.weight",),
            same(),
        ),
        (
            f"{_LLAMA_LAYER}self_attention.linear_qkv.weight",
            tuple(f"{_LLAMA_NAMES}self_attn.{one}_proj.weight" for one in "qkv"),
            projections,
        ),
        (
            f"{_LLAMA_LAYER}self_attention.linear_proj.weight",
            (f"{_LLAMA_NAMES}self_attn.o_proj.weight",),
            same(1),
        ),
        (
            f"{_LLAMA_LAYER}mlp.linear_fc1.weight",
            tuple(f"{_LLAMA_NAMES}mlp.{one}_proj.weight" for one in ("gate", "up")),
            gated(),
        ),
        (f"{_LLAMA_LAYER}mlp.linear_fc2.weight", (f"{_LLAMA_NAMES}mlp.down_proj.weight",), same(1)),
    )
    return [Weight(parameter=one, names=names, packing=packing) for one, names, packing in rows]


def _check_llama(config: Any) -> None:
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
    transformer_config=_llama_config,
    model_arguments=_llama_arguments,
    weights=_llama_weights,
    check=_check_llama,
)


_BERT_LAYER = "encoder.layers.{layer}."
_BERT_NAMES = "bert.encoder.layer.{layer}."


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
        names = tuple(f"{_BERT_NAMES}attention.self.{one}.{end}" for one in ("query", "key", "value"))
        found.append(
            Weight(parameter=f"{_BERT_LAYER}self_attention.linear_qkv.{end}", names=names, packing=qkv)
        )
    for theirs, ours, weight, bias in (
        ("embedding.norm", "bert.embeddings.LayerNorm", same(), same()),
        (f"{_BERT_LAYER}self_attention.linear_proj", f"{_BERT_NAMES}attention.output.dense", same(1), same()),
        (f"{_BERT_LAYER}self_attn_bda.norm", f"{_BERT_NAMES}attention.output.LayerNorm", same(), same()),
        (f"{_BERT_LAYER}mlp.linear_fc1", f"{_BERT_NAMES}intermediate.dense", same(0), same(0)),
        (f"{_BERT_LAYER}mlp.linear_fc2", f"{_BERT_NAMES}output.dense", same(1), same()),
        (f"{_BERT_LAYER}mlp_bda.norm", f"{_BERT_NAMES}output.LayerNorm", same(), same()),
        ("pooler.dense", "bert.pooler.dense", same(), same()),
        ("lm_head.dense", "cls.predictions.transform.dense", same(), same()),
        ("lm_head.layer_norm", "cls.predictions.transform.LayerNorm", same(), same()),
        ("binary_head", "cls.seq_relationship", same(), same()),
        ("binary_head.1", "classifier", same(), same()),
    ):
        found += weight_and_bias(theirs, ours, weight, bias)
    return found


def _check_bert(config: Any) -> None:
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
    transformer_config=_bert_config,
    model_arguments=_bert_arguments,
    weights=_bert_weights,
    build="accel_plugins.megatron.stages:build_bert",
    check=_check_bert,
)


_ACTIVATIONS: dict[str, Any] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_new": partial(gelu, approximate="tanh"),
    "silu": silu,
}


def _t5_config(config: Any) -> dict[str, Any]:
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


def _check_t5(config: Any) -> None:
    if config.dense_act_fn not in _ACTIVATIONS:
        raise UnsupportedError(
            f"The row of T5 for Megatron has no feed_forward_proj={config.feed_forward_proj!r} (it has "
            f"{', '.join(_ACTIVATIONS)})."
        )


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


def find_family(model: Any) -> ModelFamily:
    """Return the row of a model of transformers, of its configuration, or of a `model_type`.

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
