"""Elements of a model on each pipeline stage, by the rows of its family: without megatron-core."""

from __future__ import annotations

from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

import torch

from accel_plugins.megatron.check import check_context, check_model
from accel_plugins.megatron.families import find_family
from accel_plugins.megatron.model_args import model_sizes
from accel_plugins.megatron.plugin import MegatronLMPlugin

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from accel_plugins.megatron.model_family import Weight


def stage_elements(
    model: nn.Module, tensor: int, pipeline: int, context: int = 1, *, last: int | None = None
) -> list[int]:
    """Return how many elements of parameters a rank of each pipeline stage has.

    `last` is the number of layers of the last stage; as many as of the others by default.
    """
    family = find_family(model)
    config: Any = model.config
    check_context(context, family.kind, family.name)
    family.check(config)
    sizes = model_sizes(config, type(model).__name__)
    plugin = MegatronLMPlugin(tp_degree=tensor, pp_degree=pipeline, decoder_last_pipeline_num_layers=last)
    check_model(plugin, sizes)
    each = sizes.layers // pipeline if last is None else (sizes.layers - last) // (pipeline - 1)
    is_copied = pipeline > 1 and family.model_arguments(model)["share_embeddings_and_output_weights"]
    weights = dict(model.named_parameters(remove_duplicate=False))
    found = [0] * pipeline
    counted: set[int] = set()
    for row in family.weights(config):
        for layer, names in _parameters(row, weights):
            parts = [torch.empty(weights[name].shape, device="meta") for name in names]
            if id(weights[names[0]]) in counted and not is_copied:
                continue
            counted.add(id(weights[names[0]]))
            own = row.packing.shard(row.packing.pack(parts), 0, tensor)
            found[_stage(row, layer, each, pipeline)] += own.numel()
    return found


def _parameters(row: Weight, weights: dict[str, Any]) -> Iterator[tuple[int, list[str]]]:
    """Yield the layers that have the parameter, and the names of its weights."""
    every = ((layer, [one.format(layer=layer) for one in row.names]) for layer in count())
    there = takewhile(lambda one: all(name in weights for name in one[1]), every)
    for layer, names in there:
        yield layer, names
        if names == [*row.names]:  # of no layer
            return


def _stage(row: Weight, layer: int, each: int, pipeline: int) -> int:
    if "{layer}" in row.parameter:
        return min(layer // each, pipeline - 1)
    return 0 if row.parameter.startswith("embedding.") else pipeline - 1
