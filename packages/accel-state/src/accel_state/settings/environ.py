"""Settings in environment variables: how a worker learns them, and how a launcher hands them over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.environ import str_to_bool
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.settings.merge import Given, Layer, combine, parse
from accel_state.settings.model import Settings
from accel_state.settings.options import BY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

# Variables that switch on what this release cannot run yet: an error is better than a run without it.
_LATER = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor, context and sequence parallelism",
}


def given_by_environ(environ: Mapping[str, str]) -> dict[str, Given]:
    """Read every documented variable that is set.

    Args:
        environ: The environment, or a copy of it.

    Returns:
        Path to value and origin. An empty variable counts as unset.

    Raises:
        SettingsError: A variable cannot be read; the message names it.
        UnsupportedError: A variable asks for something that this release does not run.
    """
    for name, what in _LATER.items():
        if environ.get(name) and _is_true(name, environ[name]):
            raise UnsupportedError(
                f"variable {name}={environ[name]!r} asks for {what}, which is not available yet."
            )
    found = {
        option.path: parse(option, environ[name], Layer.ENVIRONMENT, f"variable {name}")
        for name, option in BY_VARIABLE.items()
        if name in environ
    }
    return {path: given for path, given in found.items() if given is not None}


def from_environ(environ: Mapping[str, str]) -> Settings:
    """Read the settings of a process from its environment.

    Args:
        environ: The environment, as `accel_state.environ.read()` copies it.

    Raises:
        SettingsError: A variable cannot be read; the message names it.

    Example:
        >>> from_environ({"ACCELERATE_MIXED_PRECISION": "bf16"}).precision.mixed_precision
        'bf16'
    """
    return combine(given_by_environ(environ)).settings


def to_environ(settings: Settings) -> dict[str, str]:
    """Write what differs from the defaults as variables; `from_environ` reads the same settings back.

    The `launch` section stays behind: workers learn their place from their launcher.

    Example:
        >>> from accel_state.settings.model import PrecisionSettings
        >>> to_environ(Settings(precision=PrecisionSettings(mixed_precision="bf16")))
        {'ACCELERATE_MIXED_PRECISION': 'bf16'}
    """
    defaults = Settings()
    return {
        name: _text(value)
        for name, option in BY_VARIABLE.items()
        if (value := _at(settings, option.path)) != _at(defaults, option.path)
    }


def worker_environ(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker: that of its launcher, with the variables of settings written anew.

    Args:
        settings: What the worker shall read.
        environ: The environment of the launcher.

    Example:
        >>> worker_environ(Settings(), {"HOME": "/root", "ACCELERATE_USE_CPU": "1"})
        {'HOME': '/root'}
    """
    return {name: value for name, value in environ.items() if name not in BY_VARIABLE} | to_environ(settings)


def _is_true(name: str, text: str) -> bool:
    try:
        return bool(str_to_bool(text))
    except SettingsError as error:
        raise SettingsError(f"variable {name}: {error}") from None


def _at(settings: Settings, path: str) -> object:
    section, _, name = path.partition(".")
    return getattr(getattr(settings, section), name)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
