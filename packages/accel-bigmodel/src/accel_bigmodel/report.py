"""Report of a load: how each file was read and how fast, beside a plain read."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from accel_ops.weights.sizes import convert_bytes
from accel_state.html_table import html_table

if TYPE_CHECKING:
    from pathlib import Path

_SAMPLE = 256 << 20
_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """One weight file.

    Attributes:
        strategies: How its tensors came, by bytes.
        raw: Bytes per second of a plain read of the same file afterwards, if measured.
    """

    path: Path
    strategies: dict[str, int]
    seconds: float
    raw: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that came from it."""
        return sum(self.strategies.values())

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds if self.seconds else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """One load.

    Attributes:
        peak: How many bytes the process's memory grew by at most, mapped pages not counted where the system
            says.
    """

    files: tuple[FileReport, ...]
    seconds: float
    peak: int

    def __str__(self) -> str:
        grown = convert_bytes(self.peak)
        lines = [f"loaded {len(self.files)} file(s) in {self.seconds:.3f} s, memory grew by {grown}"]
        for file in self.files:
            how = (
                ", ".join(f"{convert_bytes(size)} {name}" for name, size in file.strategies.items())
                or "nothing"
            )
            speed = "" if file.rate > 1e12 else f", {file.rate / 1e9:.1f} GB/s"
            raw = "" if file.raw is None else f" (a raw read: {file.raw / 1e9:.1f} GB/s)"
            lines.append(f"  {file.path.name}: {how}{speed}{raw}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [
            (
                file.path.name,
                convert_bytes(file.nbytes),
                ", ".join(file.strategies) or "nothing",
                "-" if file.rate > 1e12 else f"{file.rate / 1e9:.1f} GB/s",
            )
            for file in self.files
        ]
        title = (
            f"{len(self.files)} file(s) in {self.seconds:.3f} s, memory grew by {convert_bytes(self.peak)}"
        )
        return html_table(rows, head=("file", "bytes", "how", "speed"), title=title)


class MemoryMeter:
    """Peak growth of the process's own memory since construction; `sample` reads it."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._start = self._own()
        self.peak = 0

    def sample(self) -> None:
        """Record the present growth."""
        self.peak = max(self.peak, self._own() - self._start)

    def _own(self) -> int:
        memory = self._process.memory_info()
        # Pages of mapped files are the kernel's to drop; they are no memory of ours.
        return memory.rss - getattr(memory, "shared", 0)


def raw_rate(path: Path) -> float:
    """Measure a plain read of up to 256 MiB of a file, in bytes per second."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        buffer = bytearray(_CHUNK)
        done, start = 0, time.perf_counter()
        while done < _SAMPLE:
            got = os.preadv(descriptor, [buffer], done)
            if not got:
                break
            done += got
        return done / max(time.perf_counter() - start, 1e-9)
    finally:
        os.close(descriptor)
