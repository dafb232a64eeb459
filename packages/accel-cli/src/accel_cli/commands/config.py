"""`accel config` and `accel to-fsdp2`: write, update and convert config files; `write_basic_config`."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from accel_cli.config_file import path_to_write, read_config, write
from accel_cli.interview import HostInfo, ask, confirm, interview, probe_host
from accel_cli.launch.checks import find_launch_problems
from accel_cli.launch.hosts import HostDevices, probe_devices
from accel_cli.launch.plan import LaunchPlan
from accel_cli.output import Table, show
from accel_state.environ import read
from accel_state.errors import SettingsError
from accel_state.settings import (
    OPTIONS,
    LaunchSettings,
    PrecisionSettings,
    ProcessSettings,
    Settings,
    merge_layers,
    parse_file,
    to_content,
)
from accel_state.settings.model import BY_PATH, as_text


def run(options: Namespace) -> int:
    """Run `accel config`."""
    if options.mixed_precision is not None and options.action != "default":
        raise SettingsError("argument --mixed_precision is only valid with `accel config default`.")
    if options.action == "default":
        return _write_default(options)
    if options.action == "update":
        path, notes = update_config_file(options.config_file)
        show(*notes[:-1], f"{path} is already in the current format.")
        return 0
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise SettingsError(
            "`accel config` asks questions and needs a terminal. `accel config default` writes a file "
            "without questions. docs/reference/settings.md lists the keys of a file."
        )
    environ = read()
    path, host = path_to_write(options.config_file, environ), probe_host(environ)
    show("Press Esc to return to the previous question, or Ctrl-C to quit without writing.", "")
    try:
        settings = interview(ask, host)
        show("", summarize(settings))
        conflicts = find_conflicts(settings, host)
        show(*(f"Conflict: {conflict}" for conflict in conflicts))
        if options.config_file is None:
            show(SHARED_FILE.format(path))
        replaces = " (overwrites the existing file)" if path.exists() else ""
        if not confirm(f"Write these settings to {path}{replaces}?", default=not conflicts):
            show("Nothing was written.")
            return 1
    except KeyboardInterrupt:
        show("", "Nothing was written.")
        return 130
    write(path, to_content(settings))
    show(f"Saved to {path}. To run a script:", *list_commands(settings, options.config_file))
    return 0


SHARED_FILE = "{} is also the default config file of Accelerate, and `accelerate launch` reads it."
"""Shown before the default config file is written."""


def summarize(settings: Settings) -> Table:
    """Return a table of the settings to write."""
    sourced = merge_layers(parse_file(to_content(settings), "")).sourced
    rows = [
        (option.key or "", as_text(sourced[option.path].value))
        for option in OPTIONS
        if option.path in sourced and option.key
    ]
    return Table(head=("setting", "value"), rows=tuple(rows), title="Your answers")


def find_conflicts(settings: Settings, host: HostInfo) -> list[str]:
    """Return the problems for which `accel launch` would reject settings."""
    merged = merge_layers(parse_file(to_content(settings), "the answers"))
    machine = HostDevices(gpus=host.gpus, cores=host.cores)
    return find_launch_problems(LaunchPlan(merged=merged, machine=machine, environ={}))


def list_commands(settings: Settings, config_file: Path | str | None) -> list[str]:
    """Return the command lines that launch a script with settings: one line, or one per node."""
    named = ["--config_file", str(config_file)] if config_file is not None else []
    starts_all_nodes = (settings.deepspeed and settings.hosts.hostfile) or settings.mpi.hostfile
    has_several = settings.launch.num_machines > 1 and settings.launch.compute_environment == "LOCAL_MACHINE"
    if not has_several or starts_all_nodes or settings.launch.on_tpu:
        return [shlex.join(["accel", "launch", *named, "train.py"])]
    ranks = range(settings.launch.num_machines)
    return [
        shlex.join(["accel", "launch", *named, "--machine_rank", str(rank), "train.py"])
        for rank in (ranks if len(ranks) <= 4 else (0, 1))
    ] + (["… and so on"] if len(ranks) > 4 else [])


def _write_default(options: Namespace) -> int:
    written = write_basic_config(options.mixed_precision or "no", options.config_file or DEFAULT_CONFIG_FILE)
    if not written:
        path = path_to_write(options.config_file, read())
        show(
            f"The config file {path} already exists and is unchanged. Run `accel config` to replace it, "
            "or pass another file with --config_file."
        )
        return 0
    show(f"Written to {written}.")
    if options.config_file is None:
        show(SHARED_FILE.format(written))
    return 0


def update_config_file(config_file: str | None) -> tuple[Path, tuple[str, ...]]:
    """Rewrite a config file in the current format; return the file, and a note on each change."""
    file = read_config(config_file, read())
    if file.path is None:
        raise SettingsError(
            f"there is no config file at {path_to_write(None, read())}: run `accel config` to create "
            "one, or pass another with --config_file."
        )
    write(file.path, to_content(merge_layers(file.sourced).settings))
    return file.path, file.notes


DEFAULT_CONFIG_FILE = "~/.cache/huggingface/accelerate/default_config.yaml"


def write_basic_config(
    mixed_precision: str = "no", save_location: str = DEFAULT_CONFIG_FILE
) -> Path | Literal[False]:
    """Write a config file for all devices of this host.

    Args:
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`.
        save_location: The file to write. Environment variables override the default.

    Returns:
        The file, or False if it already exists and was left unchanged.

    Raises:
        SettingsError: The precision is unknown, or the file cannot be written.
    """
    try:
        precision = BY_PATH["precision.mixed_precision"].parse(mixed_precision)
    except ValueError as error:
        raise SettingsError(f"write_basic_config(mixed_precision={mixed_precision!r}): {error}") from None
    environ = read()
    path = path_to_write(None if str(save_location) == DEFAULT_CONFIG_FILE else str(save_location), environ)
    if path.exists():
        return False
    machine = probe_devices(environ)
    gpus = machine.gpus
    kind = machine.kind if gpus > 1 else "NO"
    settings = Settings(
        precision=PrecisionSettings(mixed_precision=str(precision)),  # pyright: ignore[reportArgumentType] - was checked
        process=ProcessSettings(use_cpu=gpus == 0),
        launch=LaunchSettings(num_processes=max(1, gpus), distributed_type=kind),
    )
    write(path, to_content(settings))
    return path


def run_to_fsdp2(options: Namespace) -> int:
    """Run `accel to-fsdp2`: rewrite a config file."""
    file = read_config(options.config_file, read())
    if file.path is None:
        raise SettingsError("the default config file does not exist: pass one with --config_file.")
    if options.output_file is None and not options.overwrite:
        raise SettingsError(f"pass --output_file, or --overwrite to replace {str(file.path)!r}.")
    target = file.path if options.output_file is None else Path(options.output_file).expanduser()
    if target.exists() and not options.overwrite:
        raise SettingsError(
            f"argument --output_file: {str(target)!r} already exists: pass --overwrite to replace it."
        )
    config, notes = to_fsdp2(file.content)
    write(target, config)
    if not options.quiet:
        show(*file.notes, *notes, f"wrote {str(target)!r}")
    return 0


def to_fsdp2(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert an FSDP config to FSDP2; return it with notes on the changes.

    Raises:
        SettingsError: The config is not for FSDP, or has a value that FSDP2 does not support.

    Example:
        >>> old = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}
        >>> to_fsdp2(old)[0]["fsdp_config"]
        {'fsdp_version': 2, 'fsdp_reshard_after_forward': False}
    """
    table = config.get("fsdp_config")
    if not isinstance(table, dict):
        raise SettingsError(f"key fsdp_config is {table!r}; expected FSDP settings to convert.")
    if str(table.get("fsdp_version", 1)) == "2":
        raise SettingsError("key fsdp_config.fsdp_version is already 2: there is nothing to convert.")
    notes = [f"fsdp_config.{key} was removed: {why}." for key, why in REMOVED.items() if key in table]
    changed = {*REMOVED, _SHARDING, _RESHARD, "fsdp_version"}
    unchanged = {key: value for key, value in table.items() if key not in changed}
    fsdp: dict[str, Any] = {"fsdp_version": 2, **unchanged}
    if _SHARDING in table or _RESHARD in table:
        fsdp[_RESHARD] = _convert_sharding(table, notes)
    if str(fsdp.get(_STATE, "")).upper() == "LOCAL_STATE_DICT":
        fsdp[_STATE] = "SHARDED_STATE_DICT"
        notes.append(f"fsdp_config.{_STATE} is SHARDED_STATE_DICT: FSDP2 has no LOCAL_STATE_DICT.")
    return {**config, "fsdp_config": fsdp}, notes


REMOVED: Mapping[str, str] = {
    "fsdp_backward_prefetch": "FSDP2 always prefetches before the backward pass of a block",
    "fsdp_forward_prefetch": "FSDP2 always prefetches in execution order",
    "fsdp_sync_module_states": "FSDP2 broadcasts weights when needed",
    "fsdp_use_orig_params": "FSDP2 always keeps the original parameters",
}
"""The keys that version 2 lacks, with the reason."""

_SHARDING = "fsdp_sharding_strategy"

_RESHARD = "fsdp_reshard_after_forward"

_STATE = "fsdp_state_dict_type"


def _convert_sharding(table: Mapping[str, Any], notes: list[str]) -> bool:
    """Return whether to reshard after the forward pass, from the key of FSDP1 or FSDP2."""
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


RESHARD: Mapping[str, bool] = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "_HYBRID_SHARD_ZERO2": False,
}
"""`fsdp_reshard_after_forward` of version 2 by `fsdp_sharding_strategy` of version 1."""

_BY_NUMBER = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""The order of `torch.distributed.fsdp.ShardingStrategy`, whose numbers are in legacy files."""
