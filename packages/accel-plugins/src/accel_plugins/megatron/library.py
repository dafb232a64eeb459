"""megatron-core, imported when it is needed."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

from accel_state.available import is_installed, require

EXTRA = "accel-plugins[megatron]"


def load_library(what: str) -> None:
    """Import megatron-core.

    Args:
        what: The feature that needs it, as the subject of a sentence.

    Raises:
        MissingDependencyError: It is not installed; the message names the extra.
    """
    require("megatron_lm", what, install=EXTRA)
    core("parallel_state")


def core(name: str) -> Any:
    """Import a submodule of megatron-core.

    Args:
        name: Name of the submodule, without the prefix `megatron.core.`.
    """
    with warnings.catch_warnings():
        # Its users cannot change the deprecated calls that it makes while it is imported.
        for kind in (UserWarning, DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", kind)
        return importlib.import_module(f"megatron.core.{name}")


def uses_transformer_engine(backend: Any) -> bool:
    """Return whether decoders are made of TransformerEngine's layers: on a GPU, where it is installed.

    Args:
        backend: `attention_backend` of the plugin.
    """
    return torch.cuda.is_available() and is_installed("transformer_engine") and backend != "local"
