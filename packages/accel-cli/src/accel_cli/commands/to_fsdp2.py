"""`accel to-fsdp2`: convert the keys of FSDP version 1 to version 2."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_cli.config_file import read_config, write
from accel_cli.output import show
from accel_state.environ import read
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

RESHARD: Mapping[str, bool] = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "_HYBRID_SHARD_ZERO2": False,
}
"""`fsdp_reshard_after_forward` of version 2 by `fsdp_sharding_strategy` of version 1."""

# In the order of `torch.distributed.fsdp.ShardingStrategy`, whose numbers legacy files have.
_BY_NUMBER = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")

REMOVED: Mapping[str, str] = {
    "fsdp_backward_prefetch": "FSDP2 always prefetches before the backward pass of a block",
    "fsdp_forward_prefetch": "FSDP2 prefetches in the order of execution by itself",
    "fsdp_sync_module_states": "FSDP2 broadcasts the weights if needed",
    "fsdp_use_orig_params": "FSDP2 always keeps the original parameters",
}
"""The keys that version 2 lacks, with the reason."""

UNCHANGED = (
    "fsdp_activation_checkpointing",
    "fsdp_activation_checkpointing_offload",
    "fsdp_auto_wrap_policy",
    "fsdp_cpu_ram_efficient_loading",
    "fsdp_ignored_modules",
    "fsdp_min_num_params",
    "fsdp_offload_params",
    "fsdp_state_dict_type",
    "fsdp_transformer_layer_cls_to_wrap",
)
"""The keys that mean the same in both versions."""

_SHARDING = "fsdp_sharding_strategy"
_RESHARD = "fsdp_reshard_after_forward"
_STATE = "fsdp_state_dict_type"


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A config for FSDP2."""

    config: Mapping[str, Any]
    notes: tuple[str, ...] = field(default=())


def to_fsdp2(config: Mapping[str, Any]) -> Converted:
    """Rewrite a config for FSDP as one for FSDP2.

    Raises:
        SettingsError: The config is not for FSDP, or has a value that FSDP2 does not support.

    Example:
        >>> old = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}
        >>> to_fsdp2(old).config["fsdp_config"]
        {'fsdp_version': 2, 'fsdp_reshard_after_forward': False}
    """
    table = config.get("fsdp_config")
    if not isinstance(table, dict):
        raise SettingsError(f"key fsdp_config is {table!r}; expected settings of FSDP to rewrite.")
    if str(table.get("fsdp_version", 1)) == "2":
        raise SettingsError("key fsdp_config.fsdp_version is 2 already; there is nothing to rewrite.")
    unknown = sorted(set(table) - {*UNCHANGED, *REMOVED, _SHARDING, _RESHARD, "fsdp_version"})
    if unknown:
        known = ", ".join(sorted({*UNCHANGED, *REMOVED, _SHARDING}))
        raise SettingsError(f"key fsdp_config.{unknown[0]} is unknown; FSDP has {known}.")
    notes = [f"fsdp_config.{key} was removed: {why}." for key, why in REMOVED.items() if key in table]
    fsdp: dict[str, Any] = {"fsdp_version": 2}
    fsdp |= {key: value for key, value in table.items() if key in UNCHANGED}
    if _SHARDING in table or _RESHARD in table:
        fsdp[_RESHARD] = _reshard(table, notes)
    if str(fsdp.get(_STATE, "")).upper() == "LOCAL_STATE_DICT":
        fsdp[_STATE] = "SHARDED_STATE_DICT"
        notes.append(f"fsdp_config.{_STATE} is SHARDED_STATE_DICT: FSDP2 has no LOCAL_STATE_DICT.")
    return Converted(config={**config, "fsdp_config": fsdp}, notes=tuple(notes))


def _reshard(table: Mapping[str, Any], notes: list[str]) -> bool:
    """Return whether to reshard after the forward pass, from the key of either version."""
    key = _RESHARD if _SHARDING not in table else _SHARDING
    value = table[key]
    if key == _RESHARD and str(value).lower() in {"true", "false"}:
        return str(value).lower() == "true"
    name = str(value).upper()
    if name.isdigit() and 1 <= int(name) <= len(_BY_NUMBER):
        name = _BY_NUMBER[int(name) - 1]
    if name == "NO_SHARD":
        raise SettingsError(
            f"key fsdp_config.{key} is {value!r}: FSDP2 always shards; use distributed_type: MULTI_GPU (DDP)."
        )
    if name not in RESHARD:
        raise SettingsError(f"key fsdp_config.{key} is {value!r}: expected one of {', '.join(RESHARD)}.")
    notes.append(f"fsdp_config.{key} {name} is {_RESHARD}: {str(RESHARD[name]).lower()}.")
    if "HYBRID" in name:
        notes.append(
            f"{name} replicates over nodes: set it in parallelism_config, with"
            " parallelism_config_dp_replicate_size and parallelism_config_dp_shard_size."
        )
    return RESHARD[name]


def run(options: Namespace) -> int:
    """Rewrite a config file."""
    file = read_config(options.config_file, read())
    if file.path is None:
        raise SettingsError("the default config file does not exist; name one with --config_file.")
    source = file.path
    if options.output_file is None and not options.overwrite:
        raise SettingsError(f"name an --output_file, or pass --overwrite to replace {str(source)!r}.")
    target = source if options.output_file is None else Path(options.output_file).expanduser()
    if target.exists() and not options.overwrite:
        raise SettingsError(
            f"argument --output_file: {str(target)!r} exists already; --overwrite replaces it."
        )
    converted = to_fsdp2(file.content)
    write(target, converted.config)
    if not options.quiet:
        show(*file.notes, *converted.notes, f"wrote {str(target)!r}")
    return 0
