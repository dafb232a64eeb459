"""The one place that imports DeepSpeed, and what it needs to find in a process before it can be used."""

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


_MINIMUM = "0.19"  # engines of earlier versions lack what `engine.py` asks of them
_EXTRA = "accel-plugins[deepspeed]"


def load_library(what: str) -> ModuleType:
    """Import DeepSpeed.

    Args:
        what: Who needs it, for the message.

    Raises:
        MissingDependencyError: It is not installed, or too old.
    """
    require("deepspeed", what, install=_EXTRA)
    if compare_versions("deepspeed", "<", _MINIMUM):
        raise MissingDependencyError(
            f"{what} needs deepspeed {_MINIMUM} or newer, and {version('deepspeed')} is installed: "
            f"run `pip install '{_EXTRA}'`"
        )
    with warnings.catch_warnings():
        # What it uses of other libraries is not for its users to change.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        return importlib.import_module("deepspeed")


def part(name: str) -> Any:
    """A module of DeepSpeed, which has been imported.

    Args:
        name: Of the module, without `deepspeed.` before it.
    """
    return importlib.import_module(f"deepspeed.{name}")


def start(runtime: Runtime) -> ModuleType:
    """Import DeepSpeed and let it use the device and the process group of this run.

    Args:
        runtime: Of this process. Where it has no process group, as one process has none, one is made, for
            DeepSpeed has no way without.

    Raises:
        MissingDependencyError: DeepSpeed is not installed, or has not what we use of it.
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
        comm = part("comm.comm")
        if comm.cdb is None or not comm.cdb.is_initialized():
            with _without_compiling(runtime.device):
                comm.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    return deepspeed


def _publish_topology(topology: Topology) -> None:
    """Set `LOCAL_RANK`, from which DeepSpeed learns its device whenever it likes, whoever launched this."""
    if "LOCAL_RANK" not in environ.read():
        environ.publish({"LOCAL_RANK": str(topology.local_rank)})


@contextmanager
def _for_device(device: torch.device) -> Generator[None]:
    """A block in which DeepSpeed, imported for the first time, chooses the device of this run."""
    if "DS_ACCELERATOR" in environ.read():
        yield
        return
    with environ.patch_environment(ds_accelerator=device.type):
        yield


@contextmanager
def _without_compiling(device: torch.device) -> Generator[None]:
    """A block in which DeepSpeed does not compile its operation for inference on CPUs, which takes minutes.

    Nothing in training uses it; tensor-parallel inference, which does, goes through the process group then.
    """
    communication = part("comm.torch")
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
