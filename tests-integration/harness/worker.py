"""The far end of `harness.pool`: fork ranks, import test modules, run bodies, report."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import socket
import sys
import traceback
import warnings
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch._dynamo  # pyright: ignore[reportUnusedImport] - for the first DDP model: once here, not per rank
import torch.distributed as dist
from torch.distributed import TCPStore

import accel_train.accelerator  # noqa: F401  # pyright: ignore[reportUnusedImport] - as above
from accel_plugins.registry import STRATEGIES
from harness.pool import Answer, Job, bodies
from shared_test_rules import reset_states

if TYPE_CHECKING:
    from types import ModuleType

LOCALS = 300  # characters of each local variable shown with a failure
SIMULATED: Any = (
    torch.get_device_module(os.environ["SIMULATED_DEVICE"]) if "SIMULATED_DEVICE" in os.environ else None
)
"""The module of the simulated device that this process has; see `harness.simulated`."""


def main(address: str, *preload: str) -> None:
    """Serve as the nursery until the pytest process closes the connection."""
    torch.set_num_threads(1)
    for name in preload:
        importlib.import_module(name)
    STRATEGIES.names()  # reads the metadata of all distributions
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks are reaped by the kernel
    control = Client(address, "AF_UNIX")
    gc.freeze()  # what is imported by now stays: collections look at what test bodies leave
    while True:
        try:
            world_size, folder = control.recv()
        except (EOFError, OSError):
            break
        store = socket.create_server(("127.0.0.1", 0))
        for rank in range(world_size):
            if os.fork() == 0:
                control.close()
                _rank(rank, world_size, store, address, Path(folder))
        store.close()
    os.killpg(0, signal.SIGKILL)  # ranks that still run a body, and this process


def _rank(rank: int, world_size: int, store: socket.socket, address: str, folder: Path) -> None:
    """Be one rank; never return."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        faulthandler.enable()
        with (folder / f"{os.getpid()}.stack").open("w") as stacks:
            faulthandler.register(signal.SIGUSR1, stacks)
            _as_torchrun(rank, world_size, store.getsockname()[1])
            _join(rank, world_size, store)
            link = Client(address, "AF_UNIX")
            link.send((rank, os.getpid()))
            _serve(link)
    except (EOFError, KeyboardInterrupt):
        pass  # the pytest process is gone
    except BaseException:  # noqa: BLE001 - a forked child must never unwind into the nursery's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _as_torchrun(rank: int, world_size: int, port: int) -> None:
    """Set the variables that torchrun sets for its workers."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        ROLE_RANK=str(rank),
        ROLE_NAME="default",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_WORLD_SIZE="1",
        ROLE_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
        TORCHELASTIC_RUN_ID="harness",
    )


def _join(rank: int, world_size: int, listener: socket.socket) -> None:
    host, port = listener.getsockname()
    fd = listener.detach()
    if rank == 0:
        store = TCPStore(host, port, world_size, is_master=True, master_listen_fd=fd)
    else:
        os.close(fd)
        store = TCPStore(host, port, world_size, is_master=False)
    backend = "gloo"
    if SIMULATED is not None:
        SIMULATED.set_device_count(max(world_size, SIMULATED.device_count()))
        SIMULATED.set_device(rank)
        backend = f"cpu:gloo,{SIMULATED.NAME}:{dist.get_default_backend_for_device(SIMULATED.NAME)}"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def _serve(link: Connection) -> None:
    while True:
        job: Job = pickle.loads(link.recv_bytes())
        link.send_bytes(pickle.dumps(_answer(job)))


def _answer(job: Job) -> Answer:
    before = dict(os.environ)
    directory = Path.cwd()
    groups = _groups()
    try:
        _load(job)
        _reset()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            bodies[job.module, job.name](**job.fixtures)
            if not job.restart:  # else the process group may be spoiled
                dist.barrier()
            _reset()
            # All ranks at once, and not some day in a data worker, which would wait for threads that a fork
            # does not copy.
            gc.collect()
            gc.freeze()  # what lives on is imported or cached: to look at it each time takes 0.3 s
            if SIMULATED is not None:
                _reset_device()
        _check_left_behind(before, groups)
    except pytest.skip.Exception as skipped:
        return Answer(skipped=str(skipped))
    except BaseException as error:  # noqa: BLE001 - every failure belongs to the test, whatever it is
        return Answer(error=_story(error, job.file))
    finally:
        os.chdir(directory)
    return Answer()


def _load(job: Job) -> ModuleType:
    """Import the test module from its file, under the name it has in the pytest process."""
    if (loaded := sys.modules.get(job.module)) is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(job.module, job.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[job.module] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[job.module]
        raise
    return module


def _reset() -> None:
    """Forget what a body did to the process, without touching the pool's process group."""
    reset_states()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(mode=False)
    torch.set_grad_enabled(True)


def _reset_device() -> None:
    """Give a body a fresh device, and fail the one before if something was not waited for."""
    for index in range(SIMULATED.device_count()):
        SIMULATED.synchronize(index)
        SIMULATED.reset_peak_memory_stats(index)
    SIMULATED.set_device(dist.get_rank())
    SIMULATED.empty_cache()
    races = SIMULATED.take_races()
    if races:
        raise AssertionError("\n".join(("races on the simulated device:", *dict.fromkeys(races))))


def _check_left_behind(before: dict[str, str], groups: int) -> None:
    # torch sets the first with its compiler, scikit-learn the others when it is imported.
    names = {*before, *os.environ} - {"TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
    changed = sorted(name for name in names if before.get(name) != os.environ.get(name))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    if changed:
        raise AssertionError(f"the test left these environment variables changed: {', '.join(changed)}")
    if _groups() != groups:
        raise AssertionError(f"the test left {_groups() - groups:+d} process groups behind")


def _groups() -> int:
    """How many groups there are, but for those of device meshes, which are made once and stay."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(not group.group_desc.startswith("mesh_") for group in groups)


def _story(error: BaseException, file: str) -> str:
    """The traceback, with the local variables of the test's own frames."""
    report = traceback.TracebackException.from_exception(error, capture_locals=True)
    node: traceback.TracebackException | None = report
    while node is not None:
        for frame in node.stack:
            if frame.filename != file:
                frame.locals = None
            elif frame.locals:
                frame.locals = {name: value[:LOCALS] for name, value in frame.locals.items()}
        node = node.__cause__ or node.__context__
    return "".join(report.format())


if __name__ == "__main__":
    main(*sys.argv[1:])
