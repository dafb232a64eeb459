"""`accel env`: report libraries, devices, settings and variables of this machine, without secrets."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import yaml

from accel_cli.config_file import read_config
from accel_cli.launch.hosts import query_nvidia
from accel_cli.output import redact, working
from accel_state.environ import read
from accel_state.errors import SettingsError
from accel_state.settings import default_config_file, merge_layers, parse_environ
from accel_state.topology import detect

_OURS = (
    "accel-bigmodel", "accel-cli", "accel-compat", "accel-convert", "accel-inspect", "accel-ops",
    "accel-plugins", "accel-quant", "accel-state", "accel-suite", "accel-trackers", "accel-train",
)  # fmt: skip
_LIBRARIES = (
    "bitsandbytes", "datasets", "deepspeed", "diffusers", "huggingface-hub", "megatron-core", "numpy", "peft",
    "safetensors", "sagemaker", "timm", "tokenizers", "torch", "torch-xla", "torchao", "torchdata",
    "torchvision", "transformer-engine", "transformers", "triton",
)  # fmt: skip

_EXPERIMENTAL = {"megatron-core": "training with Megatron has not yet been run on several GPUs"}
"""Features not yet tested on their target hardware, by the library that they need."""

_PROGRAMS = ("gcloud", "g++", "mpirun", "ninja", "nvcc", "nvidia-smi", "pdsh", "sbatch", "srun")
"""The programs of launchers and cluster managers, and those that build the kernels of engines."""

_PREFIXES = (
    "ACCELERATE_", "CUDA_", "DS_", "FSDP_", "GLOO_", "HF_", "HIP_", "LOCAL_", "MASTER_", "MEGATRON_LM_",
    "MKL_", "NCCL_", "OMP_", "OMPI_", "PARALLELISM_CONFIG_", "PJRT_", "PMI_", "PYTORCH_", "RANK", "ROCR_",
    "SLURM_", "TORCH", "TPU_", "UCX_", "WORLD_SIZE", "XLA_",
)  # fmt: skip


_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - not written


def run(options: Namespace) -> int:
    """Write the report to the standard output.

    A broken library, driver or setting is reported, not raised.
    """
    with working("inspecting devices and libraries"):
        facts = report(read(), options.config_file, IMPORTED_FACTS)
    sys.stdout.write(json.dumps(facts, indent=2) + "\n" if options.json else as_text(facts))
    return 0


def report(
    environ: Mapping[str, str],
    config_file: str | None,
    imported_facts: Mapping[str, tuple[str, Callable[[Any], Any]]],
) -> dict[str, Any]:
    """Collect the facts of the report, by name.

    Args:
        environ: The variables of the process.
        config_file: The config file; None for the default one.
        imported_facts: For each fact the module to import, and the function that collects it.
    """
    return {
        "accel": _versions(_OURS),
        "command": shutil.which("accel", path=environ.get("PATH")),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "libraries": _versions(_LIBRARIES),
        "experimental": [_EXPERIMENTAL[name] for name in _versions(_EXPERIMENTAL)],
        "programs": [name for name in _PROGRAMS if shutil.which(name, path=environ.get("PATH"))],
        "cpu": {
            "cores": os.cpu_count(),
            "memory in GB": round(psutil.virtual_memory().total / 1e9, 1),
            # Data loader workers need it, and it is often small in containers.
            "shared memory in GB": round(shutil.disk_usage(_SHARED_MEMORY).total / 1e9, 1)
            if _SHARED_MEMORY.is_dir()
            else None,
        },
        **{
            name: _import_and_report(module, collect)
            for name, (module, collect) in imported_facts.items()
            if find_spec(module.partition(".")[0]) is not None
        },
        "launcher": _value_or_problem(lambda: _launcher(environ)),
        "config file": config_file or str(default_config_file(environ) or "none"),
        "settings": _value_or_problem(lambda: _settings(environ, config_file)),
        "variables": {
            name: redact(name, value) for name, value in sorted(environ.items()) if name.startswith(_PREFIXES)
        },
    }


def as_text(facts: Mapping[str, Any]) -> str:
    """Write facts as YAML, in a fence that shows them unchanged where Markdown is pasted."""
    text = yaml.safe_dump(json.loads(json.dumps(facts)), sort_keys=False, allow_unicode=True, width=1000)
    return f"```yaml\n{text}```\n"


def _versions(names: Iterable[str]) -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _value_or_problem(collect: Callable[[], Any]) -> Any:
    try:
        return collect()
    except SettingsError as error:
        return redact("", f"cannot be used: {'; '.join(error.problems)}")


def _import_and_report(module: str, collect: Callable[[Any], Any]) -> Any:
    try:
        return collect(import_module(module))
    except (ImportError, OSError, RuntimeError) as error:  # The installation or the driver is broken.
        return f"cannot be queried: {type(error).__name__}: {error}"


def _launcher(environ: Mapping[str, str]) -> str:
    topology = detect(environ)
    if topology.world_size == 1:
        return f"{topology.launcher}, one process"
    return f"{topology.launcher}, rank {topology.rank} of {topology.world_size}"


def _settings(environ: Mapping[str, str], config_file: str | None) -> dict[str, str]:
    """Return settings that differ from the defaults, with their source."""
    merged = merge_layers(parse_environ(environ), read_config(config_file, environ).sourced)
    return {
        path: f"{redact(path, setting.value)} ({setting.origin})"
        for path, setting in sorted(merged.sourced.items())
    }


def _torch(torch: Any) -> dict[str, Any]:
    return {
        "version": torch.__version__,
        "built for CUDA": torch.version.cuda,
        "built for ROCm": torch.version.hip,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "cuDNN": torch.backends.cudnn.version(),
        "distributed": torch.distributed.is_available(),
        "threads": torch.get_num_threads(),
    }


def describe_devices(kinds: Any) -> dict[str, Any]:
    """Return the devices of this machine according to `accel_state.device_kinds`."""
    kind = kinds.available_kind()
    count = kind.module.device_count() if hasattr(kind.module, "device_count") else 1
    properties = getattr(kind.module, "get_device_properties", None)
    devices = [] if properties is None else map(properties, range(count))
    return {
        "kind": kind.name,
        **({} if kind.least_torch is None else {"needs torch": f"{kind.least_torch} or newer"}),
        "count": count,
        "names": [f"{device.name}, {device.total_memory / 1e9:.1f} GB" for device in devices],
        "driver": next(iter(query_nvidia("driver_version")), None),
        "process group": kind.backend,
    }


IMPORTED_FACTS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "torch": ("torch", _torch),
    "devices": ("accel_state.device_kinds", describe_devices),
}
"""The facts of modules that need torch, or are in other packages of accel."""
