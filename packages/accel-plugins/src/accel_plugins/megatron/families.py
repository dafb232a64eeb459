"""Model families: map GPT-2, Llama, BERT and T5 of transformers to models of megatron-core.

A packed weight has one dim that tensor-parallel ranks split evenly; megatron-core's parameter is one rank's
shard with its leading dims flattened.
"""

from __future__ import annotations

import re
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
            `build(transformer_config, arguments, vocabulary, pre_process=…, post_process=…, vp_stage=…)`;
            the vocabulary is padded to split evenly over ranks.
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


_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


def separate_norms(name: str) -> str:
    """Return the name of a parameter in layers with separate norms, which TransformerEngine fuses."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def plain_name(name: str) -> tuple[str, int | None]:
    """Return the name that rows have for a parameter, and the index of its layer, if it is in one."""
    layer = _LAYER.search(name)
    plain = _LAYER.sub("{layer}", separate_norms(name), count=1)
    return plain, None if layer is None else int(layer[0])


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
    return _by_groups(groups, size, (heads // groups, 1, 1))


def keys_values(heads: int, size: int) -> Packing:
    """Return the packing of key and value projections of cross-attention: by heads, keys before values.

    Example:
        >>> keys_values(2, 1).pack([torch.tensor([1, 2]), torch.tensor([3, 4])]).tolist()
        [[[1], [3]], [[2], [4]]]
    """
    return _by_groups(heads, size, (1, 1))


def _by_groups(groups: int, size: int, heads: tuple[int, ...]) -> Packing:
    """Return the packing of projections by groups of heads, from their numbers of heads in a group."""

    def pack(tensors: Sequence[Tensor]) -> Tensor:
        parts = zip(tensors, heads, strict=True)
        return torch.cat([part.reshape(groups, number, size, *part.shape[1:]) for part, number in parts], 1)

    def unpack(packed: Tensor) -> list[Tensor]:
        return [part.reshape(-1, *part.shape[3:]) for part in packed.split(heads, dim=1)]

    return Packing(pack=pack, unpack=unpack, dim=0, leading=(-1, sum(heads), size))


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


def rows_of(*table: tuple[Any, ...]) -> list[Weight]:
    """Return the rows of a table of modules, of what transformers calls them, and of their packings.

    A line has the packing of the weight, and may have that of the bias; `None` stands for neither.
    """
    rows: list[Weight] = []
    for module, source, *packings in table:
        sources = (source,) if isinstance(source, str) else source
        for kind, packing in zip(("weight", "bias"), packings, strict=False):
            if packing is not None:
                names = tuple(f"{name}.{kind}" for name in sources)
                rows.append(Weight(parameter=f"{module}.{kind}", names=names, packing=packing))
    return rows


_FIELDS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "layernorm_epsilon")
_DROPOUTS = ("attention_dropout", "hidden_dropout")


def _fields(config: Any, names: str, **others: Any) -> dict[str, Any]:
    """Return fields of a `TransformerConfig`: those of every family, by their names in transformers."""
    values = [getattr(config, name) for name in names.split()]
    return dict(zip((*_FIELDS, *_DROPOUTS), values, strict=False)) | {"normalization": "LayerNorm"} | others


def _refuse(kind: str, needed: Mapping[str, Any], config: Any, wrong: Sequence[str] = ()) -> None:
    """Refuse fields of a configuration that differ from the supported value, or are not one of a table."""
    present = {name: getattr(config, name, wanted) for name, wanted in needed.items()}
    wrong = [
        *wrong,
        *(
            f"{name}={value!r}"
            for name, value in present.items()
            if (value not in needed[name] if isinstance(needed[name], dict) else value != needed[name])
        ),
    ]
    if wrong:
        raise UnsupportedError(
            f"The row of {kind} for Megatron has no {', '.join(wrong)}: shard the model by FSDP, or by "
            "parallelism_config_tp_size."
        )


def _gpt2_config(config: Any) -> dict[str, Any]:
    names = "n_layer n_embd n_inner n_head layer_norm_epsilon attn_pdrop resid_pdrop"
    width = config.n_inner or 4 * config.n_embd
    activation = ACTIVATIONS[config.activation_function]
    return _fields(config, names, ffn_hidden_size=width, activation_func=activation)


def _gpt2_arguments(model: Any) -> dict[str, Any]:
    return {
        "max_sequence_length": model.config.n_positions,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": model.config.tie_word_embeddings,
    }


def _gpt2_weights(config: Any) -> list[Weight]:
    size, rows = config.n_embd // config.n_head, vocabulary(config.vocab_size)
    qkv, qkv_bias = (
        attention_in_one(config.n_head, size, transpose=is_weight) for is_weight in (True, False)
    )
    layer, name = "decoder.layers.{layer}.", "transformer.h.{layer}."
    return rows_of(
        ("embedding.word_embeddings", "transformer.wte", rows),
        ("embedding.position_embeddings", "transformer.wpe", same()),
        ("output_layer", "transformer.wte" if config.tie_word_embeddings else "lm_head", rows),
        ("decoder.final_layernorm", "transformer.ln_f", same(), same()),
        (f"{layer}input_layernorm", f"{name}ln_1", same(), same()),
        (f"{layer}pre_mlp_layernorm", f"{name}ln_2", same(), same()),
        (f"{layer}self_attention.linear_qkv", f"{name}attn.c_attn", qkv, qkv_bias),
        (f"{layer}self_attention.linear_proj", f"{name}attn.c_proj", transposed(1), same()),
        (f"{layer}mlp.linear_fc1", f"{name}mlp.c_fc", transposed(0), same(0)),
        (f"{layer}mlp.linear_fc2", f"{name}mlp.c_proj", transposed(1), same()),
    )


def _check_gpt2(config: Any) -> None:
    needed = {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    needed |= {"scale_attn_weights": True, "embd_pdrop": config.resid_pdrop}  # One dropout serves both.
    _refuse("GPT-2", needed | {"activation_function": ACTIVATIONS}, config)


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
    return _fields(
        config,
        "num_hidden_layers hidden_size intermediate_size num_attention_heads rms_norm_eps attention_dropout",
        hidden_dropout=0.0,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        activation_func=silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="RMSNorm",
    )


def _llama_arguments(model: Any) -> dict[str, Any]:
    kind, rope = _rope(model.config)
    return {
        "max_sequence_length": model.config.max_position_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "share_embeddings_and_output_weights": model.config.tie_word_embeddings,
        **({"rope_scaling": True, "rope_scaling_factor": float(rope["factor"])} if kind == "llama3" else {}),
    }


def _rope(config: Any) -> tuple[str, dict[str, Any]]:
    """Return the type of the rotary positions, and their parameters."""
    rope = getattr(config, "rope_parameters", None)
    if rope is None:  # before transformers 5
        rope = {**(getattr(config, "rope_scaling", None) or {}), "rope_theta": config.rope_theta}
    return rope.get("rope_type") or rope.get("type") or "default", rope


def _llama_weights(config: Any) -> list[Weight]:
    rows = vocabulary(config.vocab_size)
    qkv = attention(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    layer, name = "decoder.layers.{layer}.", "model.layers.{layer}."
    projections = [f"{name}self_attn.{letter}_proj" for letter in "qkv"]
    return rows_of(
        ("embedding.word_embeddings", "model.embed_tokens", rows),
        ("decoder.final_layernorm", "model.norm", same()),
        ("output_layer", "model.embed_tokens" if config.tie_word_embeddings else "lm_head", rows),
        (f"{layer}input_layernorm", f"{name}input_layernorm", same()),
        (f"{layer}pre_mlp_layernorm", f"{name}post_attention_layernorm", same()),
        (f"{layer}self_attention.linear_qkv", projections, qkv),
        (f"{layer}self_attention.linear_proj", f"{name}self_attn.o_proj", same(1)),
        (f"{layer}mlp.linear_fc1", (f"{name}mlp.gate_proj", f"{name}mlp.up_proj"), gated()),
        (f"{layer}mlp.linear_fc2", f"{name}mlp.down_proj", same(1)),
    )


# These are the values that megatron-core's RotaryEmbedding computes with; it takes only the factor.
_LLAMA_3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def _check_llama(config: Any) -> None:
    kind, rope = _rope(config)
    wrong = [] if kind in {"default", "llama3"} else [f"rope_type={kind!r}"]
    for name, value in _LLAMA_3.items() if kind == "llama3" else ():
        if rope.get(name) != value:
            wrong.append(f"{name}={rope.get(name)!r} of rope_type='llama3' (megatron-core computes {value})")
    needed = {"attention_bias": False, "mlp_bias": False, "hidden_act": {"silu": silu, "swish": silu}}
    _refuse("Llama", needed, config, wrong)


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
    names = "num_hidden_layers hidden_size intermediate_size num_attention_heads layer_norm_eps "
    names += "attention_probs_dropout_prob hidden_dropout_prob"
    return _fields(config, names, activation_func=ACTIVATIONS[config.hidden_act])


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
    heads, rows = config.num_attention_heads, vocabulary(config.vocab_size)
    qkv = attention(heads, heads, config.hidden_size // heads)
    words, positions = "bert.embeddings.word_embeddings", "bert.embeddings.position_embeddings"
    layer, name = "encoder.layers.{layer}.", "bert.encoder.layer.{layer}."
    projections = [f"{name}attention.self.{part}" for part in ("query", "key", "value")]
    return rows_of(
        ("embedding.word_embeddings", words, rows),
        ("embedding.position_embeddings", positions, same()),
        ("embedding.tokentype_embeddings", "bert.embeddings.token_type_embeddings", same()),
        ("output_layer", words if config.tie_word_embeddings else "cls.predictions.decoder", rows),
        ("output_layer", "cls.predictions", None, rows),
        (f"{layer}self_attention.linear_qkv", projections, qkv, qkv),
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
    )


_BERT_NEEDS = {"position_embedding_type": "absolute", "is_decoder": False, "hidden_act": ACTIVATIONS}
BERT = ModelFamily(
    name="bert",
    kind="bert",
    architectures=("BertForPreTraining", "BertForMaskedLM", "BertForSequenceClassification"),
    transformer_config=_bert_config,
    model_arguments=_bert_arguments,
    weights=_bert_weights,
    build="accel_plugins.megatron.stages:build_bert",
    check=partial(_refuse, "BERT", _BERT_NEEDS),
)

_T5_ACTIVATIONS: dict[str, Any] = {**ACTIVATIONS, "relu": relu, "silu": silu}


def _t5_config(config: Any) -> dict[str, Any]:
    return _fields(
        config,
        "num_decoder_layers d_model d_ff num_heads layer_norm_epsilon dropout_rate dropout_rate",
        kv_channels=config.d_kv,
        softmax_scale=1.0,
        activation_func=_T5_ACTIVATIONS[config.dense_act_fn],
        gated_linear_unit=config.is_gated_act,
        add_bias_linear=False,
        normalization="RMSNorm",
    )


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
    vocab, heads, size = vocabulary(config.vocab_size), config.num_heads, config.d_kv
    rows = rows_of(
        ("embedding.word_embeddings", "shared", vocab),
        ("lm_head.output_layer", "shared" if config.tie_word_embeddings else "lm_head", vocab),
    )
    for side, last in (("encoder", 1), ("decoder", 2)):
        layer, name = f"{side}.layers.{{layer}}.", f"{side}.block.{{layer}}.layer."
        attn, cross = f"{name}0.SelfAttention.", f"{name}1.EncDecAttention."
        mlp, qkv = f"{name}{last}.DenseReluDense.", attention(heads, heads, size)
        first = (f"{mlp}wi_0", f"{mlp}wi_1") if config.is_gated_act else f"{mlp}wi"
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"
        rows += rows_of(
            (f"{side}_relative_pos_emb.relative_attention_bias", bias, same()),
            (f"{side}.final_layernorm", f"{side}.final_layer_norm", same()),
            (f"{layer}input_layernorm", f"{name}0.layer_norm", same()),
            (f"{layer}self_attention.linear_qkv", [attn + one for one in "qkv"], qkv),
            (f"{layer}self_attention.linear_proj", f"{attn}o", same(1)),
            (f"{layer}pre_mlp_layernorm", f"{name}{last}.layer_norm", same()),
            (f"{layer}mlp.linear_fc1", first, gated() if config.is_gated_act else same(0)),
            (f"{layer}mlp.linear_fc2", f"{mlp}wo", same(1)),
        )
        if side == "decoder":
            rows += rows_of(
                (f"{layer}pre_cross_attn_layernorm", f"{name}1.layer_norm", same()),
                (f"{layer}cross_attention.linear_q", f"{cross}q", same(0)),
                (f"{layer}cross_attention.linear_kv", [f"{cross}k", f"{cross}v"], keys_values(heads, size)),
                (f"{layer}cross_attention.linear_proj", f"{cross}o", same(1)),
            )
    return rows


T5 = ModelFamily(
    name="t5",
    kind="t5",
    architectures=("T5ForConditionalGeneration",),
    transformer_config=_t5_config,
    model_arguments=_t5_arguments,
    weights=_t5_weights,
    build="accel_plugins.megatron.stages:build_t5",
    check=partial(_refuse, "T5", {"dense_act_fn": _T5_ACTIVATIONS}),
)

ENTRY_POINT_GROUP = "accel.megatron_models"
"""A distribution adds a row with `[project.entry-points."accel.megatron_models"] name = "module:FAMILY"`."""

FAMILIES = Registry(
    group=ENTRY_POINT_GROUP,
    kind=ModelFamily,
    noun="model family for Megatron",
    built_in={family.name: family for family in (BERT, GPT2, LLAMA, T5)},
)
