"""What Megatron must know of a family of models of transformers: one record per family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from accel_plugins.megatron.packing import Packing


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
