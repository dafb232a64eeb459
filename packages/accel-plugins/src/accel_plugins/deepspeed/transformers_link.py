"""Register the DeepSpeed configuration with transformers, which shards models while it builds them."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from accel_plugins.deepspeed.hf_config import AUTO, HfDeepSpeedConfig
from accel_state.available import is_installed

if TYPE_CHECKING:
    from collections.abc import Mapping


def link(config: Mapping[str, Any], *, asked: bool) -> HfDeepSpeedConfig | None:
    """Register a configuration with transformers, if the program has imported it.

    Args:
        config: The configuration of the run.
        asked: Whether transformers shards parameters while it builds a model.

    Returns:
        The registered object, which is registered as long as the caller keeps it; `None` if models are built
        full.
    """
    if "transformers" not in sys.modules or not is_installed("deepspeed"):
        return None
    theirs = importlib.import_module("transformers.integrations.deepspeed")
    if not asked:
        theirs.unset_hf_deepspeed_config()
        return None
    ours = HfDeepSpeedConfig(config_for_models(config))
    theirs.set_hf_deepspeed_config(ours)
    return ours


def config_for_models(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration for building models, with its `"auto"` values removed.

    Example:
        >>> config_for_models({"train_batch_size": "auto", "zero_optimization": {"stage": 3}})
        {'zero_optimization': {'stage': 3}, 'train_micro_batch_size_per_gpu': 1}
    """

    def decided(node: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: decided(value) if isinstance(value, dict) else value
            for name, value in node.items()
            if not (isinstance(value, str) and value == AUTO)
        }

    known = decided(config)
    for name in ("train_batch_size", "gradient_accumulation_steps"):
        known.pop(name, None)
    return known | {"train_micro_batch_size_per_gpu": 1}
