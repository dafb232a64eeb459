"""Count the parameter elements per rank of the pipeline stages that Megatron would make of a model."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import nn

from accel_plugins.megatron.checks import check_model
from accel_plugins.megatron.plugin import MegatronLMPlugin


def stage_elements(
    model: nn.Module, tensor: int, pipeline: int, context: int = 1, *, last: int | None = None
) -> list[int]:
    """Return the number of parameter elements per rank of each pipeline stage.

    `last` is the number of layers of the last stage; by default the same as of the others.
    """
    plugin = MegatronLMPlugin(
        tp_degree=tensor,
        pp_degree=pipeline,
        context_parallel_size=context,
        decoder_last_pipeline_num_layers=last,
    )
    family = check_model(plugin, model)
    config: Any = model.config
    sizes, arguments = family.transformer_config(config), family.model_arguments(model)
    layers = sizes["num_layers"]
    each = layers // pipeline if last is None else (layers - last) // (pipeline - 1)
    is_copied = pipeline > 1 and arguments["share_embeddings_and_output_weights"]
    weights = dict(model.named_parameters(remove_duplicate=False))
    elements = [0] * pipeline
    counted: set[int] = set()
    for row in family.weights(config):
        is_of_layer = "{layer}" in row.parameter
        stage = 0 if row.parameter.startswith("embedding.") else pipeline - 1
        for layer in count() if is_of_layer else (0,):
            names = [name.format(layer=layer) for name in row.names]
            if any(name not in weights for name in names):
                break
            if id(weights[names[0]]) in counted and not is_copied:
                continue
            counted.add(id(weights[names[0]]))
            parts = [torch.empty(weights[name].shape, device="meta") for name in names]
            shard = row.packing.shard(row.packing.pack(parts), 0, tensor)
            elements[min(layer // each, pipeline - 1) if is_of_layer else stage] += shard.numel()
    return elements
