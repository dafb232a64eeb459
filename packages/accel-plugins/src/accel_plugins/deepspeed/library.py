"""Import DeepSpeed, and prepare the process for it; no other module imports it."""

from __future__ import annotations

import importlib
import warnings
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accel_plugins.deepspeed.contract import check_names
from accel_state import environ, group_end
from accel_state.available import require
from accel_state.errors import MissingDependencyError
from accel_state.versions import compare_versions

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import ModuleType

    import torch

    from accel_state.runtime import Runtime
    from accel_state.topology import Topology


_MINIMUM = "0.19"  # engines of earlier versions lack methods that `engine.py` calls
_EXTRA = "accel-plugins[deepspeed]"


def load_library(what: str) -> ModuleType:
    """Import DeepSpeed.

    Args:
        what: The feature that needs it, for the message.

    Raises:
        MissingDependencyError: DeepSpeed is not installed, or too old.
    """
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
    """Import a submodule of DeepSpeed.

    Args:
        name: Name of the submodule, without the prefix `deepspeed.`.
    """
    return importlib.import_module(f"deepspeed.{name}")


def start(runtime: Runtime) -> ModuleType:
    """Import DeepSpeed and initialise it with the device and the process group of this run.

    Args:
        runtime: Topology and device of this process. A single process gets a process group of one rank, which
            DeepSpeed needs.

    Raises:
        MissingDependencyError: DeepSpeed is not installed, or lacks what accel uses of it.
    """
    _publish_topology(runtime.topology)
    with _for_device(runtime.device):
        deepspeed = load_library("the strategy 'deepspeed'")
        check_names()
        if not dist.is_initialized():
            dist.init_process_group(
                runtime.kind.backend or "gloo",
                store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage] - documented
                rank=0,
                world_size=1,
            )
            group_end.joined()
        comm = ds_module("comm.comm")
        if comm.cdb is None or not comm.cdb.is_initialized():
            with _without_compiling(runtime.device):
                comm.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    return deepspeed


def _publish_topology(topology: Topology) -> None:
    """Set `LOCAL_RANK`, from which DeepSpeed derives its device, if the launcher has not."""
    if "LOCAL_RANK" not in environ.read():
        environ.publish({"LOCAL_RANK": str(topology.local_rank)})


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
