"""The folder of a checkpoint: stage, commit in one step, check, list, prune and delete it."""

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
from accel_state.files import open_regular
from accel_state.remote import AnyPath, RemotePath
from accel_train.checkpoint import layout, stores
from accel_train.checkpoint.files import (
    FolderLock,
    flush_folder,
    holder,
    lock,
    make_folder,
    move,
    remove,
    sizes_of,
    try_lock,
    write_file,
)
from accel_train.checkpoint.layout import FileRecord, Manifest

logger = logging.getLogger(__name__)
_POLL = 0.02  # seconds between two attempts
_LOCK_TIMEOUT = 10.0  # seconds that a save waits for the save of another job


@dataclass(frozen=True, slots=True)
class Staging:
    """The folder in which a checkpoint is written."""

    path: AnyPath
    lock: FolderLock | None = None

    def discard(self) -> None:
        """Remove the folder and release the lock; what was uploaded to a store stays for the next attempt."""
        if isinstance(self.path, Path):
            remove(self.path)
        if self.lock is not None:
            self.lock.release()


def make_staging(target: AnyPath) -> Staging:
    """Make the staging folder of a checkpoint, and remove stale files of processes that died.

    Args:
        target: The folder of the checkpoint. If it exists, the staging folder is inside of it, and the new
            files replace those that its manifest lists when they are complete; other files in it stay.

    Raises:
        CheckpointWriteError: Another job saves to this folder.
        OSError: The folder cannot be made.
    """
    if isinstance(target, RemotePath):
        return Staging(stores.make_staging(target))
    held = _lock_target(target)
    try:
        recover(target)
        nonce = secrets.token_hex(4)
        if target.is_dir():
            staging = layout.staging_inside(target, nonce)
            _clean(target, target)
            named = target.absolute()  # "." has neither a name nor a parent
            lock_file = layout.lock_path(named)
            with contextlib.suppress(OSError):  # the parent folder may be read-only
                parent_lock = try_lock(lock_file) if lock_file.exists() else None
                if parent_lock is not None:
                    _clean(named.parent, named)
                    parent_lock.release()
        else:
            staging = layout.staging_path(target, nonce)
            _clean(target.parent, target)
        make_folder(staging)
    except BaseException:
        held.release()
        raise
    return Staging(staging, held)


def _lock_target(target: Path) -> FolderLock:
    make_folder(target.parent)
    while True:
        exists = target.is_dir()
        path = layout.lock_inside(target) if exists else layout.lock_path(target)
        held = lock(path, target, timeout=_LOCK_TIMEOUT)
        if target.is_dir() == exists:
            return held
        held.release()  # the holder before has made the folder


def _clean(folder: Path, target: Path) -> None:
    """Remove what processes that died have left of a checkpoint in a folder."""
    for entry in folder.iterdir():
        if _is_trash(entry, target):
            remove(entry)


def _is_trash(entry: Path, target: Path) -> bool:
    """Return whether a path in or next to a checkpoint is stale, also from earlier numbered checkpoints."""
    owner = layout.target_of_trash(entry.name)
    if owner is None or not owner:
        return owner is not None and entry.parent == target
    numbered = layout.iteration_of(target.name) is not None and layout.iteration_of(owner) is not None
    return entry.parent == target.parent and (numbered or owner == target.name)


def commit(staging: AnyPath, target: AnyPath, manifest: Manifest, *, to_disk: bool) -> None:
    """Commit a complete checkpoint: afterwards it is in its folder; after an error, it is not."""
    if isinstance(target, RemotePath):
        stores.commit(RemotePath(str(staging)), target, manifest)
        return
    staging = Path(str(staging))
    # 1. Complete the staging folder.
    content = manifest.to_text().encode()
    write_file(staging / layout.MANIFEST_NAME, lambda sink: sink.write(content), to_disk=to_disk)
    if to_disk:
        for folder in (*(path for path in staging.rglob("*") if path.is_dir()), staging):
            flush_folder(folder)
    # 2. Rename it to the target; if that exists, to the folder from which `recover` replaces the files.
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

    Every step can be repeated. The old manifest goes after the files that only it lists, and the new one
    comes last: mixed files are never taken for a checkpoint.
    """
    source = target / layout.COMMIT_NAME
    marker = source / layout.MANIFEST_NAME
    if not marker.is_file():
        remove(source)
        return
    manifest = Manifest.from_text(marker.read_bytes(), marker)
    for name in _listed_files(target) - set(manifest.files):
        remove(target / name)
    remove(target / layout.MANIFEST_NAME)
    for name in manifest.files:
        if (source / name).exists():
            make_folder((target / name).parent)
            move(source / name, target / name)
    flush_folder(target)
    move(marker, target / layout.MANIFEST_NAME)
    remove(source)


def _listed_files(folder: Path) -> set[str]:
    """Return the files that the manifest in a folder lists; other files may be anybody's."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        manifest = None
    return set() if manifest is None else set(manifest.files)


