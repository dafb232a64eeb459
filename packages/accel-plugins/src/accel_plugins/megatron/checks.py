"""Check model, batch and plugin before Megatron trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from torch.optim import Adam, AdamW, Optimizer

from accel_plugins.megatron.plugin import DEFAULTS, OWN_CODE, MegatronLMPlugin
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.logging import get_logger

logger = get_logger(__name__)


def data_parallel_size(tensor: int, pipeline: int, context: int, world_size: int) -> int:
    """Return the number of replicas of a model.

    Example:
        >>> data_parallel_size(2, 2, 1, 8)
        2
    """
    size = tensor * pipeline * context
    if world_size % size:
        raise SettingsError(
            f"tp_degree={tensor}, pp_degree={pipeline} and context_parallel_size={context} make groups of "
            f"{size} ranks, into which {world_size} cannot be divided: start a multiple of {size} processes, "
            "or make the sizes smaller."
        )
    return world_size // size


def check_model(
    plugin: MegatronLMPlugin, sizes: Mapping[str, Any], name: str, *, has_encoder: bool = False
) -> None:
    """Refuse a model whose sizes the parallel groups do not divide.

    `sizes` are fields of megatron-core's `TransformerConfig`; `has_encoder` says whether its decoder has one.
    """
    tensor, stages = plugin.tp_degree or 1, plugin.pp_degree or 1
    heads, layers = sizes["num_attention_heads"], sizes["num_layers"]
    groups, last = sizes.get("num_query_groups", heads), plugin.decoder_last_pipeline_num_layers
    each, virtual = layers // stages, plugin.num_layers_per_virtual_pipeline_stage
    options = next(
        (
            f" and {name}={value}"
            for name in ("decoder_last_pipeline_num_layers", "num_layers_per_virtual_pipeline_stage")
            if (value := getattr(plugin, name)) is not None
        ),
        "",
    )
    if last is None:
        is_uneven = layers % stages or (virtual is not None and each % virtual)
    else:
        is_uneven = layers - last < stages - 1 or (layers - last) % (stages - 1)
    rows = (
        (heads % tensor, f"{heads} attention heads by tp_degree={tensor}"),
        (groups % tensor and tensor % groups, f"{groups} key-value heads by tp_degree={tensor}"),
        (
            sizes["ffn_hidden_size"] % tensor,
            f"{sizes['ffn_hidden_size']} features of the intermediate layer by tp_degree={tensor}",
        ),
        (
            stages > 1 and has_encoder,
            f"an encoder and a decoder by pp_degree={stages} (use tp_degree, which divides every layer)",
        ),
        (is_uneven, f"{layers} layers by pp_degree={stages}{options}"),
    )
    if problems := [text for is_problem, text in rows if is_problem]:
        raise SettingsError(f"{name} cannot be divided in this way: {'; '.join(problems)}.")


def check_objects(
    plugin: MegatronLMPlugin,
    *,
    has_optimizer: bool,
    has_schedule: bool,
    has_loaders: bool,
    has_indexed: bool,
) -> None:
    """Refuse a schedule without an optimizer; warn once about options of objects that are not prepared."""
    if has_schedule and not has_optimizer:
        raise SettingsError(
            "prepare() got a MegatronLMDummyScheduler without its optimizer: prepare them in one call, as in "
            "prepare(model, optimizer, scheduler)."
        )
    if has_optimizer and not has_schedule:
        _warn_unread(plugin, _OF_SCHEDULES, "Megatron's schedule: prepare a MegatronLMDummyScheduler")
    if has_optimizer and has_loaders and not has_indexed and not has_own_code(plugin):
        names = _OF_DATA if has_schedule else (*_OF_DATA, "train_iters", "train_samples")
        _warn_unread(plugin, names, "indexed data sets: prepare a MegatronLMDummyDataLoader")


_OF_SCHEDULES = (
    *("lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples"),
    *("lr_warmup_fraction", "min_lr", "weight_decay_incr_style", "start_weight_decay", "end_weight_decay"),
)
_OF_DATA = ("eod_mask_loss", "consumed_samples", "eval_iters", "eval_interval")


def _warn_unread(plugin: MegatronLMPlugin, names: Iterable[str], missing: str) -> None:
    """Warn once about fields that differ from their default."""
    defaults = {field.name: DEFAULTS.get(field.name, field.default) for field in fields(plugin)}
    values = {name: value for name in names if (value := getattr(plugin, name)) != defaults[name]}
    if values:
        described = ", ".join(f"{name}={value!r}" for name, value in values.items())
        logger.warning_once("MegatronLMPlugin(%s) has no effect without %s.", described, missing)


def check_kind(
    plugin: MegatronLMPlugin, kind: str, name: str, *, positions: str | None, has_engine: bool | None
) -> None:
    """Refuse options that a kind of model would ignore without a word.

    `positions` is the model's `position_embedding_type` of megatron-core. `has_engine` says whether decoders
    have TransformerEngine's layers; `None` before a rank knows it.
    """
    context, rotary = plugin.context_parallel_size or 1, plugin.use_rotary_position_embeddings
    backend, is_decoder = plugin.attention_backend, kind == "gpt"
    is_rotary = positions in {"rope", "yarn", "mrope"}
    lengths = ("encoder_seq_length", "decoder_seq_length") if kind == "t5" else ("seq_length",)
    needs_engine = backend in {"flash", "fused"} and (not is_decoder or has_engine is False)
    decides = kind == "t5" or context > 1 or (is_decoder and has_engine is True)
    refused = (
        ("context_parallel_size", context > 1 and not is_decoder, "only sequences of decoders are divided"),
        (
            "recompute_num_layers",
            kind == "t5" and plugin.recompute_method == "uniform" and (plugin.recompute_num_layers or 1) > 1,
            "a T5 recomputes layer by layer, or with recompute_method='block'",
        ),
        (
            "calculate_per_token_loss",
            kind == "bert" and plugin.calculate_per_token_loss and plugin.custom_train_step_class is None,
            "its train step has no loss by token",
        ),
        ("use_rotary_position_embeddings", rotary not in {None, is_rotary}, "its configuration decides"),
        (
            "attention_backend",
            needs_engine or (not is_decoder and backend == "unfused"),
            "only decoders have it, on a GPU and with the library transformer-engine",
        ),
        (
            "attention_softmax_in_fp32",
            plugin.attention_softmax_in_fp32 is False and decides,
            "its attention decides itself in which precision it computes",
        ),
        *(
            (field, field not in lengths, f"the lengths of its sequences are {', '.join(lengths)}")
            for field in plugin.longest
        ),
    )
    problems = [
        f"{field}={getattr(plugin, field)!r} ({reason})"
        for field, is_refused, reason in refused
        if is_refused
    ]
    if problems:
        raise UnsupportedError(
            f"MegatronLMPlugin has options that have no effect on {name!r}: {'; '.join(problems)}. Leave "
            "them out."
        )


def check_indexed_data(plugin: MegatronLMPlugin, kind: str, name: str) -> None:
    """Refuse indexed data sets for models other than decoders."""
    if kind != "gpt" and plugin.custom_megatron_datasets_provider_function is None:
        raise UnsupportedError(
            f"A MegatronLMDummyDataLoader makes data sets of decoders, not those of {name!r}: give "
            "MegatronLMPlugin a custom_megatron_datasets_provider_function, or prepare a DataLoader of "
            "PyTorch."
        )


def has_own_code(plugin: MegatronLMPlugin) -> bool:
    """Return whether code of the user runs within the engine."""
    return any(getattr(plugin, name) is not None for name in OWN_CODE)


def check_offload(plugin: MegatronLMPlugin, optimizer: Optimizer) -> None:
    """Refuse optimizers that megatron-core cannot offload, or keep in fewer bits."""
    if plugin.use_precision_aware_optimizer and not isinstance(optimizer, Adam | AdamW):
        raise UnsupportedError(
            "MegatronLMPlugin(use_precision_aware_optimizer=True): megatron-core does so for AdamW, not for "
            f"{type(optimizer).__name__}: use torch.optim.AdamW, or leave it out."
        )
    is_adamw = isinstance(optimizer, AdamW) or optimizer.defaults.get("decoupled_weight_decay", False)
    if plugin.optimizer_cpu_offload and not is_adamw:
        raise UnsupportedError(
            "MegatronLMPlugin(optimizer_cpu_offload=True): megatron-core does so for AdamW, not for "
            f"{type(optimizer).__name__}: use torch.optim.AdamW, or leave it out."
        )


_OF_DECODERS = ("labels", "decoder_input_ids", "decoder_attention_mask", "text_dec")


def check_lengths_of_batch(plugin: MegatronLMPlugin, sequences: Mapping[str, Any]) -> None:
    """Refuse sequences that are longer than the plugin's lengths."""
    for name, longest in plugin.longest.items():
        of_decoder = name == "decoder_seq_length"
        lengths = [
            tokens.shape[1]
            for key, tokens in sequences.items()
            if getattr(tokens, "ndim", 0) == 2
            and (name == "seq_length" or of_decoder == (key in _OF_DECODERS))
        ]
        length = max(lengths, default=0)
        if length > longest:
            raise SettingsError(
                f"Sequences of {length} tokens are longer than MegatronLMPlugin({name}={longest}): truncate "
                "them, or leave it out."
            )
