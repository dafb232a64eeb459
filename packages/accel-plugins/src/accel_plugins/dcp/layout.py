"""File names of a DCP folder; imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

INDEX_NAME = ".metadata"


def is_sharded_folder(folder: Path) -> bool:
    """Return whether a folder has a DCP index."""
    return (folder / INDEX_NAME).is_file()


def shard_file(rank: int) -> str:
    """Return the name of a rank's file of shards.

    Example:
        >>> shard_file(3)
        '__3_0.distcp'
    """
    return f"__{rank}_0.distcp"


def local_metadata_file(rank: int) -> str:
    """Return the name of a rank's metadata file, which exists only while the folder is written."""
    return f"__{rank}.note"