_REPLACE_TIMEOUT = 60.0  # seconds that a load waits for a living process to replace a checkpoint


def wait_until_replaced(target: AnyPath, *, repair: bool = True, timeout: float = _REPLACE_TIMEOUT) -> None:
    """Wait until no process is replacing the checkpoint in a folder.

    Raises:
        CheckpointError: A process is replacing it after the timeout, or the replacement is damaged.
        OSError: A replacement cannot be completed.
    """
    deadline = time.monotonic() + timeout
    while is_being_replaced(target):
        if isinstance(target, RemotePath):
            if repair:
                stores.recover(target)
            elif time.monotonic() > deadline:
                raise CheckpointError(f"The checkpoint {str(target)!r} is being replaced: try again.")
            else:
                time.sleep(_POLL)
            continue
        path = layout.lock_inside(target)
        held = try_lock(path) if repair else None
        if held is not None:
            try:
                recover(target)
            finally:
                held.release()
        elif time.monotonic() > deadline:
            raise CheckpointError(f"{holder(path)} is replacing the checkpoint {str(target)!r}: try again.")
        else:
            time.sleep(_POLL)


def is_being_replaced(target: AnyPath) -> bool:
    """Return whether the files of a new checkpoint are replacing those of an older one."""
    return (target / layout.COMMIT_NAME / layout.MANIFEST_NAME).is_file()


def identity(target: AnyPath) -> tuple[int, ...] | None:
    """Return an id of the checkpoint in a folder, which changes with it; `None` without a manifest."""
    try:
        if isinstance(target, RemotePath):
            return ((target / layout.MANIFEST_NAME).version(),)
        status = os.stat(target / layout.MANIFEST_NAME)  # noqa: PTH116 - one call gives all three
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)


def read_manifest(folder: AnyPath) -> Manifest | None:
    """Read the manifest of a checkpoint; `None` for one that another library wrote."""
    path = folder / layout.MANIFEST_NAME
    try:
        return Manifest.from_text(path.read_bytes(), path)
    except FileNotFoundError:
        if not path.is_symlink():
            return None
        reason = "it is a broken link"
    except OSError as error:
        reason = error.strerror or repr(error)
    raise CheckpointError(f"{str(path)!r} cannot be read ({reason}): load another checkpoint.")


def check(folder: AnyPath) -> Manifest | None:
    """Check by the sizes of its files that a checkpoint is complete; return its manifest, if it has one."""
    manifest = read_manifest(folder)
    if manifest is None:
        _check_foreign(folder)
        return None
    listed = folder.sizes() if isinstance(folder, RemotePath) else {}  # in one request, but perhaps late
    complaints = manifest.complaints(listed) and manifest.complaints(sizes_of(folder, manifest.files))
    if complaints:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} is damaged: {', '.join(complaints)}. Load another one."
        )
    return manifest


def _check_foreign(folder: AnyPath) -> None:
    """Check a checkpoint of another library, which has no manifest, for truncated files."""
    if isinstance(folder, RemotePath) and stores.is_interrupted(folder):
        raise CheckpointError(
            f"{str(folder)!r} is incomplete: its upload was interrupted. Save it again, or load another one."
        )
    names = sorted(entry.name for entry in folder.iterdir() if layout.is_of_checkpoint(entry.name))
    folders = [
        entry for entry in folder.iterdir() if entry.is_dir() and layout.is_folder_of_checkpoint(entry.name)
    ]
    if not names and not folders:
        raise CheckpointError(
            f"{str(folder)!r} is not a checkpoint: it has neither {layout.MANIFEST_NAME!r} nor any other "
            "file of a checkpoint."
        )
    for name in names:
        if name in layout.ENGINE_ROOT_FILES:
            continue
        if name.endswith(SAFETENSORS_SUFFIX):
            SafetensorsFile(folder / name)
        else:
            _check_saved(folder / name)
    for path in folders:
        if not is_sharded_folder(path) and not is_engine_folder(path):
            raise CheckpointError(
                f"{str(path)!r} is incomplete: it has no {INDEX_NAME!r}, which is written last."
            )


