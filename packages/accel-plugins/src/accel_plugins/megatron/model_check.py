"""Preflight checks of one model: whether its family, its weights and its sizes fit the plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_plugins.megatron.check import (
    check_attention,
    check_context,
    check_indexed_data,
    check_model,
    check_positions,
    check_recompute,
    check_sequence_lengths,
    check_token_loss,
)
from accel_plugins.megatron.configs import check_other_args
from accel_plugins.megatron.engine import check_train_step
from accel_plugins.megatron.families import find_family
from accel_plugins.megatron.library import check_device, uses_transformer_engine
from accel_plugins.megatron.model_args import model_sizes
from accel_plugins.megatron.weights import check_covered

if TYPE_CHECKING:
    from accel_plugins.megatron.model_family import ModelFamily
    from accel_plugins.megatron.plugin import MegatronLMPlugin


def check_family_model(plugin: MegatronLMPlugin, model: Any, *, context: int, has_indexed: bool) -> None:
    """Refuse a model of transformers that the plugin, or indexed data sets prepared with it, do not fit."""
    family = find_family(model)
    kind, name = family.kind, family.name
    check_context(context, kind, name)
    check_recompute(plugin, kind)
    check_token_loss(plugin, kind, name)
    check_sequence_lengths(plugin, kind, name)
    if kind != "gpt":  # whether decoders have TransformerEngine's layers is known where they run
        check_attention(plugin, kind, name, has_engine=False)
    if has_indexed:
        check_indexed_data(plugin, kind, name)
    family.check(model.config)
    check_covered(model, family.weights(model.config))
    check_positions(
        plugin, family.model_arguments(model).get("position_embedding_type"), type(model).__name__
    )
    check_model(plugin, model_sizes(model.config, type(model).__name__))


def check_run(plugin: MegatronLMPlugin, family: ModelFamily | None) -> None:
    """Refuse what is known where the model is trained, with the library: device, layers and train step."""
    check_device()
    check_train_step(plugin)
    check_other_args(plugin)
    if family is not None:
        has_engine = uses_transformer_engine(plugin.attention_backend)
        check_attention(plugin, family.kind, family.name, has_engine=has_engine)
