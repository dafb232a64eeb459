"""Read and write settings as environment variables, which launchers pass to workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.settings.merge import ErrorCollector, Layer, SourcedValue, combine, parse
from accel_state.settings.model import BY_PATH, BY_VARIABLE, Settings, value_at

if TYPE_CHECKING:
    from collections.abc import Mapping


SPLIT_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "fp8.override_linear_precision": (
        "ACCELERATE_FP8_OVERRIDE_FPROP",
        "ACCELERATE_FP8_OVERRIDE_DGRAD",
        "ACCELERATE_FP8_OVERRIDE_WGRAD",
    )
}
"""Settings that other launchers pass in several variables; a variable that is not set is false."""


def parse_environ(environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    """Read every documented variable that is set, by path; an empty variable counts as unset.

    Raises:
        SettingsError: Variables cannot be read; the message names all.
    """
    found: dict[str, SourcedValue | None] = {}
    problems = ErrorCollector()
    for name, option in BY_VARIABLE.items():
        if name in environ:
            with problems:
                found[option.path] = parse(option, environ[name], Layer.ENVIRONMENT, f"variable {name}")
    for path, names in SPLIT_VARIABLES.items():
        if found.get(path) is None and any(environ.get(name) for name in names):
            text = ",".join(environ.get(name) or "false" for name in names)
            with problems:
                found[path] = parse(BY_PATH[path], text, Layer.ENVIRONMENT, f"variables {', '.join(names)}")
    problems.raise_if_any()
    return {path: value for path, value in found.items() if value is not None}


def from_environ(environ: Mapping[str, str]) -> Settings:
    """Read the settings of a process from its environment.

    Raises:
        SettingsError: A variable cannot be read, or two ask for different engines; the message names them.

    Example:
        >>> from_environ({"ACCELERATE_MIXED_PRECISION": "bf16"}).precision.mixed_precision
        'bf16'
        >>> from_environ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}).fsdp.fsdp_version
        2
    """
    return combine(parse_environ(environ)).settings


def to_environ(settings: Settings) -> dict[str, str]:
    """Write what differs from the defaults as variables; `from_environ` reads the same settings back.

    Settings that only the command reads are left out: workers learn their topology from their launcher.

    Example:
        >>> from accel_state.settings.model import PrecisionSettings
        >>> to_environ(Settings(precision=PrecisionSettings(mixed_precision="bf16")))
        {'ACCELERATE_MIXED_PRECISION': 'bf16'}
    """
    defaults = Settings()
    return {
        name: as_text(value)
        for name, option in BY_VARIABLE.items()
        if (value := value_at(settings, option.path)) != value_at(defaults, option.path)
    }


def worker_environ(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Make the environment of a worker: that of its launcher, with the variables of settings replaced.

    Example:
        >>> worker_environ(Settings(), {"HOME": "/root", "ACCELERATE_USE_CPU": "1"})
        {'HOME': '/root'}
    """
    ours = {*BY_VARIABLE, *(name for names in SPLIT_VARIABLES.values() for name in names)}
    return {name: value for name, value in environ.items() if name not in ours} | to_environ(settings)


def as_text(value: object) -> str:
    """Format a value as text that the `parse` of its row reads.

    Example:
        >>> as_text(True), as_text((False, True)), as_text(("A", "B"))
        ('true', 'false,true', 'A,B')
    """
    if isinstance(value, tuple):
        return ",".join(map(as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
