"""Check a model and the sizes of groups before Megatron trains; without megatron-core."""

from __future__ import annotations

import re
from typing import Any

from accel_plugins.megatron.families import ModelFamily, find_family
from accel_plugins.megatron.plugin import MegatronLMPlugin
from accel_state.errors import SettingsError, UnsupportedError


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


def check_model(plugin: MegatronLMPlugin, model: Any) -> ModelFamily:
    """Find a model's family; refuse options that it does not have, and sizes that groups do not divide."""
    family, name = find_family(model), type(model).__name__
    family.check(model.config)
    sizes, arguments = family.transformer_config(model.config), family.model_arguments(model)
    # 1. Every weight has a row.
    names = (re.escape(name) for row in family.weights(model.config) for name in row.names)
    known = re.compile("|".join(name.replace(r"\{layer\}", r"\d+") for name in names))
    if missing := [name for name, _ in model.named_parameters() if not known.fullmatch(name)]:
        raise SettingsError(
            f"{name} has weights without a row in its family, which Megatron would not train or save: "
            f"{', '.join(missing)}. Add rows for them, or leave out what makes them."
        )
    # 2. The family has the options.
    is_decoder, rotary = family.kind == "gpt", plugin.use_rotary_position_embeddings
    is_rotary = arguments.get("position_embedding_type") in {"rope", "yarn", "mrope"}
    refused: dict[str, str] = {}
    if rotary not in {None, is_rotary}:
        refused["use_rotary_position_embeddings"] = "its configuration decides"
    if not is_decoder and plugin.context_parallel_size != 1:
        refused["context_parallel_size"] = "decoders only"
    if not is_decoder and plugin.attention_backend in {"flash", "fused"}:
        refused["attention_backend"] = "decoders only"
    if refused:
        wrong = "; ".join(f"{key}={getattr(plugin, key)!r} ({reason})" for key, reason in refused.items())
        raise UnsupportedError(f"{family.name!r} does not have {wrong}: leave it out.")
    # 3. The sizes divide.
    tensor, stages = plugin.tp_degree or 1, plugin.pp_degree or 1
    heads, layers, width = sizes["num_attention_heads"], sizes["num_layers"], sizes["ffn_hidden_size"]
    groups = sizes.get("num_query_groups", heads)
    last, virtual = plugin.decoder_last_pipeline_num_layers, plugin.num_layers_per_virtual_pipeline_stage
    is_uneven = layers % (stages * (virtual or 1))
    if last is not None:
        is_uneven = layers - last < stages - 1 or (layers - last) % (stages - 1)
    options = (f", decoder_last_pipeline_num_layers={last}" if last else "") + (
        f", num_layers_per_virtual_pipeline_stage={virtual}" if virtual else ""
    )
    rows = {
        f"{heads} attention heads by tp_degree={tensor}": heads % tensor,
        f"{groups} key-value heads by tp_degree={tensor}": groups % tensor and tensor % groups,
        f"{width} features of the intermediate layer by tp_degree={tensor}": width % tensor,
        f"an encoder and a decoder by pp_degree={stages} (use tp_degree)": stages > 1
        and "encoder_layers" in arguments,
        f"{layers} layers by pp_degree={stages}{options}": is_uneven,
    }
    if problems := [text for text, is_problem in rows.items() if is_problem]:
        raise SettingsError(f"{name} cannot be divided in this way: {'; '.join(problems)}.")
    return family
