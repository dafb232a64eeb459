"""The manifest: the files of a checkpoint. A folder that agrees with its manifest is complete."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

_Value = TypeVar("_Value")

FORMAT = 1
CHECKSUM = "xxh3_64"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint: its bytes, and its XXH3 hash of 64 bits in hexadecimal digits."""

    size: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files of a checkpoint, and the facts of the run that saved it.

    Args:
        step: Micro-batches since the last optimizer step.
        files: Every file by its path inside the folder, with `/` between folders.
    """

    world_size: int
    step: int
    iteration: int | None = None
    files: Mapping[str, FileRecord] = field(default_factory=dict[str, FileRecord])
    format: int = FORMAT

    def to_text(self) -> str:
        """Write as JSON.

        Example:
            >>> manifest = Manifest(world_size=2, step=0, files={"a": FileRecord(size=1, checksum="0f")})
            >>> Manifest.from_text(manifest.to_text(), "here") == manifest
            True
        """
        table = {
            "format": self.format,
            "world_size": self.world_size,
            "step": self.step,
            "iteration": self.iteration,
            "checksum": CHECKSUM,
            "files": {name: asdict(self.files[name]) for name in sorted(self.files)},
        }
        return json.dumps(table, indent=1) + "\n"

    @classmethod
    def from_text(cls, text: str | bytes, where: object) -> Manifest:
        """Read what `to_text` wrote.

        Raises:
            CheckpointError: It is damaged, or of an unknown version.
        """
        try:
            table: dict[str, Any] = json.loads(text)
            version = table["format"]
            if version == FORMAT and table["checksum"] == CHECKSUM:
                return cls(
                    world_size=_typed(table["world_size"], int),
                    step=_typed(table["step"], int),
                    iteration=None if table["iteration"] is None else _typed(table["iteration"], int),
                    files={
                        _inside(name): FileRecord(
                            size=_typed(row["size"], int), checksum=_typed(row["checksum"], str)
                        )
                        for name, row in table["files"].items()
                    },
                )
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise CheckpointError(
                f"{str(where)!r} is damaged ({str(error)[:200]!r}), so that nothing is known about this "
                "checkpoint: load another one."
            ) from error
        raise CheckpointError(
            f"{str(where)!r} has format {version!r} with checksums {table.get('checksum')!r}; this "
            f"version reads format {FORMAT!r} with {CHECKSUM!r}. Load it with the version that saved it."
        )

    def complaints(self, sizes: Mapping[str, int]) -> list[str]:
        """Return one phrase for each file that is absent or has another size.

        Example:
            >>> Manifest(world_size=1, step=0, files={"a": FileRecord(size=1, checksum="")}).complaints({})
            ["'a' is absent"]
        """
        return [
            f"{name!r} is absent"
            if name not in sizes
            else f"{name!r} has {sizes[name]} bytes, not {row.size}"
            for name, row in self.files.items()
            if sizes.get(name) != row.size
        ]


def _inside(name: str) -> str:
    """Return the name of a file in the folder of its manifest: files are deleted and moved by these names."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} is not in the folder")
    return name


def shares(files: Mapping[str, FileRecord], parts: int) -> list[list[str]]:
    """Split the files across ranks, so that each has about as many bytes to verify.

    Example:
        >>> sizes = {"a": 5, "b": 3, "c": 1}
        >>> shares({name: FileRecord(size=size, checksum="") for name, size in sizes.items()}, 2)
        [['a'], ['b', 'c']]
    """
    assigned: list[tuple[int, list[str]]] = [(0, []) for _ in range(parts)]
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        least = min(range(parts), key=lambda part: assigned[part][0])
        total, names = assigned[least]
        assigned[least] = (total + files[name].size, [*names, name])
    return [names for _, names in assigned]


def _typed(value: object, kind: type[_Value]) -> _Value:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
