"""Find config files and convert their tables to settings and back. The command reads their text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_state.did_you_mean import did_you_mean
from accel_state.errors import SettingsError
from accel_state.settings.legacy import translate
from accel_state.settings.merge import DEFAULT, ErrorCollector, Layer, SourcedValue, parse
from accel_state.settings.model import BY_KEY, OPTIONS, Settings, value_at
from accel_state.settings.sections.launch import ENGINE_TYPES

if TYPE_CHECKING:
    from accel_state.settings.option import Option

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
"""More unknown keys than this are no misspellings."""

_TABLES = frozenset(key.partition(".")[0] for key in BY_KEY if "." in key)


def default_config_file(environ: Mapping[str, str]) -> Path | None:
    """Find the config file that is used when none is named.

    It lies in `accelerate/` below `$HF_HOME`, else below `$XDG_CACHE_HOME/huggingface`, else below
    `~/.cache/huggingface`, and is YAML or JSON.
    """
    folder = default_config_folder(environ)
    return next((folder / name for name in FILE_NAMES if (folder / name).is_file()), None)


def default_config_folder(environ: Mapping[str, str]) -> Path:
    """The folder of the default config file, which need not exist.

    Example:
        >>> default_config_folder({"HF_HOME": "/data/hf"}).as_posix()
        '/data/hf/accelerate'
    """
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache"
    home = environ.get("HF_HOME") or Path(cache) / "huggingface"
    return Path(home).expanduser() / "accelerate"


def parse_file(content: Mapping[str, Any], source: str) -> dict[str, SourcedValue]:
    """Read the settings of a config file.

    Args:
        content: The file's top-level table. Older formats are translated.
        source: The file's name, for messages.

    Returns:
        Path to value and origin. A key whose value is empty counts as not given.

    Raises:
        SettingsError: Keys are unknown, or their values cannot be used; the message names all.

    Example:
        >>> parse_file({"num_machines": 2}, "c.yaml")["launch.num_machines"].value
        2
    """
    found: dict[str, SourcedValue] = {}
    problems = ErrorCollector()
    entries = _flat(translate(content).content, source)
    unknown = [key for key, _ in entries if key not in BY_KEY]
    if len(unknown) > _MANY:
        raise SettingsError(
            f"{source} is no config file of accel: {len(unknown)} of its {len(entries)} keys are unknown, "
            f"such as {unknown[0][:60]!r}"
        )
    for key, value in entries:
        with problems:
            for sourced in _read(key, value, f"key {key} of {source}"):
                path = BY_KEY[key].path
                found[path] = concat(found.get(path), sourced)
    problems.raise_if_any()
    if any(path.startswith("parallelism.") for path in found):
        origin = f"key parallelism_config of {source}"
        found["parallelism"] = SourcedValue(value=True, layer=Layer.FILE, origin=origin)
    if "fsdp.xla" in found and found.get("launch.distributed_type", DEFAULT).value == "XLA":
        found["fsdp"] = found["fsdp.xla"]
    return found


def to_content(settings: Settings) -> dict[str, Any]:
    """Write settings as the table of a config file; `parse_file` reads it.

    Args:
        settings: What to write. An engine is written as `distributed_type`.

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
            value = -1
        if option.key is None or (
            value == value_at(defaults, option.path) and option.path not in ALWAYS_WRITTEN
        ):
            continue
        table, _, name = option.key.rpartition(".")
        (content.setdefault(table, {}) if table else content)[name] = _written(option, value)
    if settings.parallelism is not None:
        content.setdefault("parallelism_config", {"parallelism_config_dp_replicate_size": 1})
    return content


def concat(before: SourcedValue | None, after: SourcedValue) -> SourcedValue:
    """Concatenate two lists of one source; of other values, return the later one."""
    if before is None or not (isinstance(before.value, tuple) and isinstance(after.value, tuple)):
        return after
    return SourcedValue(value=before.value + after.value, layer=after.layer, origin=after.origin)


def _flat(content: Mapping[str, Any], source: str) -> list[tuple[str, Any]]:
    """Key and value of every entry; those of the tables that hold settings with a dotted key."""
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
    """The value of a key; several of a list, none of an empty one."""
    if key not in BY_KEY:
        raise SettingsError(f"{origin} is unknown{_nearest(key)}")
    option = BY_KEY[key]
    read = [parse(option, text, Layer.FILE, origin) for text in _texts(option, value, origin)]
    return [value for value in read if value is not None]


def _texts(option: Option, value: object, origin: str) -> list[str]:
    """The texts that an option's `parse` reads; several only for lists."""
    if isinstance(value, Mapping):
        if option.kind != "table":
            raise SettingsError(f"{origin} is {value!r}: expected a single value")
        return [json.dumps(value, default=str)]
    if isinstance(value, (list, tuple)):
        texts = [_text(one) for one in value]
        return texts if option.kind == "list" else [",".join(texts)]
    return [_text(value)]


def _text(value: object) -> str:
    """YAML reads a bare `no` as false, `1` as a number and nothing as null; settings are parsed from text."""
    if value is None:
        return ""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _written(option: Option, value: Any) -> Any:
    if option.kind == "list":
        return list(value)
    if isinstance(value, tuple):
        return ",".join(_text(one) for one in value)
    return value


def _nearest(key: str) -> str:
    table = key.partition(".")[0]
    known = [name for name in BY_KEY if name.startswith(f"{table}.")] if "." in key else []
    names = ", ".join(known or sorted({name.partition(".")[0] for name in BY_KEY}))
    return f"; {did_you_mean(key, BY_KEY, f'known are {names}')}"
