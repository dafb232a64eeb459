"""Compile models with the options of a `TorchDynamoPlugin`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from accel_ops.compile import compile_regions
from accel_ops.modules import extract_model_from_parallel, has_compiled_regions, is_compiled_module
from accel_state.labels import DynamoBackend

if TYPE_CHECKING:
    from torch import nn

    from accel_plugins.kwargs.dynamo import TorchDynamoPlugin


def compile_model(model: nn.Module, plugin: TorchDynamoPlugin, *, in_place: bool = False) -> nn.Module:
    """Compile a model with the plugin's options; leave a compiled one as it is.

    Regions are compiled in place, inside the model's wrappers; otherwise the result wraps all.

    Args:
        model: The model, wrapped or not.
        plugin: The options of `torch.compile`.
        in_place: Whether to compile the model inside its wrapper, which does not compute.
    """
    if plugin.backend == DynamoBackend.NO or is_compiled_module(model):
        return model
    if plugin.use_regional_compilation:
        inner = extract_model_from_parallel(model)
        if not has_compiled_regions(inner):
            compile_regions(inner, **plugin.to_kwargs())
        return model
    if in_place:
        inner = extract_model_from_parallel(model)
        if not has_compiled_regions(inner):
            inner.compile(**plugin.to_kwargs())
        return model
    return cast("nn.Module", torch.compile(model, **plugin.to_kwargs()))
