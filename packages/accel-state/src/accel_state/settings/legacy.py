"""Translate config files of legacy formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOVED = {
    "dynamo_backend": ("dynamo_config", "dynamo_backend"),
    "deepspeed_hostfile": ("deepspeed_config", "deepspeed_hostfile"),
    "tpu_cluster": (None, "tpu_use_cluster"),
    "use_mps_device": (None, None),
    "use_xpu": (None, None),
    "ipex_config": (None, None),
    "use_ipex": (None, None),
}
"""Old key to the table and the key that have it now; no key where it has no meaning any more."""

_WHY = {
    "use_mps_device": "Apple GPUs are found without it",
    "use_xpu": "Intel GPUs are found without it",
    "ipex_config": "PyTorch has what the extension for Intel devices had",
    "use_ipex": "PyTorch has what the extension for Intel devices had",
    "mpirun_config.mpirun_ccl": "oneCCL is not configured by the command",
}
_TENSOR_PARALLEL = {"tp_size": "parallelism_config_tp_size"}
_FSDP = ("min_num_params", "offload_params", "sharding_strategy")
"""Keys of `fsdp_config` that had no prefix once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A config file in the present format.

    Args:
        notes: What was translated, a clause for each.
    """

    content: dict[str, Any]
    notes: tuple[str, ...] = ()


def translate(content: Mapping[str, Any]) -> Translation:
    """Translate the table of a config file to the present format; entries in that format stay.

    Example:
        >>> translate({"fp16": True}).notes
        ("'fp16: True' is 'mixed_precision: fp16' now",)
    """
    result = {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in content.items()
        if key not in {*_MOVED, "fp16", "tp_config"}
    }
    notes: list[str] = []
    if "fp16" in content:
        precision = "fp16" if str(content["fp16"]).lower() in {"true", "yes", "1"} else "no"
        result.setdefault("mixed_precision", precision)
        notes.append(f"'fp16: {content['fp16']}' is 'mixed_precision: {precision}' now")
    for key, (table, name) in _MOVED.items():
        if key in content:
            notes.append(_move(result, key, content[key], table, name))
    notes += _inside(content, result)
    return Translation(content=result, notes=tuple(notes))


def _move(result: dict[str, Any], key: str, value: Any, table: str | None, name: str | None) -> str:
    if name is None:
        return f"'{key}' is not needed any more: {_WHY[key]}"
    target = result if table is None else result.setdefault(table, {})
    if isinstance(target, dict):
        target.setdefault(name, value)
    return f"'{key}' is '{f'{table}.' if table else ''}{name}' now"


def _inside(content: Mapping[str, Any], result: dict[str, Any]) -> list[str]:
    """Translate what is in tables."""
    notes: list[str] = []
    old = content.get("tp_config")
    if isinstance(old, dict) and old:
        sizes = result.setdefault("parallelism_config", {})
        for key, value in old.items():
            name = _TENSOR_PARALLEL.get(key, key)
            sizes.setdefault(name, value)
            notes.append(f"'tp_config.{key}' is 'parallelism_config.{name}' now")
    if isinstance(fsdp := result.get("fsdp_config"), dict):
        if fsdp.get("min_num_params"):
            fsdp.setdefault("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP")
        for key in _FSDP:
            if key in fsdp:
                fsdp.setdefault(f"fsdp_{key}", fsdp.pop(key))
                notes.append(f"'fsdp_config.{key}' is 'fsdp_config.fsdp_{key}' now")
    if isinstance(result.get("mpirun_config"), dict) and "mpirun_ccl" in result["mpirun_config"]:
        del result["mpirun_config"]["mpirun_ccl"]
        notes.append(f"'mpirun_config.mpirun_ccl' is not needed any more: {_WHY['mpirun_config.mpirun_ccl']}")
    if str(content.get("distributed_type")).upper() == "TPU":
        result["distributed_type"] = "XLA"
        notes.append("'distributed_type: TPU' is 'distributed_type: XLA' now")
    if str(content.get("distributed_type")).upper() == "TP":
        result["distributed_type"] = "MULTI_GPU"
        notes.append("'distributed_type: TP' is 'distributed_type: MULTI_GPU' with 'parallelism_config' now")
    return notes
