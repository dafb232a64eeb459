"""Locks on checkpoint folders, which a living writer holds and one that died does not.

The system drops a lock when its process dies, whatever kills it. They are POSIX record locks: other hosts see
them on network file systems, and forked children (workers of data loaders) do not keep them.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

from accel_state.errors import CheckpointWriteError

try:
    import fcntl
except ImportError:  # Windows: nothing is locked
    fcntl = None

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

_POLL = 0.02  # seconds between two attempts
_HELD_BY_OTHERS = {errno.EACCES, errno.EAGAIN}

_held: dict[str, int] = {}  # the process that holds each: a process does not lock itself out
_guard = threading.Lock()


class FolderLock:
    """A lock that this process holds."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Release the lock; nothing happens the second time."""
        with _guard:
            if self._descriptor is None:
                return
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None
            _held.pop(_key(self._path), None)


def try_lock(path: Path) -> FolderLock | None:
    """Take a lock; return `None` if another writer holds it, perhaps in this process.

    The file exists while the lock is held, or after its holder died.
    """
    with _guard:
        if _held.get(_key(path)) == os.getpid():
            return None
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:
                if path.parent.is_dir():
                    continue  # Linux says so, now and then, where another process removes the file meanwhile
                raise
            try:
                if not _is_locked(descriptor):
                    os.close(descriptor)
                    return None
                if _is_still(path, descriptor):
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # who had it has removed the file
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on host {socket.gethostname()}".encode())
        _held[_key(path)] = os.getpid()
        return FolderLock(path, descriptor)


def lock(path: Path, folder: Path, *, timeout: float) -> FolderLock:
    """Take a lock; if another writer holds it, log that and wait.

    Raises:
        CheckpointWriteError: The timeout is over.
        OSError: The file cannot be made.
    """
    end = time.monotonic() + timeout
    found = try_lock(path)
    if found is None:
        problem = f"{holder(path)} saves to {str(folder)!r} at this moment; use another folder for each job"
        logger.warning("%s. Waiting until it is done.", problem)
        while found is None:
            if time.monotonic() > end:
                raise CheckpointWriteError(f"{problem}.")
            time.sleep(_POLL)
            found = try_lock(path)
    return found


def holder(path: Path) -> str:
    """Describe the holder of a lock."""
    with _guard:
        if _held.get(_key(path)) == os.getpid():  # reading the file would end the lock
            return "this process"
        try:
            return path.read_text(encoding="utf-8").strip() or "another process"
        except OSError:
            return "another process"


def _is_locked(descriptor: int) -> bool:
    """Try to lock a file; on a file system without locks this always succeeds."""
    if fcntl is None:
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_OTHERS:
            return False
        logger.debug("No locks in this file system (%s): two jobs in one folder are not noticed.", error)
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _key(path: Path) -> str:
    return str(path.parent.resolve() / path.name)
