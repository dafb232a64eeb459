"""Write a config file with the defaults of this host, without questions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from accel_cli.config_file import path_to_write, read_config, write
from accel_cli.launch.machine import this_machine
from accel_state.environ import read
from accel_state.errors import SettingsError
from accel_state.settings import (
    LaunchSettings,
    PrecisionSettings,
    ProcessSettings,
    Settings,
    combine,
    to_content,
)
from accel_state.settings.model import BY_PATH

if TYPE_CHECKING:
    from pathlib import Path

    from accel_cli.launch.machine import Machine

DEFAULT_CONFIG_FILE = "~/.cache/huggingface/accelerate/default_config.yaml"


def write_basic_config(
    mixed_precision: str = "no", save_location: str = DEFAULT_CONFIG_FILE
) -> Path | Literal[False]:
    """Write a config file for all devices of this host.

    Args:
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`.
        save_location: The file to write; variables of the environment win over the default.

    Returns:
        The file, or False if it exists already; it is then unchanged.

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
    write(path, to_content(basic_settings(this_machine(environ), str(precision))))
    return path


def basic_settings(machine: Machine, mixed_precision: str) -> Settings:
    """Return the default settings of a host."""
    return Settings(
        precision=PrecisionSettings(mixed_precision=mixed_precision),  # pyright: ignore[reportArgumentType] - was checked
        process=ProcessSettings(use_cpu=machine.gpus == 0),
        launch=LaunchSettings(
            num_processes=max(1, machine.gpus),
            distributed_type="MULTI_GPU" if machine.gpus > 1 else "NO",
        ),
    )


def update(config_file: str | None) -> tuple[Path, tuple[str, ...]]:
    """Rewrite a config file in the current format; return the file, and a note on each change."""
    found = read_config(config_file, read())
    if found.path is None:
        raise SettingsError(
            f"there is no config file at {path_to_write(None, read())}: run `accel config` to write one, or "
            "name another with --config_file."
        )
    write(found.path, to_content(combine(found.sourced).settings))
    return found.path, found.notes
