"""Precision policies of torch from dictionaries, whose dtypes may be names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from accel_state.errors import SettingsError

_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16", "float": "float32"}


def policy_of(given: Any, version: int) -> Any:
    """A policy of FSDP, from itself or a dictionary of its arguments.

    Args:
        given: A policy, returned as it is; or a dictionary, in which dtypes may be names.
        version: Of FSDP.

    Raises:
        SettingsError: The installed torch knows no such argument, or there is no such dtype.

    Example:
        >>> policy_of({"param_dtype": "bf16"}, 2).param_dtype
        torch.bfloat16
    """
    if not isinstance(given, Mapping):
        return given
    kind = MixedPrecisionPolicy if version == 2 else MixedPrecision
    known = [field.name for field in fields(kind)]
    arguments: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {known}."
            raise SettingsError(
                f"FullyShardedDataParallelPlugin(mixed_precision_policy={dict(given)!r}): {kind.__name__} of "
                f"torch {torch.__version__} has no {name!r}; {hint}"
            )
        arguments[name] = _dtype(name, value) if str(name).endswith("_dtype") else value
    return kind(**arguments)


def _dtype(name: str, value: Any) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    found = getattr(torch, _SHORT.get(str(value), str(value)).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise SettingsError(
            f"FullyShardedDataParallelPlugin(mixed_precision_policy={{{name!r}: {value!r}}}): no such dtype; "
            "write 'float32', 'bfloat16' or 'float16'."
        )
    return found
