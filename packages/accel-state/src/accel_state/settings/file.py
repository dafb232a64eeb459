"""Read config files, including legacy formats, into settings; find the default file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_state.errors import SettingsError, did_you_mean
from accel_state.frozen import frozen
from accel_state.settings.model import (
    BY_KEY,
    DEFAULT,
    OPTIONS,
    ErrorCollector,
    Layer,
    Settings,
    SourcedValue,
    parse,
    value_at,
)
from accel_state.settings.option import Option
from accel_state.settings.run import ENGINE_TYPES

_MOVED = {
    "dynamo_backend": ("dynamo_config", "dynamo_backend"),
    "deepspeed_hostfile": ("deepspeed_config", "deepspeed_hostfile"),
    "tpu_cluster": (None, "tpu_use_cluster"),
}
"""Old key to its current table and key."""

_NEEDLESS = {
    "use_mps_device": "Apple GPUs are found without it",
    "use_xpu": "Intel GPUs are found without it",
    "ipex_config": "PyTorch includes the features of the extension for Intel devices",
    "use_ipex": "PyTorch includes the features of the extension for Intel devices",
}
"""Old key to the reason why it is no longer used."""

_OLD_TYPES = {"TPU": ("XLA", ""), "TP": ("MULTI_GPU", " with 'parallelism_config'")}
_TENSOR_PARALLEL = {"tp_size": "parallelism_config_tp_size"}
_FSDP = ("min_num_params", "offload_params", "sharding_strategy")
"""Keys of `fsdp_config` that once had no prefix."""


@frozen
class Translation:
    """A config file translated to the current format.

    Args:
        notes: A clause for each translated entry.
    """

    content: dict[str, Any]
    notes: tuple[str, ...] = ()


def translate(content: Mapping[str, Any]) -> Translation:
    """Translate the table of a config file to the current format; entries in that format stay.

    Example:
        >>> translate({"fp16": True}).notes
        ("'fp16: True' is 'mixed_precision: fp16' now",)
    """
    result = {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in content.items()
        if key not in {*_MOVED, *_NEEDLESS, "fp16", "tp_config"}
    }
    notes: list[str] = []
    if "fp16" in content:
        precision = "fp16" if str(content["fp16"]).lower() in {"true", "yes", "1"} else "no"
        _fill(result, "mixed_precision", precision)
        notes.append(f"'fp16: {content['fp16']}' is 'mixed_precision: {precision}' now")
    for key, (table, name) in _MOVED.items():
        if key in content:
            _fill(result if table is None else _table(result, table), name, content[key])
            notes.append(f"'{key}' is '{f'{table}.' if table else ''}{name}' now")
    notes += [f"'{key}' is no longer needed: {why}" for key, why in _NEEDLESS.items() if key in content]
    notes += _inside(content, result)
    return Translation(content=result, notes=tuple(notes))


def _table(result: dict[str, Any], key: str) -> dict[Any, Any]:
    """Return the table of a key to add to; a value that is not a table stays, and is refused later."""
    _fill(result, key, {})
    return result[key] if isinstance(result[key], dict) else {}


def _fill(table: dict[Any, Any], key: Any, value: object) -> None:
    """Set a key that is absent or empty."""
    if table.get(key) is None:
        table[key] = value


def _inside(content: Mapping[str, Any], result: dict[str, Any]) -> list[str]:
    notes: list[str] = []
    old = content.get("tp_config")
    if isinstance(old, dict) and old:
        sizes = _table(result, "parallelism_config")
        for key, value in old.items():
            name = _TENSOR_PARALLEL.get(key, key)
            _fill(sizes, name, value)
            notes.append(f"'tp_config.{key}' is 'parallelism_config.{name}' now")
    if isinstance(fsdp := result.get("fsdp_config"), dict):
        if fsdp.get("min_num_params"):
            _fill(fsdp, "fsdp_auto_wrap_policy", "SIZE_BASED_WRAP")
        for key in _FSDP:
            if key in fsdp:
                _fill(fsdp, f"fsdp_{key}", fsdp.pop(key))
                notes.append(f"'fsdp_config.{key}' is 'fsdp_config.fsdp_{key}' now")
    if isinstance(result.get("mpirun_config"), dict) and "mpirun_ccl" in result["mpirun_config"]:
        del result["mpirun_config"]["mpirun_ccl"]
        notes.append(
            "'mpirun_config.mpirun_ccl' is no longer needed: oneCCL is not configured by the command"
        )
    old_type = str(content.get("distributed_type")).upper()
    if old_type in _OLD_TYPES:
        result["distributed_type"], more = _OLD_TYPES[old_type]
        notes.append(
            f"'distributed_type: {old_type}' is 'distributed_type: {result['distributed_type']}'{more} now"
        )
    return notes


FILE_NAMES = ("default_config.yaml", "default_config.json")
"""The names of the default config file, in the order of the search."""

DEFAULT_PATH_HELP = f"accelerate/{FILE_NAMES[0]} below $HF_HOME or ~/.cache/huggingface"
"""The path of the default config file, for help."""

ALWAYS_WRITTEN = (
    "launch.compute_environment",
    "launch.num_machines",
    "launch.num_processes",
    "process.use_cpu",
    "process.debug",
    "precision.mixed_precision",
)
"""The settings that a file always has, defaults included: other readers of such files expect them."""

_MANY = 20
"""More unknown keys than this are not misspellings."""

_TABLES = frozenset(key.partition(".")[0] for key in BY_KEY if "." in key)


def default_config_file(environ: Mapping[str, str]) -> Path | None:
    """Find the default config file, used when none is passed.

    It lies in `accelerate/` below `$HF_HOME`, else below `$XDG_CACHE_HOME/huggingface`, else below
    `~/.cache/huggingface`, and is YAML or JSON.
    """
    folder = default_config_folder(environ)
    return next((folder / name for name in FILE_NAMES if (folder / name).is_file()), None)


def default_config_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of the default config file, which need not exist.

    Example:
        >>> default_config_folder({"HF_HOME": "/data/hf"}).as_posix()
        '/data/hf/accelerate'
    """
    # Path.home() raises where the user has no home, as any user of some containers.
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or os.path.expanduser("~")) / ".cache"  # noqa: PTH111
    home = environ.get("HF_HOME") or Path(cache) / "huggingface"
    return Path(os.path.expanduser(home)) / "accelerate"  # noqa: PTH111


