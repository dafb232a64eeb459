"""Create and destroy the default process group; use its store from several threads.

gloo's destructor waits for collectives that have not completed, NCCL's `shutdown` for kernels; both up to the
timeout of the group, half an hour by default. A dead rank breaks its connections, which ends such a wait at
once under gloo; a rank that is stopped or busy with other work does not. Where a wait is not acceptable,
gloo's groups are therefore left to the end of the process, and NCCL gets a few seconds.

Before the interpreter ends, gloo's threads have to finish: a collective is done as soon as its result is
there, and the thread that has carried it out drops it a moment later, and with it the last reference to its
tensors. If they have a Python object, it needs the interpreter's lock for that. While the interpreter ends,
CPython before 3.14 ends a thread that asks for the lock; its stack cannot be unwound through C++, and the
process, whose work is done, aborts with "terminate called without an active exception".
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from accel_state.libraries import is_torch_version
from accel_state.torch_private import process_groups

logger = logging.getLogger(__name__)
_joined: tuple[int, weakref.ref[Any]] | None = None
_num_joined = 0


def join_single(backend: str | None, device: torch.device) -> None:
    """Initialise the default process group of a single-process job, with gloo by default."""
    if not dist.is_initialized():
        store, backend = dist.HashStore(), backend or "gloo"
        bound = bound_device(backend, device)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, **bound)
        joined()


def bound_device(backend: str, device: torch.device) -> dict[str, Any]:
    """Return the argument of `init_process_group` that binds NCCL to its device, so that it never guesses.

    Before torch 2.10, groups of some of the ranks fail or hang if a group with several backends is bound.
    """
    if "nccl" not in backend or device.index is None or (":" in backend and is_torch_version("<", "2.10")):
        return {}
    return {"device_id": device}


def joined() -> None:
    """Record that this process has initialised the default group, which `destroy_at_exit` destroys."""
    global _joined, _num_joined  # noqa: PLW0603 - a process has one default group at a time
    _num_joined = groups_joined() + 1
    _joined = os.getpid(), weakref.ref(dist.group.WORLD)


def groups_joined() -> int:
    """Return how many default process groups this process (not its parent) has initialised."""
    return _num_joined if _joined is not None and _joined[0] == os.getpid() else 0


FAILED_LIMIT_S = 1.0


def destroy(group: Any = None) -> None:
    """Destroy a process group as torch does; the default group and all others if `None`.

    While an exception is handled or propagates, ranks may never respond: collectives are aborted where the
    backend can do that, and groups not destroyed after a second are left to the end of the process.
    """
    if sys.exc_info()[0] is None or group is not None:
        dist.destroy_process_group(group)
    else:
        _destroy_with_timeout(FAILED_LIMIT_S, abort=True)


EXIT_LIMIT_S = 5.0  # for destroying groups at the end of a program, which usually takes milliseconds


def destroy_at_exit() -> None:
    """Destroy the default process group at the end of the program, if this process has initialised it."""
    if _joined is None or not dist.is_initialized():
        return
    pid, group = _joined
    if pid != os.getpid() or group() is not dist.group.WORLD:
        return  # A forked child has no threads to join; a group that the user created is not ours.
    failed = getattr(sys, "last_value", None) is not None  # The interpreter has printed an exception.
    _destroy_with_timeout(FAILED_LIMIT_S if failed else EXIT_LIMIT_S, abort=failed)


def _destroy_with_timeout(seconds: float, *, abort: bool) -> None:
    """Destroy all groups in another thread; abandon it after a timeout."""
    for group in process_groups():  # without a reference, gloo's destructor would wait
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    end = dist.distributed_c10d._abort_process_group if abort else dist.destroy_process_group
    thread = threading.Thread(target=_run, args=(end,), name="accel-destroy", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12.0 to 3.12.2 start no thread in `atexit`
        _run(end)
        return
    thread.join(seconds)
    if thread.is_alive():
        logger.warning(
            "Left the process group with collectives that did not complete within %.0f s: another rank "
            "does not take part in them.",
            seconds,
        )


def _run(end: Any) -> None:
    try:
        end()
    except Exception as error:  # noqa: BLE001 - whatever the backend says: the process ends as it would have
        logger.debug("the process group could not be destroyed: %s", error)


_THREAD_NAME = "pt_gloo_runloop"  # given by newer versions of torch than 2.9
_PAUSE = 0.001
_CALM = 3  # polls in a row that see all threads asleep: a thread may wait for the lock that a poll holds
_LIMIT = 5.0  # seconds; a thread that waits for another rank sleeps: this is for a machine without free cores


def wait_for_gloo_threads(*, or_unnamed: bool = False) -> None:
    """Wait until no thread of gloo runs.

    Args:
        or_unnamed: If none has the name, wait for all threads that Python has not started.
    """
    threads = _threads(or_unnamed=or_unnamed)
    if not threads:
        return
    calm, deadline = 0, time.monotonic() + _LIMIT
    while calm < _CALM and time.monotonic() < deadline:
        time.sleep(_PAUSE)  # which hands over the lock
        # "R": it runs, or would run if a core were free, rather than wait for something.
        states = [_read(thread / "stat").rpartition(")")[2].split()[:1] for thread in threads]
        calm = 0 if ["R"] in states else calm + 1


def _threads(*, or_unnamed: bool) -> list[Path]:
    """Return the folders of gloo's threads in `/proc`, which only Linux has."""
    threads = list(Path("/proc/self/task").glob("*"))
    named = [path for path in threads if _read(path / "comm").strip() == _THREAD_NAME]
    if named or not or_unnamed:
        return named
    known = {str(thread.native_id) for thread in threading.enumerate()}
    return [path for path in threads if path.name not in known]


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the thread has ended
        return ""


def clone_store(store: Any) -> Any:
    """Open a second connection to a store, for another thread; a waiting request blocks the first."""
    if hasattr(store, "clone"):
        return store.clone()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return TCPStore(store.host, store.port, None, False, timedelta(seconds=30))  # noqa: FBT003 - no keywords there
    return store


def present_values(store: Any, keys: Sequence[str]) -> dict[str, bytes]:
    """Return the values of those keys that are in a store, in two requests if all are."""
    if not store.check([*keys]):
        keys = [key for key in keys if store.check([key])]
    if keys and store.has_extended_api():
        return dict(zip(keys, store.multi_get([*keys]), strict=True))
    return {key: store.get(key) for key in keys}
