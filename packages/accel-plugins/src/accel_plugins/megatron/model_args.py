"""The sizes of models of transformers, and how they are described to Megatron. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from accel_plugins.megatron.families import FAMILIES
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from accel_plugins.megatron.plugin import MegatronLMPlugin

    Parser: TypeAlias = Callable[[MegatronLMPlugin, nn.Module, Mapping[str, Any] | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a transformer that parallel groups divide.

    Args:
        name: Class of the model or of its configuration, for messages.
        kv_heads: Key-value heads of a layer: fewer with grouped-query attention.
        layers: Layers; those of the decoder, where there is an encoder beside it.
        encoder_layers: Layers of the encoder beside a decoder; else 0.
        max_positions: Positions that have an embedding; `None` if positions are relative.
    """

    name: str
    heads: int
    kv_heads: int
    layers: int
    hidden: int
    ffn: int
    vocab: int
    encoder_layers: int = 0
    max_positions: int | None = None


def model_sizes(config: Any, name: str | None = None) -> Sizes:
    """Read the sizes of a model.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(
        ...     num_attention_heads=4, num_hidden_layers=2, hidden_size=64, d_ff=128, vocab_size=96
        ... )
        >>> sizes = model_sizes(config, "Mine")
        >>> sizes.heads, sizes.kv_heads, sizes.ffn
        (4, 4, 128)
    """
    known = name or type(config).__name__
    hidden = _size(config, known, "hidden_size", "d_model", "n_embd")
    heads = _size(config, known, "num_attention_heads", "num_heads", "n_head")
    is_pair = bool(getattr(config, "is_encoder_decoder", False))
    layers = _size(config, known, "num_hidden_layers", "num_layers", "n_layer")
    ffn = _first(config, "intermediate_size", "d_ff", "n_inner")
    return Sizes(
        name=known,
        heads=heads,
        kv_heads=_first(config, "num_key_value_heads") or heads,
        layers=(_first(config, "num_decoder_layers") or layers) if is_pair else layers,
        encoder_layers=layers if is_pair else 0,
        hidden=hidden,
        ffn=ffn or 4 * hidden,
        vocab=_size(config, known, "vocab_size"),
        max_positions=_first(config, "max_position_embeddings", "n_positions"),
    )


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _size(config: Any, known: str, *names: str) -> int:
    value = _first(config, *names)
    if value is None:
        raise SettingsError(
            f"The configuration of {known} has no {names[0]}, without which Megatron cannot train the model."
        )
    return int(value)


_PARSERS: dict[str, Parser] = {}
_OF_KINDS: Mapping[str, str] = {"gpt": "llama", "bert": "bert", "t5": "t5"}
_ANY_LENGTH = 1024
"""Tokens of a sequence of a model with as many positions as are asked for, if nobody says."""


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """Make a decorator that registers how a type of model is described to Megatron.

    Args:
        model_type: As in `model.config.model_type`.

    Returns:
        A decorator of functions `f(megatron_lm_plugin, model, batch_data)` that enter the sizes of the model
        into `megatron_lm_plugin.megatron_lm_default_args`.

    Example:
        >>> @add_model_config_to_megatron_parser("my_model")
        ... def describe(megatron_lm_plugin, model, batch_data):
        ...     megatron_lm_plugin.megatron_lm_default_args["num_layers"] = model.config.num_layers
    """

    def register(parser: Parser) -> Parser:
        _PARSERS[model_type] = parser
        return parser

    return register


def enter_network_args(
    plugin: MegatronLMPlugin, model: nn.Module, batch_data: Mapping[str, Any] | None
) -> None:
    """Enter the sizes of a model into the arguments of a plugin."""
    config: Any = getattr(model, "config", None)
    model_type: Any = getattr(config, "model_type", None)
    parser = _PARSERS.get(model_type) or _parser_of_row(model_type)
    if parser is None:
        raise SettingsError(
            f"{type(model).__name__} is of type {model_type!r}, which is not described to Megatron (known: "
            f"{', '.join(sorted(_PARSERS))}): register a function with "
            f"@add_model_config_to_megatron_parser({model_type!r})."
        )
    parser(plugin, model, batch_data)


