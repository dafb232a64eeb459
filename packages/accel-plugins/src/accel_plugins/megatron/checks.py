"""Check model, batch and plugin before Megatron trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from torch.optim import Adam, AdamW, Optimizer

from accel_plugins.megatron.arguments import Sizes
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


def check_model(plugin: MegatronLMPlugin, sizes: Sizes) -> None:
    """Refuse a model whose sizes the parallel groups do not divide."""
    tensor = plugin.tp_degree or 1
    divided = (("attention heads", sizes.heads), ("features of the intermediate layer", sizes.ffn))
    problems = [
        f"{number} {what} cannot be divided by tp_degree={tensor}"
        for what, number in divided
        if number % tensor
    ]
    if sizes.kv_heads % tensor and tensor % sizes.kv_heads:
        problems.append(
            f"{sizes.kv_heads} key-value heads neither divide tp_degree={tensor} nor are divided by it"
        )
    stages, last = plugin.pp_degree or 1, plugin.decoder_last_pipeline_num_layers
    virtual, layers = plugin.num_layers_per_virtual_pipeline_stage, sizes.layers
    if stages > 1 and sizes.encoder_layers:
        problems.append(
            f"megatron-core does not divide an encoder and a decoder into pp_degree={stages} stages: remove "
            "it, and use tp_degree, which divides every layer, or use_distributed_optimizer"
        )
    elif last is not None:
        if layers - last < stages - 1 or (layers - last) % (stages - 1):
            problems.append(
                f"{layers} layers, less the {last} of decoder_last_pipeline_num_layers, cannot be divided by "
                f"the {stages - 1} other stages of pp_degree={stages}"
            )
    elif layers % stages:
        problems.append(f"{layers} layers cannot be divided by pp_degree={stages}")
    elif virtual is not None and layers // stages % virtual:
        problems.append(
            f"the {layers // stages} layers of a stage (pp_degree={stages}) cannot be divided by "
            f"num_layers_per_virtual_pipeline_stage={virtual}"
        )
    if problems:
        raise SettingsError(f"{sizes.name} cannot be divided in this way: {'; '.join(problems)}.")


def check_schedule(plugin: MegatronLMPlugin, *, has_optimizer: bool, has_placeholder: bool) -> None:
    """Refuse a schedule without an optimizer; warn about fields of a schedule that is not prepared."""
    if has_placeholder and not has_optimizer:
        raise SettingsError(
            "prepare() got a MegatronLMDummyScheduler without its optimizer: prepare them in one call, as in "
            "prepare(model, optimizer, scheduler)."
        )
    if has_optimizer and not has_placeholder:
        _warn_unread(plugin, _OF_SCHEDULES, "Megatron's schedule: prepare a MegatronLMDummyScheduler")


def check_data_options(plugin: MegatronLMPlugin, *, has_indexed: bool, has_placeholder: bool) -> None:
    """Warn about options of indexed datasets without such loaders; a schedule also needs a length."""
    if has_indexed or has_own_code(plugin):
        return
    names = _OF_DATA if has_placeholder else (*_OF_DATA, "train_iters", "train_samples")
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


def check_positions(plugin: MegatronLMPlugin, kind: str | None, name: str) -> None:
    """Reject a position embedding type for which a model was not built.

    `kind` is the model's `position_embedding_type` of megatron-core, `None` for learned positions.
    """
    wanted, has_rotary = plugin.use_rotary_position_embeddings, kind in {"rope", "yarn", "mrope"}
    if wanted is not None and bool(wanted) is not has_rotary:
        raise SettingsError(
            f"MegatronLMPlugin(use_rotary_position_embeddings={wanted!r}): {name} "
            f"{'has' if has_rotary else 'does not have'} rotary positions, which its configuration decides: "
            "leave it out."
        )


def check_context(size: int, kind: str, name: str) -> None:
    """Refuse context parallelism of models other than decoders."""
    if size > 1 and kind != "gpt":
        raise UnsupportedError(
            f"MegatronLMPlugin(context_parallel_size={size}): megatron-core divides sequences of decoders, "
            f"not those of {name!r}, whose positions it numbers from 0 in every part: leave it out."
        )


def check_recompute(plugin: MegatronLMPlugin, kind: str) -> None:
    """Refuse to recompute several layers of a T5 at once."""
    number = plugin.recompute_num_layers or 1
    if kind == "t5" and plugin.recompute_method == "uniform" and number > 1:
        raise UnsupportedError(
            f"MegatronLMPlugin(recompute_num_layers={number}): a T5 recomputes layer by layer; leave it out, "
            "or use recompute_method='block'."
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


def check_attention(plugin: MegatronLMPlugin, kind: str, name: str, *, has_engine: bool) -> None:
    """Refuse attention options that the model's own or TransformerEngine's layers would ignore."""
    backend = plugin.attention_backend
    if kind != "gpt" and backend not in {"auto", "local"}:
        raise UnsupportedError(
            f"MegatronLMPlugin(attention_backend={backend!r}): only decoders have TransformerEngine's "
            f"attention, {name!r} has one of its own: leave it out."
        )
    by_engine = kind == "gpt" and has_engine
    if backend in {"flash", "fused"} and not by_engine:
        raise UnsupportedError(
            f"MegatronLMPlugin(attention_backend={backend!r}) is attention of TransformerEngine, which needs "
            "a GPU and the library transformer-engine: install it, or leave it out."
        )
    by_torch = kind == "t5" or (plugin.context_parallel_size or 1) > 1
    if plugin.attention_softmax_in_fp32 is False and (by_engine or by_torch):
        raise UnsupportedError(
            f"MegatronLMPlugin(attention_softmax_in_fp32=False): the attention of {name!r} decides itself in "
            "which precision it computes here: leave it out."
        )


def check_token_loss(plugin: MegatronLMPlugin, kind: str, name: str) -> None:
    """Refuse the loss per token for models whose train step does not support it."""
    if plugin.calculate_per_token_loss and kind == "bert" and plugin.custom_train_step_class is None:
        raise UnsupportedError(
            f"MegatronLMPlugin(calculate_per_token_loss=True): the train step of {name!r} has no loss by "
            "token: leave it out, or give a custom_train_step_class."
        )


_LENGTHS: Mapping[str, tuple[str, ...]] = {"t5": ("encoder_seq_length", "decoder_seq_length")}
_OF_DECODERS = ("labels", "decoder_input_ids", "decoder_attention_mask", "text_dec")


def check_sequence_lengths(plugin: MegatronLMPlugin, kind: str, name: str) -> None:
    """Refuse length options of sequences that a model does not have."""
    wanted = _LENGTHS.get(kind, ("seq_length",))
    unused = [f"{field}={value}" for field, value in plugin.longest.items() if field not in wanted]
    if unused:
        raise SettingsError(
            f"MegatronLMPlugin({', '.join(unused)}) has no effect on the sequences of {name!r}: use "
            f"{', '.join(wanted)}."
        )


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
