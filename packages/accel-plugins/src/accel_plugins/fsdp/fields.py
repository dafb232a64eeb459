"""Parse fields of the FSDP plugin into torch's enumerations and policies, and the form of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
)

from accel_plugins.dcp.protocol import StateForm
from accel_state.did_you_mean import did_you_mean
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin

EnumT = TypeVar("EnumT", bound=Enum)

RESHARDS = {
    ShardingStrategy.FULL_SHARD: True,
    ShardingStrategy.SHARD_GRAD_OP: False,
    ShardingStrategy.HYBRID_SHARD: True,
    ShardingStrategy._HYBRID_SHARD_ZERO2: False,  # pyright: ignore[reportPrivateUsage] - has no other name
    ShardingStrategy.NO_SHARD: False,
}
"""Whether parameters are freed after the forward pass under each strategy of version 1."""


def member_of(kind: type[EnumT], value: Any, field: str) -> EnumT:
    """Return a member of one of torch's enumerations, from the member, its name or its number.

    Example:
        >>> member_of(ShardingStrategy, "full_shard", "sharding_strategy").name
        'FULL_SHARD'
    """
    if isinstance(value, kind):
        return value
    names = {member.name: member for member in kind} | {str(member.value): member for member in kind}
    name = str(value).upper()
    found = names.get(name) or names.get(f"_{name}")
    if found is None:
        hint = did_you_mean(name, names, f"there are {[member.name for member in kind]}.")
        raise SettingsError(
            f"FullyShardedDataParallelPlugin({field}={value!r}): no such {kind.__name__}; {hint}"
        )
    return found


def reshard_of(value: ShardingStrategy | str) -> bool:
    """Return whether parameters are freed after the forward pass, from a strategy of version 1 or a string.

    Example:
        >>> reshard_of("SHARD_GRAD_OP"), reshard_of("true")
        (False, True)
    """
    text = str(value).lower()
    if text in {"true", "false"}:
        return text == "true"
    return RESHARDS[member_of(ShardingStrategy, value, "reshard_after_forward")]


def prefetch_of(value: BackwardPrefetch | str | None) -> BackwardPrefetch | None:
    """Return when FSDP1 prefetches the next parameters in the backward pass; `None` for no prefetching.

    Example:
        >>> prefetch_of("no_prefetch") is None
        True
    """
    if value is None or str(value).upper() == "NO_PREFETCH":
        return None
    return member_of(BackwardPrefetch, value, "backward_prefetch")


_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16", "float": "float32"}


def policy_of(policy: Any, version: int) -> Any:
    """Build an FSDP precision policy from a dictionary of its arguments, in which dtypes may be names.

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


_FORMS = {
    StateDictType.FULL_STATE_DICT: StateForm.FULL,
    StateDictType.SHARDED_STATE_DICT: StateForm.SHARDED,
    StateDictType.LOCAL_STATE_DICT: StateForm.NATIVE,
}


def form_of(plugin: FullyShardedDataParallelPlugin) -> StateForm:
    """Return the form of the plugin's current `state_dict_type`, which may be changed later."""
    return _FORMS[cast("StateDictType", plugin.state_dict_type)]
