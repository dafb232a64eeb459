"""Build torch's FSDP precision policies from dictionaries, with dtypes by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from accel_state.did_you_mean import did_you_mean
from accel_state.errors import SettingsError

_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16", "float": "float32"}


def policy_of(policy: Any, version: int) -> Any:
    """Build an FSDP precision policy from a dictionary of its arguments.

    Args:
        policy: A policy, which is returned unchanged; or a dictionary, in which dtypes may be names.
        version: Version of FSDP.

    Raises:
        SettingsError: The installed torch has no such argument, or no such dtype.

    Example:
        >>> policy_of({"param_dtype": "bf16"}, 2).param_dtype
        torch.bfloat16
    """
    if not isinstance(policy, Mapping):
        return policy
    kind = MixedPrecisionPolicy if version == 2 else MixedPrecision
    known = [field.name for field in fields(kind)]
    arguments: dict[str, Any] = {}
    for name, value in policy.items():
        if name not in known:
            hint = did_you_mean(name, known, f"it has {known}.")
            raise SettingsError(
                f"FullyShardedDataParallelPlugin(mixed_precision_policy={dict(policy)!r}): {kind.__name__} "
                f"of torch {torch.__version__} has no {name!r}; {hint}"
            )
        arguments[name] = _dtype(name, value) if str(name).endswith("_dtype") else value
    return kind(**arguments)


def _dtype(name: str, value: Any) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    found = getattr(torch, _SHORT.get(str(value), str(value)).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise SettingsError(
            f"FullyShardedDataParallelPlugin(mixed_precision_policy={{{name!r}: {value!r}}}): torch has no "
            "such dtype; write 'float32', 'bfloat16' or 'float16'."
        )
    return found
