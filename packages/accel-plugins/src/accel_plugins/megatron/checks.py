"""Check model, optimizer and plugin before Megatron trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import AdamW, Optimizer

from accel_plugins.megatron.plugin import OWN_CODE, MegatronLMPlugin
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


def check_kind(
    plugin: MegatronLMPlugin, kind: str, name: str, *, positions: str | None, has_engine: bool | None
) -> None:
    """Refuse options that a kind of model does not have.

    `positions` is the model's `position_embedding_type` of megatron-core. `has_engine` says whether decoders
    have TransformerEngine's layers; `None` before a rank knows it.
    """
    rotary, backend = plugin.use_rotary_position_embeddings, plugin.attention_backend
    is_rotary = positions in {"rope", "yarn", "mrope"}
    rows = (
        (
            "context_parallel_size",
            (plugin.context_parallel_size or 1) > 1 and kind != "gpt",
            "only sequences of decoders are divided",
        ),
        ("use_rotary_position_embeddings", rotary not in {None, is_rotary}, "its configuration decides"),
        (
            "attention_backend",
            backend in {"flash", "fused"} and (kind != "gpt" or has_engine is False),
            "only decoders have it, on a GPU and with the library transformer-engine",
        ),
    )
    problems = [
        f"{field}={getattr(plugin, field)!r} ({reason})" for field, is_wrong, reason in rows if is_wrong
    ]
    if problems:
        raise UnsupportedError(
            f"{name!r} does not have these options: {'; '.join(problems)}. Leave them out."
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
    """Refuse optimizers that megatron-core would offload as an AdamW."""
    is_adamw = isinstance(optimizer, AdamW) or optimizer.defaults.get("decoupled_weight_decay", False)
    if plugin.optimizer_cpu_offload and not is_adamw:
        raise UnsupportedError(
            "MegatronLMPlugin(optimizer_cpu_offload=True): megatron-core does so for AdamW, not for "
            f"{type(optimizer).__name__}: use torch.optim.AdamW, or leave it out."
        )