def _parser_of_row(model_type: Any) -> Parser | None:
    """Return what describes a family of another distribution: it is like the built-in one of its kind."""
    row = FAMILIES.available().get(model_type)
    return None if row is None else _PARSERS[_OF_KINDS[row.kind]]


_DESCRIBED = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")


def described(plugin: MegatronLMPlugin) -> dict[str, Any]:
    """Return fields of megatron-core's `TransformerConfig` for a model that has no row."""
    args = plugin.megatron_lm_default_args
    return {name: args[name] for name in _DESCRIBED if name in args}


def _shared(plugin: MegatronLMPlugin, model: Any, family: str) -> Sizes:
    sizes = model_sizes(model.config, type(model).__name__)
    plugin.megatron_lm_default_args |= {
        "model_type_name": family,
        "num_layers": sizes.encoder_layers or sizes.layers,
        "hidden_size": sizes.hidden,
        "ffn_hidden_size": sizes.ffn,
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.kv_heads,
        "max_position_embeddings": sizes.max_positions or _ANY_LENGTH,
        "orig_vocab_size": sizes.vocab,
        "model_return_dict": bool(getattr(model.config, "return_dict", True)),
    }
    return sizes


def _length(batch: Mapping[str, Any] | None, key: str) -> int | None:
    return None if batch is None or key not in batch else int(batch[key].shape[1])


@add_model_config_to_megatron_parser("gpt2")
@add_model_config_to_megatron_parser("llama")
def _decoder(plugin: MegatronLMPlugin, model: nn.Module, batch_data: Mapping[str, Any] | None) -> None:
    sizes = _shared(plugin, model, "gpt")
    plugin.seq_length = plugin.seq_length or _length(batch_data, "input_ids") or sizes.max_positions
    plugin.megatron_lm_default_args |= {
        "pretraining_flag": True,
        "return_logits": plugin.return_logits,
        "seq_length": plugin.seq_length,
    }


@add_model_config_to_megatron_parser("bert")
def _encoder(plugin: MegatronLMPlugin, model: nn.Module, batch_data: Mapping[str, Any] | None) -> None:
    sizes = _shared(plugin, model, "bert")
    plugin.seq_length = plugin.seq_length or _length(batch_data, "input_ids") or sizes.max_positions
    name = sizes.name.lower()
    plugin.megatron_lm_default_args |= {
        "pretraining_flag": "pretraining" in name or "maskedlm" in name,
        "bert_binary_head": "pretraining" in name,
        "num_labels": int(getattr(model.config, "num_labels", 2)),
        "return_logits": plugin.return_logits,
        "seq_length": plugin.seq_length,
    }


@add_model_config_to_megatron_parser("t5")
def _encoder_decoder(
    plugin: MegatronLMPlugin, model: nn.Module, batch_data: Mapping[str, Any] | None
) -> None:
    sizes = _shared(plugin, model, "t5")
    longest = sizes.max_positions or _ANY_LENGTH
    plugin.encoder_seq_length = plugin.encoder_seq_length or _length(batch_data, "input_ids") or longest
    plugin.decoder_seq_length = plugin.decoder_seq_length or _length(batch_data, "labels") or longest
    plugin.megatron_lm_default_args |= {
        "pretraining_flag": True,
        "return_logits": plugin.return_logits,
        "decoder_start_token_id": getattr(model.config, "decoder_start_token_id", None) or 0,
        "pad_token_id": getattr(model.config, "pad_token_id", None) or 0,
        "encoder_seq_length": plugin.encoder_seq_length,
        "decoder_seq_length": plugin.decoder_seq_length,
    }
