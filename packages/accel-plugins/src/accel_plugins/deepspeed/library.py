"""Import DeepSpeed, check what we use of it, and prepare the process; no other module imports it."""

from __future__ import annotations

import importlib
import warnings
from contextlib import contextmanager
from importlib.metadata import version
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accel_state import environ, group_end
from accel_state.available import require
from accel_state.errors import MissingDependencyError
from accel_state.versions import compare_versions

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from types import ModuleType

    import torch

    from accel_state.runtime import Runtime

_MINIMUM = "0.19"  # engines of earlier versions lack methods that `engine.py` calls
_EXTRA = "accel-plugins[deepspeed]"


def load_library(what: str) -> ModuleType:
    """Import DeepSpeed."""
    require("deepspeed", what, install=_EXTRA)
    if compare_versions("deepspeed", "<", _MINIMUM):
        raise MissingDependencyError(
            f"{what} needs deepspeed {_MINIMUM} or newer, but {version('deepspeed')} is installed: "
            f"run `pip install '{_EXTRA}'`"
        )
    with warnings.catch_warnings():
        # Its users cannot change the deprecated calls that it makes.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        return importlib.import_module("deepspeed")


def ds_module(name: str) -> Any:
    """Import a submodule of DeepSpeed, named without the prefix `deepspeed.`."""
    return importlib.import_module(f"deepspeed.{name}")


def start(runtime: Runtime) -> ModuleType:
    """Import DeepSpeed and initialise it with the device and the process group of this run.

    A single process gets a process group of one rank, which DeepSpeed needs.
    """
    if "LOCAL_RANK" not in environ.read():  # from which DeepSpeed derives its device
        environ.publish({"LOCAL_RANK": str(runtime.topology.local_rank)})
    with _for_device(runtime.device):
        deepspeed = load_library("the strategy 'deepspeed'")
        check_names()
        group_end.join_alone(runtime.kind.backend, runtime.device)
        comm = ds_module("comm.comm")
        if comm.cdb is None or not comm.cdb.is_initialized():
            with _without_compiling(runtime.device):
                comm.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    return deepspeed


@contextmanager
def _for_device(device: torch.device) -> Generator[None]:
    """Make DeepSpeed choose the device of this run when it is imported within the block."""
    if "DS_ACCELERATOR" in environ.read():
        yield
        return
    with environ.patch_environment(ds_accelerator=device.type):
        yield


@contextmanager
def _without_compiling(device: torch.device) -> Generator[None]:
    """Keep DeepSpeed from compiling its operation for CPU inference within the block, which takes minutes.

    Training does not use it; tensor-parallel inference then uses the process group.
    """
    communication = ds_module("comm.torch")
    name = "build_shm_op"
    build = vars(communication).get(name)
    if device.type != "cpu" or build is None:
        yield
        return
    setattr(communication, name, lambda: None)
    try:
        yield
    finally:
        setattr(communication, name, build)


_OPTIMIZER = "runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_STAGE_3 = "runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_BF16 = "runtime.bf16_optimizer:BF16_Optimizer"

NAMES: Mapping[str, tuple[str, ...]] = {
    "runtime.engine:DeepSpeedEngine": (
        "get_global_grad_norm",
        "gradient_clipping",
        "is_gradient_accumulation_boundary",
        "set_gradient_accumulation_boundary",
        "was_step_applied",
        "zero_grad",
    ),
    _OPTIMIZER: (
        "_lazy_init_hp_params_optimizer_state",
        "_release_preflattened_grad_buffers",
        "_use_compact_grad_partition_buffer",
        "_wait_for_offload_copies",
        "refresh_fp32_params",
        "reset_cpu_buffers",
        "scale_if_loss",
        "scaled_global_norm",
    ),
    _STAGE_3: ("_get_norm_groups", "reset_cpu_buffers", "scale_if_loss"),
    _BF16: (
        "_lazy_init_hp_params_optimizer_state",
        "clear_hp_grads",
        "clear_lp_grads",
        "refresh_fp32_params",
        "scale_if_loss",
    ),
    "runtime.fp16.fused_optimizer:FP16_Optimizer": ("refresh_fp32_params",),
    "runtime.zero:GatheredParameters": ("__enter__", "__exit__"),
    "runtime.zero.config:get_zero_config": (),
    "utils": (
        "safe_get_full_fp32_param",
        "safe_get_full_optimizer_state",
        "safe_set_full_fp32_param",
        "safe_set_full_optimizer_state",
        "safe_set_local_fp32_param",
        "safe_set_local_optimizer_state",
        "set_z3_leaf_modules",
    ),
    "comm.comm": ("cdb", "init_distributed"),
}
"""By `module` or `module:class`, without `deepspeed.` before it."""


def absent_names(names: Mapping[str, tuple[str, ...]] = NAMES) -> list[str]:
    """What the installed DeepSpeed does not have, as `module:class.name`."""
    absent: list[str] = []
    for owner, attributes in names.items():
        module, _, inner = owner.partition(":")
        try:
            found = ds_module(module)
            found = attrgetter(inner)(found) if inner else found
        except (ImportError, AttributeError):
            absent.append(owner)
        else:
            absent += [f"{owner}.{name}" for name in attributes if not hasattr(found, name)]
    return absent


def check_names(names: Mapping[str, tuple[str, ...]] = NAMES) -> None:
    """Refuse a DeepSpeed that lacks what we use of it, before a run depends on it."""
    if absent := absent_names(names):
        raise MissingDependencyError(
            f"deepspeed {version('deepspeed')} does not have {', '.join(absent)}, which this version of "
            "accel uses of it: install another version of deepspeed, such as 0.19, or a newer accel."
        )