def parse_file(content: Mapping[str, Any], source: str) -> dict[str, SourcedValue]:
    """Read the settings of a config file.

    Args:
        content: The file's top-level table. Legacy formats are translated.
        source: The file's name, for messages.

    Returns:
        Path to value and origin. A key with an empty value counts as unset.

    Raises:
        SettingsError: Keys are unknown, or their values are invalid. The message lists all.

    Example:
        >>> parse_file({"num_machines": 2}, "c.yaml")["launch.num_machines"].value
        2
    """
    values: dict[str, SourcedValue] = {}
    problems = ErrorCollector()
    entries = _flat(translate(content).content, source)
    unknown = [key for key, _ in entries if key not in BY_KEY]
    if len(unknown) > _MANY:
        raise SettingsError(
            f"{source} is not an accel config file: {len(unknown)} of its {len(entries)} keys are unknown, "
            f"such as {unknown[0][:60]!r}"
        )
    for key, value in entries:
        with problems:
            for sourced in _read(key, value, f"key {key} of {source}"):
                path = BY_KEY[key].path
                values[path] = concat(values.get(path), sourced)
    problems.raise_if_any()
    if any(path.startswith("parallelism.") for path in values):
        origin = f"key parallelism_config of {source}"
        values["parallelism"] = SourcedValue(value=True, layer=Layer.FILE, origin=origin)
    if "fsdp.xla" in values and values.get("launch.distributed_type", DEFAULT).value == "XLA":
        values["fsdp"] = values["fsdp.xla"]
    return values