_ZIP = b"PK\x03\x04"


def _check_saved(path: AnyPath) -> None:
    """Reject a truncated file of `torch.save`."""
    with open_regular(path) as file:
        start = file.read(len(_ZIP))
        # Files of torch before 1.6 are no zip files: only reading them shows whether they are complete.
        is_cut_off = not start or (start == _ZIP and not zipfile.is_zipfile(file))
    if is_cut_off:
        raise CheckpointError(f"{str(path)!r} is truncated: writing it was interrupted.")


SMALL = 1 << 20
"""Bytes that one thread hashes in less time than others need to start."""
_READERS = 4  # files that are hashed at the same time


def verify(
    folder: AnyPath,
    manifest: Manifest,
    names: Iterable[str],
    records: Mapping[str, FileRecord],
    record_of: Callable[[str], FileRecord],
) -> None:
    """Compare the contents of some files with their checksums.

    Args:
        folder: The checkpoint.
        manifest: Its manifest.
        names: The files to hash and compare.
        records: Records of files that are already hashed; they are also compared.
        record_of: Hashes a file.

    Raises:
        CheckpointError: A checksum differs.
    """
    unread = [name for name in names if name not in records]
    if sum(manifest.files[name].size for name in unread) < SMALL:
        read = [*map(record_of, unread)]
    else:
        with ThreadPoolExecutor(_READERS, "accel-verify") as threads:
            read = [*threads.map(record_of, unread)]
    for name, record in [*records.items(), *zip(unread, read, strict=True)]:
        if record != manifest.files[name]:
            raise CheckpointError(
                f"The checkpoint {str(folder)!r} is damaged: {name!r} has the checksum {record.checksum}, "
                f"not {manifest.files[name].checksum}. Load another one."
            )


def list_complete(project: AnyPath) -> list[int]:
    """Return the numbers of the complete checkpoints of a project; complete interrupted replacements."""
    complete: list[int] = []
    for iteration in numbers(project):
        folder = project / layout.numbered_name(iteration)
        try:
            wait_until_replaced(folder, timeout=0)
            check(folder)
        except (OSError, CheckpointError) as error:
            logger.warning("Skipped: %s", error)
        else:
            complete.append(iteration)
    return complete


def complete_everywhere(nodes: Sequence[Iterable[int]]) -> list[int]:
    """Return the checkpoints that are complete on every node, oldest first.

    Example:
        >>> complete_everywhere([[1, 2, 3], [2, 1]])
        [1, 2]
    """
    return sorted(set[int](nodes[0]).intersection(*nodes[1:])) if nodes else []


def numbers(project: AnyPath, *, since: int = 0) -> list[int]:
    """Return the numbers of all checkpoints of a project, complete or not, without interrupted uploads."""
    if not project.is_dir():
        return []
    return sorted(
        iteration
        for entry in project.iterdir()
        if (iteration := layout.iteration_of(entry.name)) is not None
        and iteration >= since
        and not (stores.is_interrupted(entry) if isinstance(entry, RemotePath) else not entry.is_dir())
    )


def to_prune(complete: Iterable[int], *, newest: int, limit: int | None) -> list[int]:
    """Return the complete checkpoints to prune after a commit, from the oldest on.

    Example:
        >>> to_prune([1, 2, 3, 4], newest=4, limit=2)
        [1, 2]
    """
    if limit is None:
        return []
    older = sorted({*complete} - {newest})
    return older[: max(0, len(older) + 1 - max(1, limit))]


def delete(folder: AnyPath) -> None:
    """Rename a checkpoint, then delete it: an incomplete one is never loaded."""
    if isinstance(folder, RemotePath):
        stores.delete(folder)
        return
    trash_path = layout.trash_path(folder, secrets.token_hex(4))
    move(folder, trash_path)
    remove(trash_path)
