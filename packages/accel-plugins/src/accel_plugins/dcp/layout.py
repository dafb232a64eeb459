"""The names of the files in a DCP folder; imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

INDEX_NAME = ".metadata"


def is_sharded_folder(folder: Path) -> bool:
    """Whether there is a folder with an index."""
    return (folder / INDEX_NAME).is_file()


def shard_file(rank: int) -> str:
    """The file of a rank.

    Example:
        >>> shard_file(3)
        '__3_0.distcp'
    """
    return f"__{rank}_0.distcp"


def local_metadata_file(rank: int) -> str:
    """The note of a rank, which is there only while a folder is written."""
    return f"__{rank}.note"