def to_content(settings: Settings) -> dict[str, Any]:
    """Write settings as the table of a config file; `parse_file` reads it.

    Args:
        settings: The settings. An engine is written as `distributed_type`.

    Example:
        >>> from accel_state.settings.model import TrainingSettings
        >>> content = to_content(Settings(training=TrainingSettings(gradient_accumulation_steps=4)))
        >>> content["gradient_accumulation_steps"], content["mixed_precision"]
        (4, 'no')
    """
    defaults, content = Settings(), dict[str, Any]()
    engines = [kind for kind, section in ENGINE_TYPES.items() if value_at(settings, section)]
    for option in OPTIONS:
        value = value_at(settings, option.path)
        if option.path == "launch.distributed_type" and engines and not settings.is_sharded_on_xla:
            value = engines[0]
        if option.path == "launch.num_processes" and value is None:
            if settings.launch.compute_environment == "AMAZON_SAGEMAKER":
                continue  # Other readers of such a file refuse the key.
            value = -1
        if option.key is None or (
            value == value_at(defaults, option.path) and option.path not in ALWAYS_WRITTEN
        ):
            continue
        key = option.key
        if option.path == "training.gradient_accumulation_steps" and settings.deepspeed is not None:
            key = option.key_aliases[0]  # Other readers know it there only.
        if isinstance(value, tuple):
            value = list(value) if option.kind == "list" else ",".join(map(_text, value))
        table, _, name = key.rpartition(".")
        (content.setdefault(table, {}) if table else content)[name] = value
    if settings.parallelism is not None:
        content.setdefault("parallelism_config", {"parallelism_config_dp_replicate_size": 1})
    return content


def concat(before: SourcedValue | None, after: SourcedValue) -> SourcedValue:
    """Concatenate two lists of one source; for other values, return the later one."""
    if before is None or not (isinstance(before.value, tuple) and isinstance(after.value, tuple)):
        return after
    return SourcedValue(value=before.value + after.value, layer=after.layer, origin=after.origin)


def _flat(content: Mapping[str, Any], source: str) -> list[tuple[str, Any]]:
    """Return key and value of every entry, with dotted keys for entries of nested tables of settings."""
    entries: list[tuple[str, Any]] = []
    for key, value in content.items():
        if key not in _TABLES or value is None:
            entries.append((str(key), value))
        elif isinstance(value, Mapping):
            entries += [(f"{key}.{inner}", inner_value) for inner, inner_value in value.items()]
        else:
            raise SettingsError(f"key {key} of {source} is {value!r}: expected a table of settings")
    return [(key, value) for key, value in entries if key not in _TABLES]


def _read(key: str, value: object, origin: str) -> list[SourcedValue]:
    """Return the values of a key: several for a list, none for an empty value."""
    if key not in BY_KEY:
        raise SettingsError(f"{origin} is unknown{_nearest(key)}")
    option = BY_KEY[key]
    read = [parse(option, text, Layer.FILE, origin) for text in _texts(option, value, origin)]
    return [value for value in read if value is not None]


def _texts(option: Option, value: object, origin: str) -> list[str]:
    """Return the texts for an option's `parse`; several only for lists."""
    if isinstance(value, Mapping):
        if option.kind != "table":
            raise SettingsError(f"{origin} is {value!r}: expected a single value")
        return [json.dumps(value, default=str)]
    if isinstance(value, (list, tuple)):
        texts = [_text(item) for item in value]
        return texts if option.kind == "list" else [",".join(texts)]
    return [_text(value)]


def _text(value: object) -> str:
    """Return a YAML value as text: YAML parses a bare `no` as false, `1` as a number, empty as null."""
    if value is None:
        return ""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _nearest(key: str) -> str:
    table = key.partition(".")[0]
    known = [name for name in BY_KEY if name.startswith(f"{table}.")] if "." in key else []
    names = ", ".join(known or sorted({name.partition(".")[0] for name in BY_KEY}))
    return f"; {did_you_mean(key, BY_KEY, f'known are {names}')}"
