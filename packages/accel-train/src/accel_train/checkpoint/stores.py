"""Checkpoints on object stores: stage, commit, replace and delete them without renames.

A new checkpoint is uploaded under its final names, one that replaces another into `.accel-commit-…`, from
which `recover` copies it within the store. The manifest, written last, makes it complete. Without a manifest,
the mark `.accel-upload` says that an upload was interrupted.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from accel_state.errors import CheckpointError
from accel_state.remote import AnyPath, RemotePath
from accel_train.checkpoint import layout
from accel_train.checkpoint.files import REQUESTS, complaints_about, make_folder
from accel_train.checkpoint.layout import Manifest

logger = logging.getLogger(__name__)


def make_staging(target: RemotePath) -> RemotePath:
    """Choose the folder to upload to, and mark it; delete interrupted uploads, also of other numbered ones.

    Raises:
        OSError: The store cannot be written.
    """
    recover(target)
    for interrupted in _commits(target):
        interrupted.remove_tree()
    # Of a name of its own: a load may still complete the replacement before, and then removes its folder.
    staging = target / f"{layout.COMMIT_NAME}-{time.time_ns()}" if has_checkpoint(target) else target
    (staging / layout.UPLOAD_NAME).write_bytes(b"")
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
    return any(map(layout.is_of_checkpoint, names)) and layout.UPLOAD_NAME not in names


def is_interrupted(folder: RemotePath) -> bool:
    """Return whether a folder has an upload, or a deletion, that was not completed."""
    return (folder / layout.UPLOAD_NAME).is_file() and not (folder / layout.MANIFEST_NAME).is_file()


def commit(staging: RemotePath, target: RemotePath, manifest: Manifest) -> None:
    """Commit a checkpoint whose files are uploaded: afterwards it is in its folder.

    Raises:
        CheckpointError: The store lacks a file.
        OSError: The store cannot be written. The checkpoint before is unchanged.
    """
    absent = complaints_about(staging, manifest)
    if absent:
        raise CheckpointError(f"{str(staging)!r} lacks uploaded files: {', '.join(absent[:5])}")
    (staging / layout.MANIFEST_NAME).write_bytes(manifest.to_text().encode())
    try:
        if staging != target:
            _replace(target, staging)
        (target / layout.UPLOAD_NAME).unlink(missing_ok=True)
    except OSError as error:  # it is complete, and what is left is completed by the next save
        logger.warning("Cleaning up after the save to %s failed: %s.", target, error)


def recover(target: RemotePath) -> None:
    """Replace the checkpoint in a folder by those in `.accel-commit…` that are complete, the newest last.

    Every step can be repeated, also by several processes. The manifest is replaced last.
    """
    for source in _commits(target):
        _replace(target, source)


def _commits(target: RemotePath) -> list[RemotePath]:
    """Return the folders of checkpoints that replace the one in a folder, the newest last."""
    try:
        return sorted(target.glob(f"{layout.COMMIT_NAME}*"), key=str)
    except FileNotFoundError:
        return []


def _replace(target: RemotePath, source: RemotePath) -> None:
    """Replace a checkpoint by another one, if that is complete."""
    marker = source / layout.MANIFEST_NAME
    try:
        text = marker.read_bytes()
    except FileNotFoundError:
        return
    manifest = Manifest.from_text(text, marker)
    _delete_files(target, layout.listed_files(target) - set(manifest.files))
    try:
        _for_each(lambda name: (source / name).copy_to(target / name), manifest.files)
    except FileNotFoundError:
        if marker.is_file():
            raise
        return  # another process has completed it
    (target / layout.MANIFEST_NAME).write_bytes(text)
    marker.unlink(missing_ok=True)
    source.remove_tree()


def _delete_files(folder: RemotePath, names: Iterable[str]) -> None:
    _for_each(lambda name: (folder / name).unlink(missing_ok=True), names)


def _for_each(action: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(REQUESTS, "accel-store") as threads:
        for _ in threads.map(action, names):
            pass


def delete(folder: RemotePath) -> None:
    """Delete a checkpoint: from the first step on it is not complete, whatever ends the process."""
    (folder / layout.UPLOAD_NAME).write_bytes(b"")
    (folder / layout.MANIFEST_NAME).unlink(missing_ok=True)
    _delete_files(folder, set(folder.sizes()) - {layout.UPLOAD_NAME})
    folder.remove_tree()


def download_others(folder: RemotePath, target: Path) -> None:
    """Download the files that hooks have added to a checkpoint, for the hooks that load them."""
    for name in folder.sizes():
        top = name.partition("/")[0]
        if not layout.is_of_checkpoint(top) and not top.startswith((layout.UPLOAD_NAME, layout.COMMIT_NAME)):
            make_folder((target / name).parent)
            _download(folder / name, target / name)


@contextmanager
def on_disk(path: AnyPath) -> Generator[Path]:
    """Give a file as one of this machine: what is on a store is copied for the time of the block.

    On other systems than Windows, what maps the file within the block keeps it.
    """
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="accel-load-", ignore_cleanup_errors=True) as folder:
        local = Path(folder) / path.name
        _download(path, local)
        yield local


def _download(source: RemotePath, target: Path) -> None:
    """Copy a file of a store to the disk, in chunks."""
    with source.open("rb") as file, target.open("xb") as copy:
        shutil.copyfileobj(file, copy, 64 << 20)
