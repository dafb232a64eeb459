"""Compiling models as the plugin says."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from accel_ops.modules import is_compiled_module
from accel_state.errors import UnsupportedError
from accel_state.labels import DynamoBackend

if TYPE_CHECKING:
    from torch import nn

    from accel_plugins.kwargs.dynamo import TorchDynamoPlugin


def compile_model(model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
    """Compile a model as the plugin says; a compiled one is left alone.

    Raises:
        UnsupportedError: The plugin asks for regional compilation.
    """
    if plugin.backend == DynamoBackend.NO or is_compiled_module(model):
        return model
    if plugin.use_regional_compilation:
        raise UnsupportedError(
            f"{plugin!r}: regional compilation is not part of this version of accel; leave out "
            "use_regional_compilation to compile the whole model."
        )
    return cast("nn.Module", torch.compile(model, **plugin.to_kwargs()))
