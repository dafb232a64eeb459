"""The folder of a checkpoint: staged, committed in one step, listed, chosen and deleted."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from accel_ops.weights.layout import SAFETENSORS_SUFFIX
from accel_ops.weights.safetensors_io import SafetensorsFile
from accel_plugins.deepspeed.folder import is_engine_folder
from accel_plugins.sharding.state import INDEX_NAME, is_sharded_folder
from accel_state.errors import CheckpointError
from accel_train.checkpoint import layout
from accel_train.checkpoint.files import (
    FolderLock,
    flush_folder,
    holder,
    lock,
    make_folder,
    move,
    remove,
    sizes_in,
    try_lock,
    write_file,
)
from accel_train.checkpoint.layout import FileRecord, Manifest

logger = logging.getLogger(__name__)

_LOCK_TIMEOUT = 10.0  # seconds that a save waits for another job's to end
_REPLACE_TIMEOUT = 60.0  # seconds that a load waits for a living process to replace a checkpoint
_POLL = 0.02  # seconds between two looks
_READERS = 4  # files that are hashed at the same time
SMALL = 1 << 20
"""Bytes that are hashed sooner than threads start."""
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class Staging:
    """The folder in which a checkpoint is written."""

    path: Path
    lock: FolderLock

    def discard(self) -> None:
        """Remove the folder and release the lock."""
        remove(self.path)
        self.lock.release()


def make_staging(target: Path) -> Staging:
    """Make the staging folder of a checkpoint, and remove stale files of processes that died.

    Args:
        target: The folder of the checkpoint. If it exists, the staging folder is inside of it, and the new
            files replace the old ones when they are complete; other files in it stay.

    Raises:
        CheckpointWriteError: Another job saves there.
        OSError: The folder cannot be made.
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


def commit(staging: Path, target: Path, manifest: Manifest, *, to_disk: bool) -> None:
    """Commit a complete checkpoint: it is present afterwards, or absent after an error."""
    content = manifest.to_text().encode()
    write_file(staging / layout.MANIFEST_NAME, lambda sink: sink.write(content), to_disk=to_disk)
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
    """Complete the replacement of an older checkpoint by a process that died during it.

    Every step can be repeated; the manifest comes last, so that a mixture is never taken for a checkpoint.
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
    """Return an id of the checkpoint in a folder, which changes with it; `None` without a manifest."""
    try:
        status = os.stat(target / layout.MANIFEST_NAME)  # noqa: PTH116 - one call for all three
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a checkpoint; `None` for one that another library wrote."""
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
    """Check by the sizes of its files that a checkpoint is complete; return its manifest, if it has one."""
    manifest = read_manifest(folder)
    if manifest is None:
        _check_foreign(folder)
        return None
    complaints = manifest.complaints(sizes_in(folder))
    if complaints:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} is damaged: {', '.join(complaints)}. Load another one."
        )
    return manifest


def _check_foreign(folder: Path) -> None:
    """Check a checkpoint of another library, which has no manifest, for truncated files."""
    names = sorted(entry.name for entry in folder.iterdir() if layout.is_of_checkpoint(entry.name))
    folders = [
        entry for entry in folder.iterdir() if entry.is_dir() and layout.is_folder_of_checkpoint(entry.name)
    ]
    if not names and not folders:
        raise CheckpointError(
            f"{str(folder)!r} is no checkpoint: it has neither {layout.MANIFEST_NAME!r} nor any file that a "
            "checkpoint consists of."
        )
    for name in names:
        if name in layout.ENGINE_ROOT_FILES:
            continue
        if name.endswith(SAFETENSORS_SUFFIX):
            SafetensorsFile(folder / name)
        else:
            _check_saved(folder / name)
    for one in folders:
        if not is_sharded_folder(one) and not is_engine_folder(one):
            raise CheckpointError(
                f"{str(one)!r} is not whole: it has no {INDEX_NAME!r}, which comes when all ranks are done."
            )


def _check_saved(path: Path) -> None:
    with path.open("rb") as file:
        has_zip_header = file.read(len(_ZIP)) == _ZIP
    # What torch wrote before version 1.6 is no zip file, and cannot be judged from outside.
    if path.stat().st_size == 0 or (has_zip_header and not zipfile.is_zipfile(path)):
        raise CheckpointError(f"{str(path)!r} is not whole: it was cut off while it was written.")


def verify(
    folder: Path,
    manifest: Manifest,
    names: Iterable[str],
    records: Mapping[str, FileRecord],
    record_of: Callable[[str], FileRecord],
) -> None:
    """Compare the contents of some files with their checksums.

    `records` are of files that have been read already, which are compared, too.
    """
    unread = [name for name in names if name not in records]
    if sum(manifest.files[name].size for name in unread) < SMALL:
        read = [*map(record_of, unread)]
    else:
        with ThreadPoolExecutor(_READERS, "accel-verify") as threads:
            read = [*threads.map(record_of, unread)]
    for name, found in [*records.items(), *zip(unread, read, strict=True)]:
        if found != manifest.files[name]:
            raise CheckpointError(
                f"The checkpoint {str(folder)!r} is damaged: {name!r} has the checksum {found.checksum}, "
                f"not {manifest.files[name].checksum}. Load another one."
            )


def list_complete(project: Path) -> list[int]:
    """Return the numbers of the complete checkpoints of a project; complete interrupted replacements."""
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
    """Return the numbers of all checkpoints of a project, complete or not."""
    if not project.is_dir():
        return []
    found = (layout.iteration_of(entry.name) for entry in project.iterdir() if entry.is_dir())
    return sorted(iteration for iteration in found if iteration is not None)


def delete(folder: Path) -> None:
    """Delete a checkpoint; it is renamed first, so that a partial one is never loaded."""
    trash_path = layout.trash_path(folder, secrets.token_hex(4))
    move(folder, trash_path)
    remove(trash_path)


def _is_trash(entry: Path, target: Path) -> bool:
    """Whether a path beside or inside a checkpoint is stale, also from earlier numbered checkpoints."""
    owner = layout.target_of_trash(entry.name)
    if owner is None or not owner:
        return owner is not None and entry.parent == target
    numbered = layout.iteration_of(target.name) is not None and layout.iteration_of(owner) is not None
    return entry.parent == target.parent and (numbered or owner == target.name)


def _checkpoint_files(folder: Path) -> set[str]:
    """Return the files of the checkpoint in a folder: by its manifest, or by name."""
    named = {entry.name for entry in folder.iterdir() if layout.is_of_checkpoint(entry.name)}
    for entry in folder.iterdir():
        if entry.is_dir() and layout.is_folder_of_checkpoint(entry.name):
            named |= {f"{entry.name}/{name}" for name in sizes_in(entry)}
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return named
    return named if manifest is None else named | set(manifest.files)


def to_prune(complete: Iterable[int], *, newest: int, limit: int | None) -> list[int]:
    """Return the complete checkpoints to prune after a commit, from the oldest on.

    Example:
        >>> to_prune([1, 2, 3, 4], newest=4, limit=2)
        [1, 2]
    """
    if limit is None:
        return []
    others = sorted({*complete} - {newest})
    return others[: max(0, len(others) + 1 - max(1, limit))]


def complete_everywhere(found: Sequence[Iterable[int]]) -> list[int]:
    """Return the checkpoints that are complete on every node, oldest first.

    Example:
        >>> complete_everywhere([[1, 2, 3], [2, 1]])
        [1, 2]
    """
    return sorted(set[int](found[0]).intersection(*found[1:])) if found else []
