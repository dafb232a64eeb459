"""The table of model families that Megatron can train; installed distributions extend it by entry points."""

from __future__ import annotations

from typing import Any

from accel_plugins.megatron.bert import BERT
from accel_plugins.megatron.gpt2 import GPT2
from accel_plugins.megatron.llama import LLAMA
from accel_plugins.megatron.model_family import ModelFamily
from accel_plugins.megatron.t5 import T5
from accel_state.errors import SettingsError
from accel_state.registry import Registry

ENTRY_POINT_GROUP = "accel.megatron_models"
"""A distribution adds a row with `[project.entry-points."accel.megatron_models"] name = "module:FAMILY"`."""

FAMILIES = Registry(
    group=ENTRY_POINT_GROUP,
    kind=ModelFamily,
    noun="model family for Megatron",
    built_in={family.name: family for family in (BERT, GPT2, LLAMA, T5)},
)


def find_family(model: Any) -> ModelFamily:
    """Return the row of a model of transformers, of its configuration, or of a `model_type`.

    Example:
        >>> find_family("gpt2").architectures
        ('GPT2LMHeadModel',)
    """
    config = getattr(model, "config", model)
    kind = config if isinstance(config, str) else getattr(config, "model_type", None)
    known = FAMILIES.available()
    if kind not in known:
        raise SettingsError(
            f"{type(model).__name__} of type {kind!r} cannot be trained by Megatron: there are rows for "
            f"{', '.join(map(repr, known))}. Add one, a ModelFamily, by an entry point of the group "
            f"{ENTRY_POINT_GROUP!r}, or give MegatronLMPlugin a custom_model_provider_function."
        )
    family = known[kind]
    if config is not model and type(model).__name__ not in family.architectures:
        raise SettingsError(
            f"{type(model).__name__} cannot be trained by Megatron: of the type {kind!r} it trains "
            f"{', '.join(family.architectures)}."
        )
    return family
