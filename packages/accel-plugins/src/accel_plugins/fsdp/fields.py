"""Parse fields of the FSDP plugin into members of torch's enumerations."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

from accel_state.did_you_mean import did_you_mean
from accel_state.errors import SettingsError

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

    Args:
        kind: The enumeration.
        value: The member, its name or its number.
        field: The plugin's field, for the message.

    Raises:
        SettingsError: The enumeration has no such member.

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
