"""Settings in a config file: its keys, and where it is looked for. Reading its text is the command's part."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from accel_state.errors import SettingsError, UnsupportedError
from accel_state.settings.merge import Given, Layer, parse
from accel_state.settings.options import BY_KEY

FILE_NAMES = ("default_config.yaml", "default_config.json")
"""What the default config file may be called, in the order in which it is looked for."""

_TABLES = frozenset(key.partition(".")[0] for key in BY_KEY if "." in key)

# Documented keys of what is not available yet. They may be there as long as they ask for nothing.
_LATER: Mapping[str, tuple[str, tuple[str, ...]]] = {
    key: (what, nothing)
    for what, keys in {
        "FSDP": {"fsdp_config": ()},
        "DeepSpeed": {"deepspeed_config": ()},
        "Megatron-LM": {"megatron_lm_config": ()},
        "tensor, context and sequence parallelism": {"parallelism_config": ()},
        "FP8 recipes": {"fp8_config": ()},
        "starting with mpirun": {"mpirun_config": ()},
        "TPU training": {
            "main_training_function": ("main",),
            "downcast_bf16": ("no", "false"),
            "tpu_name": (),
            "tpu_zone": (),
            "tpu_use_cluster": (),
            "tpu_use_sudo": (),
            "tpu_vm": (),
            "tpu_env": (),
            "command_file": (),
            "commands": (),
        },
        "Amazon SageMaker": {
            "compute_environment": ("LOCAL_MACHINE",),
            "ec2_instance_type": (),
            "iam_role_name": (),
            "image_uri": (),
            "profile": (),
            "region": (),
            "base_job_name": (),
            "pytorch_version": (),
            "transformers_version": (),
            "py_version": (),
            "sagemaker_inputs_file": (),
            "sagemaker_metrics_file": (),
            "additional_args": (),
        },
    }.items()
    for key, nothing in keys.items()
}
_LATER_TYPES = {
    "FSDP": "FSDP",
    "DEEPSPEED": "DeepSpeed",
    "MEGATRON_LM": "Megatron-LM",
    "XLA": "TPU training",
    "TPU": "TPU training",
}


def default_config_file(environ: Mapping[str, str]) -> Path | None:
    """Find the config file that is used when none is named.

    It lies in `accelerate/` below `$HF_HOME`, else below `$XDG_CACHE_HOME/huggingface`, else below
    `~/.cache/huggingface`, and is YAML or JSON.

    Args:
        environ: The environment, or a copy of it.

    Returns:
        The file, or None if there is none.
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


def given_by_file(content: Mapping[str, Any], source: str) -> dict[str, Given]:
    """Read the settings of a config file.

    Args:
        content: The file's top-level table.
        source: The file's name, for messages.

    Returns:
        Path to value and origin. A key whose value is empty counts as not given.

    Raises:
        SettingsError: A key is unknown, or its value cannot be used; the message names both.
        UnsupportedError: A key asks for something that this release does not run.

    Example:
        >>> given_by_file({"num_machines": 2}, "c.yaml")["launch.num_machines"].value
        2
    """
    found: dict[str, Given] = {}
    for key, value in _flat(content, source):
        origin = f"key {key} of {source}"
        if key in _LATER:
            _refuse(key, value, origin)
            continue
        if key not in BY_KEY:
            raise SettingsError(f"{origin} is unknown{_nearest(key)}")
        text = _text(value)
        if key == "distributed_type" and text.upper() in _LATER_TYPES:
            what = _LATER_TYPES[text.upper()]
            raise UnsupportedError(f"{origin} is {text!r}: {what} is not available yet.")
        given = parse(BY_KEY[key], text, Layer.FILE, origin)
        if given is not None:
            found[BY_KEY[key].path] = given
    return found


def _flat(content: Mapping[str, Any], source: str) -> list[tuple[str, Any]]:
    """Key and value of every entry; those of the tables that hold settings with a dotted key."""
    entries: list[tuple[str, Any]] = []
    for key, value in content.items():
        if key not in _TABLES or value is None:
            entries.append((key, value))
        elif isinstance(value, Mapping):
            entries += [(f"{key}.{inner}", inner_value) for inner, inner_value in value.items()]
        else:
            raise SettingsError(f"key {key} of {source} is {value!r}: expected a table of settings")
    return [(key, value) for key, value in entries if key not in _TABLES]


def _text(value: object) -> str:
    """YAML reads a bare `no` as false, `1` as a number and nothing as null; settings are parsed from text."""
    if value is None:
        return ""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _refuse(key: str, value: object, origin: str) -> None:
    what, nothing = _LATER[key]
    if not value or value in nothing:
        return
    raise UnsupportedError(
        f"{origin} is {value!r}: {what} is not available yet. Remove the key to go on without it."
    )


def _nearest(key: str) -> str:
    near = get_close_matches(key, [*BY_KEY, *_LATER], n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(BY_KEY))}"
