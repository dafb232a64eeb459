"""The folder of a checkpoint: stage, commit in one step, check, list, prune and delete it."""

from __future__ import annotations

import contextlib
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from accel_plugins.registry import find_foreign
from accel_plugins.sharding.state import INDEX_NAME, is_sharded_folder
from accel_state.errors import CheckpointError
from accel_state.remote import AnyPath, RemotePath
from accel_train.checkpoint import layout, stores
from accel_train.checkpoint.files import (
    complaints_about,
    flush_folder,
    make_folder,
    move,
    record_of,
    remove,
    write_file,
)
from accel_train.checkpoint.layout import Manifest, read_manifest

logger = logging.getLogger(__name__)


def make_staging(target: AnyPath) -> AnyPath:
    """Make the folder in which a checkpoint is written, and remove stale ones of processes that died.

    Args:
        target: The folder of the checkpoint. If it exists, the staging folder is inside of it, and the new
            files replace those that its manifest lists when they are complete; other files in it stay.

    Raises:
        OSError: The folder cannot be made.
    """
    if isinstance(target, RemotePath):
        return stores.make_staging(target)
    make_folder(target.parent)
    recover(target)
    inside, beside = target / _SAVING, _beside(target, _SAVING)
    for stale in (inside, beside, _beside(target, _DELETING)):
        remove(stale)
    staging = inside if target.is_dir() else beside
    make_folder(staging)
    return staging


_SAVING = ".accel-saving"
_DELETING = ".accel-deleting"


def _beside(target: Path, suffix: str) -> Path:
    """Return the hidden folder next to a checkpoint; all numbered ones of a project have the same."""
    name = "checkpoint" if layout.iteration_of(target.name) is not None else target.absolute().name
    return target.parent / f".{name}{suffix}"  # relative to the working directory of each host, as the target


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
        # Of a name of its own: a load may still complete the replacement before, and then removes its folder.
        move(staging, target / f"{layout.COMMIT_NAME}-{secrets.token_hex(4)}")
        if to_disk:
            flush_folder(target)
        recover(target)
        if to_disk:
            flush_folder(target)
    if to_disk:
        flush_folder(target.parent)


def recover(target: AnyPath) -> None:
    """Complete the replacement of an older checkpoint, which a process that died may have left half done.

    From the rename of its folder on the new checkpoint is the one that counts. Every step can be repeated,
    also by two processes at once. The new manifest comes last.

    Raises:
        CheckpointError: The new manifest is damaged.
        OSError: A file cannot be moved.
    """
    if isinstance(target, RemotePath):
        stores.recover(target)
        return
    for source in target.glob(f"{layout.COMMIT_NAME}*"):
        marker = source / layout.MANIFEST_NAME
        with contextlib.suppress(FileNotFoundError):  # without it, only the folder itself is left
            manifest = Manifest.from_text(marker.read_bytes(), marker)
            with contextlib.suppress(OSError):  # an old manifest on a damaged disk
                for name in layout.listed_files(target) - set(manifest.files):
                    remove(target / name)
            for name in manifest.files:
                make_folder((target / name).parent)
                with contextlib.suppress(FileNotFoundError):  # it was moved before
                    move(source / name, target / name)
            flush_folder(target)
            move(marker, target / layout.MANIFEST_NAME)
        remove(source)


def is_unchanged(target: AnyPath, manifest: Manifest | None) -> bool:
    """Return whether a folder still holds the checkpoint whose manifest was read, and no newer one."""
    if any((path / layout.MANIFEST_NAME).is_file() for path in target.glob(f"{layout.COMMIT_NAME}*")):
        return False
    try:
        return read_manifest(target) == manifest
    except (OSError, CheckpointError):  # it cannot be read, and could not be before
        return manifest is None


def check(folder: AnyPath, manifest: Manifest | None) -> None:
    """Check that a checkpoint is complete: by the sizes of its files, or without a manifest by its folders.

    Raises:
        CheckpointError: A file is absent or has another size.
    """
    if manifest is not None:
        if complaints := complaints_about(folder, manifest):
            raise CheckpointError(
                f"The checkpoint {str(folder)!r} is damaged: {', '.join(complaints)}. Load another one."
            )
        return
    if isinstance(folder, RemotePath) and stores.is_interrupted(folder):
        raise CheckpointError(
            f"{str(folder)!r} is incomplete: its upload was interrupted. Save it again, or load another one."
        )
    entries = sorted((path for path in folder.iterdir() if layout.is_of_checkpoint(path.name)), key=str)
    if not entries:
        raise CheckpointError(
            f"{str(folder)!r} is not a checkpoint: it has neither {layout.MANIFEST_NAME!r} nor any other "
            "file of a checkpoint."
        )
    for path in entries:
        if path.is_dir() and not is_sharded_folder(path) and find_foreign(folder, path.name, 1) is None:
            raise CheckpointError(
                f"{str(path)!r} is incomplete: it has no {INDEX_NAME!r}, which is written last."
            )


_READERS = 4  # files that are hashed at the same time


def verify(folder: AnyPath, manifest: Manifest) -> None:
    """Compare the contents of files with their checksums.

    Raises:
        CheckpointError: A checksum differs.
    """
    with ThreadPoolExecutor(_READERS, "accel-verify") as threads:
        records = threads.map(lambda name: record_of(folder / name), manifest.files)
        for (name, expected), record in zip(manifest.files.items(), records, strict=True):
            if record != expected:
                raise CheckpointError(
                    f"The checkpoint {str(folder)!r} is damaged: {name!r} has the checksum "
                    f"{record.checksum}, not {expected.checksum}. Load another one."
                )


def list_complete(project: AnyPath) -> list[int]:
    """Return the numbers of the complete checkpoints of a project; complete interrupted replacements."""
    complete: list[int] = []
    for iteration in numbers(project):
        folder = project / layout.numbered_name(iteration)
        try:
            recover(folder)
            check(folder, read_manifest(folder))
        except (OSError, CheckpointError) as error:
            logger.warning("Skipped: %s", error)
        else:
            complete.append(iteration)
    return complete


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


def delete(folder: AnyPath) -> None:
    """Rename a checkpoint, then delete it: an incomplete one is never loaded."""
    if isinstance(folder, RemotePath):
        stores.delete(folder)
        return
    trash = _beside(folder, _DELETING)
    remove(trash)  # of a process that died
    move(folder, trash)
    remove(trash)
