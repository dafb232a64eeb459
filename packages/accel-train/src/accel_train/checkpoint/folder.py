"""A checkpoint's folder: begun beside its place, put there in one step, found again, deleted."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_state.errors import CheckpointError
from accel_train.checkpoint import layout
from accel_train.checkpoint.files import (
    flush_folder,
    make_folder,
    move,
    record_of,
    remove,
    sizes_in,
    write_text,
)
from accel_train.checkpoint.foreign import check_foreign
from accel_train.checkpoint.lock import FolderLock, holder, lock, try_lock
from accel_train.checkpoint.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

logger = logging.getLogger(__name__)

_LOCK_TIMEOUT = 10.0  # seconds that a save waits for another job's to end
_REPLACE_TIMEOUT = 60.0  # seconds that a load waits for a living process to replace a checkpoint
_POLL = 0.02  # seconds between two looks


@dataclass(frozen=True, slots=True)
class Staging:
    """The folder in which a checkpoint is written.

    Args:
        path: Of the folder.
        lock: Keeps other writers away.
    """

    path: Path
    lock: FolderLock

    def discard(self) -> None:
        """Remove it, and let others write."""
        remove(self.path)
        self.lock.release()


def begin(target: Path) -> Staging:
    """Make the folder in which a checkpoint is written, and remove what died processes have left there.

    Args:
        target: Where the checkpoint will stand. If that exists, the new one is written inside of it, and its
            files replace those of the old one when they are complete; other files in it stay.

    Raises:
        CheckpointWriteError: Another job saves there.
        OSError: It cannot be made.
    """
    held = _locked(target)
    try:
        recover(target)
        nonce = secrets.token_hex(4)
        if target.is_dir():
            staging = layout.staging_inside(target, nonce)
            _clean(target, target)
            lock_file = layout.lock_path(target)
            with contextlib.suppress(OSError):  # of a folder above that may be closed to us
                other = try_lock(lock_file) if lock_file.exists() else None
                if other is not None:
                    _clean(target.parent, target)
                    other.release()
        else:
            staging = layout.staging_path(target, nonce)
            _clean(target.parent, target)
        make_folder(staging)
    except BaseException:
        held.release()
        raise
    return Staging(staging, held)


def _locked(target: Path) -> FolderLock:
    make_folder(target.parent)
    while True:
        inside = target.is_dir()
        path = layout.lock_inside(target) if inside else layout.lock_path(target)
        held = lock(path, target, timeout=_LOCK_TIMEOUT)
        if target.is_dir() == inside:
            return held
        held.release()  # who had it has made the folder


def _clean(folder: Path, target: Path) -> None:
    for entry in folder.iterdir():
        if _is_trash(entry, target):
            remove(entry)


def publish(staging: Path, target: Path, manifest: Manifest, *, to_disk: bool) -> None:
    """Put a complete checkpoint in its place: it is there afterwards, or as if it had never been begun.

    Args:
        staging: What `begin` gave.
        target: Where the checkpoint will stand.
        manifest: Of all files in `staging`, which are on disk if `to_disk`.
        to_disk: Whether to return only when everything is on disk.

    Raises:
        OSError: It could not be done.
    """
    write_text(staging / layout.MANIFEST_NAME, manifest.to_text(), to_disk=to_disk)
    if to_disk:
        for folder in (*(path for path in staging.rglob("*") if path.is_dir()), staging):
            flush_folder(folder)
    if staging.parent != target:
        move(staging, target)
    else:
        move(staging, target / layout.COMMIT_NAME)
        if to_disk:
            flush_folder(target)
        recover(target)
    if to_disk:
        flush_folder(target)
        flush_folder(target.parent)


def recover(target: Path) -> None:
    """Complete the replacement of an older checkpoint, if a process died while it was at it.

    Every step can be repeated; the manifest comes last, so that a mixture is never taken for a checkpoint.

    Args:
        target: The folder of a checkpoint, which need not exist.
    """
    source = target / layout.COMMIT_NAME
    marker = source / layout.MANIFEST_NAME
    if not marker.is_file():
        remove(source)
        return
    manifest = Manifest.from_text(marker.read_bytes(), marker)
    for name in _checkpoint_files(target):
        if name not in manifest.files and name != layout.MANIFEST_NAME:
            remove(target / name)
    remove(target / layout.MANIFEST_NAME)
    for name in manifest.files:
        if (source / name).exists():
            make_folder((target / name).parent)
            move(source / name, target / name)
    flush_folder(target)
    move(marker, target / layout.MANIFEST_NAME)
    remove(source)


def wait_until_replaced(target: Path, *, repair: bool = True, timeout: float = _REPLACE_TIMEOUT) -> None:
    """Wait until no process is replacing the checkpoint in a folder.

    Args:
        target: The folder of a checkpoint.
        repair: Whether to complete the replacement of a process that died during it.
        timeout: Seconds to wait for a living process.

    Raises:
        CheckpointError: The process is still at it, or a replacement is damaged.
        OSError: A replacement cannot be completed.
    """
    end = time.monotonic() + timeout
    while is_being_replaced(target):
        path = layout.lock_inside(target)
        held = try_lock(path) if repair else None
        if held is not None:
            try:
                recover(target)
            finally:
                held.release()
        elif time.monotonic() > end:
            raise CheckpointError(f"{holder(path)} is replacing the checkpoint {str(target)!r}: try again.")
        else:
            time.sleep(_POLL)


def is_being_replaced(target: Path) -> bool:
    """Whether the files of a new checkpoint are replacing those of an older one."""
    return (target / layout.COMMIT_NAME / layout.MANIFEST_NAME).is_file()


def identity(target: Path) -> tuple[int, ...] | None:
    """Return what tells the checkpoint in a folder from the next one there; `None` without a manifest."""
    try:
        status = os.stat(target / layout.MANIFEST_NAME)  # noqa: PTH116 - one call for all three
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; `None` for one that another library wrote.

    Raises:
        CheckpointError: It is damaged.
    """
    path = folder / layout.MANIFEST_NAME
    try:
        return Manifest.from_text(path.read_bytes(), path)
    except FileNotFoundError:
        if not path.is_symlink():
            return None
        reason = "it is a link to nothing"
    except OSError as error:
        reason = error.strerror or repr(error)
    raise CheckpointError(f"{str(path)!r} cannot be read ({reason}): load another checkpoint.")


