"""Import megatron-core when needed, and ignore warnings about its own defaults."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from accel_state.errors import UnsupportedError
from accel_state.libraries import is_installed, require

EXTRA = "accel-plugins[megatron]"
ENGINE_EXTRA = "accel-plugins[transformer-engine]"


def load_library(what: str) -> None:
    """Import megatron-core."""
    require("megatron_lm", what, install=EXTRA)
    core("parallel_state")


def core(name: str) -> Any:
    """Import a submodule of megatron-core, named without the prefix `megatron.core.`."""
    with warnings.catch_warnings():
        # Its users cannot change the deprecated calls that it makes while it is imported.
        for kind in (UserWarning, DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", kind)
        return importlib.import_module(f"megatron.core.{name}")


def check_device() -> None:
    """Refuse a host without a GPU: megatron-core gets the device and its random state from CUDA."""
    if torch.cuda.is_available():
        return
    try:
        torch.cuda.current_device()
    except (RuntimeError, AssertionError) as error:  # the latter without CUDA in torch
        raise UnsupportedError(
            "Megatron trains on GPUs, but this machine has none: use a machine with GPUs, or shard the "
            "model with FSDP and parallelism_config_tp_size, which also run on the CPU."
        ) from error


def uses_transformer_engine(backend: Any) -> bool:
    """Return whether decoders use TransformerEngine's layers: on a GPU, if it is installed."""
    return torch.cuda.is_available() and is_installed("transformer_engine") and backend != "local"


@contextmanager
def without_core_warnings() -> Generator[None]:
    """Ignore warnings of megatron-core's modules within the block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="megatron")
        yield
