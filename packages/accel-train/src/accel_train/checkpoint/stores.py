"""Checkpoints on object stores: stage, commit, replace, and delete them without renames and locks.

A new checkpoint is uploaded under its final names, one that replaces another into `.accel-commit`, from which
`recover` copies it within the store. The manifest, written last, makes it complete. Until then a mark and a
journal of each rank's files are in `.accel-upload`: without a manifest, they say that the upload was
interrupted, and the next save to this folder uploads only the files that differ.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from accel_state.errors import CheckpointError
from accel_state.remote import RemotePath
from accel_train.checkpoint import layout
from accel_train.checkpoint.files import REQUESTS, make_folder, sizes_of, write_file
from accel_train.checkpoint.layout import FileRecord, Manifest

logger = logging.getLogger(__name__)


def make_staging(target: RemotePath) -> RemotePath:
    """Choose the folder to upload to, and mark it; delete interrupted uploads of other numbered checkpoints.

    Raises:
        OSError: The store cannot be written.
    """
    recover(target)
    staging = target / layout.COMMIT_NAME if has_checkpoint(target) else target
    _mark(staging)
    if layout.iteration_of(target.name) is not None:
        for folder in target.parent.iterdir():
            numbered = folder != target and layout.iteration_of(folder.name) is not None
            if numbered and is_interrupted(folder):
                delete(folder)
    return staging


def has_checkpoint(folder: RemotePath) -> bool:
    """Return whether a folder has a checkpoint, complete or of another library."""
    if (folder / layout.MANIFEST_NAME).is_file():
        return True
    if not folder.is_dir():
        return False
    names = [entry.name for entry in folder.iterdir()]
    ours = any(layout.is_of_checkpoint(name) or layout.is_folder_of_checkpoint(name) for name in names)
    return ours and layout.UPLOAD_NAME not in names


def is_interrupted(folder: RemotePath) -> bool:
    """Return whether a folder has an upload, or a deletion, that was not completed."""
    return (folder / layout.UPLOAD_NAME / _MARK).is_file() and not (folder / layout.MANIFEST_NAME).is_file()


_MARK = "begun"


def _mark(folder: RemotePath) -> None:
    (folder / layout.UPLOAD_NAME / _MARK).write_bytes(b"")


class UploadJournal:
    """The files that a rank has uploaded to a checkpoint that is not committed yet; kept in the store.

    Args:
        staging: The folder to which all ranks upload.
        rank: This rank.
    """

    def __init__(self, staging: RemotePath, rank: int) -> None:
        self._staging = staging
        self._path = staging / layout.UPLOAD_NAME / f"rank_{rank}.json"
        self._records = _read_journal(self._path)

    def write(self, name: str, write: Callable[[Any], object]) -> FileRecord:
        """Upload a file, unless an interrupted save has uploaded the same bytes."""
        before, path = self._records.get(name), self._staging / name
        with tempfile.TemporaryDirectory(prefix="accel-upload-") as folder:
            local = Path(folder) / path.name
            record = write_file(local, write, to_disk=False)
            if record == before and sizes_of(self._staging, [name]).get(name) == record.size:
                logger.info("%s already exists from an interrupted save.", path)
                return record
            path.upload(local)
        self._records[name] = record
        rows = {name: {"size": row.size, "checksum": row.checksum} for name, row in self._records.items()}
        self._path.write_bytes(json.dumps(rows).encode())
        return record


def _read_journal(path: RemotePath) -> dict[str, FileRecord]:
    try:
        rows: dict[str, Any] = json.loads(path.read_bytes())
        return {name: FileRecord(**row) for name, row in rows.items()}
    except FileNotFoundError:
        pass
    except (ValueError, TypeError, AttributeError) as error:
        logger.warning("%s is damaged (%s): uploading all files again.", path, error)
    return {}


def commit(staging: RemotePath, target: RemotePath, manifest: Manifest) -> None:
    """Commit a checkpoint whose files are uploaded: afterwards it is in its folder.

    Raises:
        CheckpointError: The store lacks a file.
        OSError: The store cannot be written. The checkpoint before is unchanged.
    """
    absent = manifest.complaints(sizes_of(staging, manifest.files))
    if absent:
        raise CheckpointError(f"{str(staging)!r} lacks uploaded files: {', '.join(absent[:5])}")
    if staging == target:
        _delete_files(target, _uploaded_files(target) - set(manifest.files))
    (staging / layout.MANIFEST_NAME).write_bytes(manifest.to_text().encode())
    try:
        recover(target)
        (target / layout.UPLOAD_NAME).remove_tree()
    except OSError as error:  # it is complete, and what is left is completed by the next save
        logger.warning("Cleaning up after the save to %s failed: %s.", target, error)


def recover(target: RemotePath) -> None:
    """Replace the checkpoint in a folder by that in `.accel-commit`, if that is complete.

    Every step can be repeated, also by several processes. The manifest is replaced last.
    """
    source = target / layout.COMMIT_NAME
    marker = source / layout.MANIFEST_NAME
    try:
        text = marker.read_bytes()
    except FileNotFoundError:
        return
    manifest = Manifest.from_text(text, marker)
    _delete_files(target, _listed_files(target) - set(manifest.files))
    try:
        _for_each(lambda name: (source / name).copy_to(target / name), manifest.files)
    except FileNotFoundError:
        if marker.is_file():
            raise
        return  # another process has completed it
    (target / layout.MANIFEST_NAME).write_bytes(text)
    marker.unlink(missing_ok=True)
    source.remove_tree()


def _listed_files(folder: RemotePath) -> set[str]:
    """Return the files that the manifest in a folder lists; other files may be anybody's."""
    try:
        return set(Manifest.from_text((folder / layout.MANIFEST_NAME).read_bytes(), folder).files)
    except (FileNotFoundError, CheckpointError):
        return set()


def _uploaded_files(folder: RemotePath) -> set[str]:
    """Return the files that the journals of an upload, perhaps interrupted, list."""
    journals = [path for path in (folder / layout.UPLOAD_NAME).iterdir() if path.name != _MARK]
    return {name for path in journals for name in _read_journal(path)}


def _delete_files(folder: RemotePath, names: Iterable[str]) -> None:
    _for_each(lambda name: (folder / name).unlink(missing_ok=True), names)


def _for_each(action: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(REQUESTS, "accel-store") as threads:
        for _ in threads.map(action, names):
            pass


def delete(folder: RemotePath) -> None:
    """Delete a checkpoint: from the first step on it is not complete, whatever ends the process."""
    _mark(folder)
    (folder / layout.MANIFEST_NAME).unlink(missing_ok=True)
    _delete_files(folder, [name for name in folder.sizes() if not name.startswith(layout.UPLOAD_NAME)])
    folder.remove_tree()


def download_others(folder: RemotePath, target: Path) -> None:
    """Download the files that hooks have added to a checkpoint, for the hooks that load them."""
    for name in folder.sizes():
        top = name.partition("/")[0]
        ours = layout.is_of_checkpoint(top) or layout.is_folder_of_checkpoint(top)
        if not ours and top not in {layout.UPLOAD_NAME, layout.COMMIT_NAME}:
            make_folder((target / name).parent)
            download(folder / name, target / name)


def download(source: RemotePath, target: Path) -> None:
    """Copy a file of a store to the disk, in chunks."""
    with source.open() as file, target.open("xb") as copy:
        shutil.copyfileobj(file, copy, _CHUNK)


_CHUNK = 64 << 20
