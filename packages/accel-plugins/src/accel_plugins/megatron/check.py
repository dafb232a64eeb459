"""Preflight checks of sizes: pure functions, which every rank runs before Megatron makes a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_plugins.megatron.model_args import Sizes
    from accel_plugins.megatron.plugin import MegatronLMPlugin


def data_parallel_size(tensor: int, pipeline: int, context: int, world_size: int) -> int:
    """Return how many replicas of a model there are.

    Raises:
        SettingsError: The product of the sizes does not divide the number of ranks.

    Example:
        >>> data_parallel_size(2, 2, 1, 8)
        2
    """
    one = tensor * pipeline * context
    if world_size % one:
        raise SettingsError(
            f"tp_degree={tensor}, pp_degree={pipeline} and context_parallel_size={context} make groups of "
            f"{one} ranks, into which {world_size} cannot be divided: start a multiple of {one} processes, "
            "or make the sizes smaller."
        )
    return world_size // one


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
    problems += _layer_problems(plugin, sizes)
    if problems:
        raise SettingsError(f"{sizes.name} cannot be divided so: {'; '.join(problems)}.")


def _layer_problems(plugin: MegatronLMPlugin, sizes: Sizes) -> list[str]:
    stages, last = plugin.pp_degree or 1, plugin.decoder_last_pipeline_num_layers
    virtual, layers = plugin.num_layers_per_virtual_pipeline_stage, sizes.layers
    if stages > 1 and sizes.encoder_layers:
        reason = f"megatron-core does not divide an encoder and a decoder into pp_degree={stages} stages"
        instead = "leave it out, and use tp_degree, which divides every layer, or use_distributed_optimizer"
        return [f"{reason}: {instead}"]
    if last is not None:
        rest, others = layers - last, stages - 1
        uneven = (
            f"{layers} layers, less the {last} of decoder_last_pipeline_num_layers, cannot be divided by the "
        )
        return (
            [f"{uneven}{others} other stages of pp_degree={stages}"] if rest < others or rest % others else []
        )
    if layers % stages:
        return [f"{layers} layers cannot be divided by pp_degree={stages}"]
    own = layers // stages
    if virtual is not None and own % virtual:
        uneven = f"the {own} layers of a stage (pp_degree={stages}) cannot be divided by "
        return [f"{uneven}num_layers_per_virtual_pipeline_stage={virtual}"]
    return []


_OF_SCHEDULES: Mapping[str, Any] = {
    "lr_decay_style": "linear",
    "lr_decay_iters": None,
    "lr_decay_samples": None,
    "lr_warmup_iters": None,
    "lr_warmup_samples": None,
    "lr_warmup_fraction": None,
    "min_lr": 0,
    "weight_decay_incr_style": "constant",
    "start_weight_decay": None,
    "end_weight_decay": None,
}
"""Fields that only Megatron's own schedule reads, with their defaults."""


def check_schedule(plugin: MegatronLMPlugin, *, has_optimizer: bool, has_placeholder: bool) -> None:
    """Refuse a schedule without its optimizer, and fields of a schedule that nobody has prepared."""
    if has_placeholder and not has_optimizer:
        raise SettingsError(
            "prepare() got a MegatronLMDummyScheduler without its optimizer: prepare them in one call, as in "
            "prepare(model, optimizer, scheduler)."
        )
    described = [
        f"{name}={getattr(plugin, name)!r}"
        for name, default in _OF_SCHEDULES.items()
        if getattr(plugin, name) != default
    ]
    if described and has_optimizer and not has_placeholder:
        raise SettingsError(
            f"MegatronLMPlugin({', '.join(described)}) has no effect without Megatron's schedule: prepare a "
            "MegatronLMDummyScheduler with the optimizer, or leave it out."
        )


_ROTARY = ("rope", "yarn", "mrope")


def check_positions(plugin: MegatronLMPlugin, kind: str | None, name: str) -> None:
    """Refuse to give a model other positions than its weights were made for.

    `kind` is the model's `position_embedding_type` of megatron-core, `None` for learned positions.
    """
    wanted, found = plugin.use_rotary_position_embeddings, kind in _ROTARY
    if wanted is not None and bool(wanted) is not found:
        raise SettingsError(
            f"MegatronLMPlugin(use_rotary_position_embeddings={wanted!r}): {name} "
            f"{'has' if found else 'does not have'} rotary positions, which its configuration decides: leave "
            "it out."
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
    """Refuse to make indexed data sets of models other than decoders."""
    if kind != "gpt" and plugin.custom_megatron_datasets_provider_function is None:
        raise UnsupportedError(
            f"A MegatronLMDummyDataLoader makes data sets of decoders, not those of {name!r}: give "
            "MegatronLMPlugin a custom_megatron_datasets_provider_function, or prepare a DataLoader of "
            "PyTorch."
        )