def check(folder: Path) -> Manifest | None:
    """Make sure that a checkpoint is complete, as far as the sizes of its files tell.

    Returns:
        Its manifest, `None` for a checkpoint that another library wrote.

    Raises:
        CheckpointError: A file is absent or has another size.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        check_foreign(folder)
        return None
    complaints = manifest.complaints(sizes_in(folder))
    if complaints:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} is damaged: {', '.join(complaints)}. Load another one."
        )
    return manifest


def verify(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare the contents of some files with their checksums.

    Raises:
        CheckpointError: One differs.
        OSError: One cannot be read.
    """
    for name in names:
        found = record_of(folder / name)
        if found != manifest.files[name]:
            raise CheckpointError(
                f"The checkpoint {str(folder)!r} is damaged: {name!r} has the checksum {found.checksum}, not "
                f"{manifest.files[name].checksum}. Load another one."
            )


def complete_ones(project: Path) -> list[int]:
    """The numbers of the complete checkpoints in a project's folder of checkpoints; completes what can be.

    Args:
        project: The folder with `checkpoint_0` and so on, which need not exist.
    """
    found: list[int] = []
    for iteration in numbers(project):
        folder = project / layout.numbered_name(iteration)
        try:
            wait_until_replaced(folder, timeout=0)
            check(folder)
        except (OSError, CheckpointError) as error:
            logger.warning("Passed over: %s", error)
        else:
            found.append(iteration)
    return found


def numbers(project: Path) -> list[int]:
    """The numbers of all checkpoints in a project's folder of checkpoints, complete or not."""
    if not project.is_dir():
        return []
    found = (layout.iteration_of(entry.name) for entry in project.iterdir() if entry.is_dir())
    return sorted(iteration for iteration in found if iteration is not None)


def delete(folder: Path) -> None:
    """Delete a checkpoint; while that lasts, it has a name that nobody takes for a checkpoint."""
    trash_path = layout.trash_path(folder, secrets.token_hex(4))
    move(folder, trash_path)
    remove(trash_path)


def _is_trash(entry: Path, target: Path) -> bool:
    """Whether what lies beside or inside a checkpoint was left there, also by numbered ones before it."""
    owner = layout.target_of_trash(entry.name)
    if owner is None or not owner:
        return owner is not None and entry.parent == target
    numbered = layout.iteration_of(target.name) is not None and layout.iteration_of(owner) is not None
    return entry.parent == target.parent and (numbered or owner == target.name)


def _checkpoint_files(folder: Path) -> set[str]:
    """What belongs to the checkpoint in a folder: by its manifest, or by name."""
    named = {entry.name for entry in folder.iterdir() if layout.is_of_checkpoint(entry.name)}
    for entry in folder.iterdir():
        if entry.is_dir() and layout.is_folder_of_checkpoint(entry.name):
            named |= {f"{entry.name}/{name}" for name in sizes_in(entry)}
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return named
    return named if manifest is None else named | set(manifest.files)
