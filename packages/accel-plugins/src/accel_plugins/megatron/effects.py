"""Refuse options that would have no effect on a run: pure functions, before a process group is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Adam, AdamW

from accel_plugins.megatron.rules import OWN_CODE
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

    from accel_plugins.megatron.plugin import MegatronLMPlugin


def has_own_code(plugin: MegatronLMPlugin) -> bool:
    """Return whether code of the user runs within the engine."""
    return any(getattr(plugin, name) is not None for name in OWN_CODE)


def check_offload(plugin: MegatronLMPlugin, optimizer: Optimizer) -> None:
    """Refuse optimizers that megatron-core does not offload, or keep in fewer bits."""
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
    """Refuse options of attention that the model's own would not read.

    Args:
        plugin: Has the options.
        kind: The kind of the model's family.
        name: The family's name.
        has_engine: Whether TransformerEngine makes the layers of decoders.
    """
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
    """Refuse the loss by token of models whose train step has none."""
    if plugin.calculate_per_token_loss and kind == "bert" and plugin.custom_train_step_class is None:
        raise UnsupportedError(
            f"MegatronLMPlugin(calculate_per_token_loss=True): the train step of {name!r} has no loss by "
            "token: leave it out, or give a custom_train_step_class."
        )


_LENGTHS: Mapping[str, tuple[str, ...]] = {"t5": ("encoder_seq_length", "decoder_seq_length")}
_OF_DECODERS = ("labels", "decoder_input_ids", "decoder_attention_mask", "text_dec")


def check_sequence_lengths(plugin: MegatronLMPlugin, kind: str, name: str) -> None:
    """Refuse the lengths of sequences that a model does not have."""
    wanted = _LENGTHS.get(kind, ("seq_length",))
    unused = [f"{one}={value}" for one, value in plugin.longest.items() if one not in wanted]
    if unused:
        raise SettingsError(
            f"MegatronLMPlugin({', '.join(unused)}) has no effect on the sequences of {name!r}: use "
            f"{', '.join(wanted)}."
        )


def check_lengths_of_batch(plugin: MegatronLMPlugin, batch: Mapping[str, Any]) -> None:
    """Refuse sequences that are longer than the plugin says."""
    for name, longest in plugin.longest.items():
        of_decoder = name == "decoder_seq_length"
        lengths = [
            one.shape[1]
            for key, one in batch.items()
            if getattr(one, "ndim", 0) == 2 and (name == "seq_length" or of_decoder == (key in _OF_DECODERS))
        ]
        length = max(lengths, default=0)
        if length > longest:
            raise SettingsError(
                f"Sequences of {length} tokens are longer than MegatronLMPlugin({name}={longest}): truncate "
                "them, or leave it out."
            )


_OF_DATA: Mapping[str, Any] = {
    "eod_mask_loss": False,
    "consumed_samples": None,
    "eval_iters": 100,
    "eval_interval": 1000,
    "train_iters": None,
    "train_samples": None,
}
_OF_SCHEDULES = ("train_iters", "train_samples")


def check_data_options(plugin: MegatronLMPlugin, *, has_indexed: bool, has_placeholder: bool) -> None:
    """Refuse options of indexed data sets where loaders are others.

    Args:
        plugin: Has the options.
        has_indexed: Whether a `MegatronLMDummyDataLoader` is prepared.
        has_placeholder: Whether a `MegatronLMDummyScheduler` is prepared, which has a length, too.
    """
    if has_indexed or has_own_code(plugin):
        return
    unused = [
        f"{name}={getattr(plugin, name)!r}"
        for name, default in _OF_DATA.items()
        if getattr(plugin, name) != default and not (has_placeholder and name in _OF_SCHEDULES)
    ]
    if unused:
        raise SettingsError(
            f"MegatronLMPlugin({', '.join(unused)}) has no effect without indexed data sets (prepare a "
            "MegatronLMDummyDataLoader), or a MegatronLMDummyScheduler for the length of the training: leave "
            "it out."
        )
