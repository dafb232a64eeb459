"""Tensors of mapped files are released once they are copied, and only those."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from accel_ops.weights.mapped import releasable, release
from accel_ops.weights.read import is_mappable

COUNT = 1 << 20


def resident_file_bytes() -> int:
    """The memory of this process that mapped files take."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssFile")).split()[1])


def save(path: Path) -> dict[str, torch.Tensor]:
    torch.save({"a": torch.arange(COUNT), "b": torch.ones(COUNT)}, path)
    return torch.load(path, mmap=True, weights_only=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of the process from /proc")
def test_a_copied_tensor_takes_no_memory_and_keeps_its_values(tmp_path: Path) -> None:
    state = save(tmp_path / "state.bin")
    assert int(state["a"].sum()) == COUNT * (COUNT - 1) // 2
    before = resident_file_bytes()
    with releasable(state.values()):
        release(state["a"])
        assert before - resident_file_bytes() > 8 * COUNT - (64 << 10)
        assert int(state["a"][-1]) == COUNT - 1
        assert int(state["a"].sum()) == COUNT * (COUNT - 1) // 2
    assert float(state["b"].sum()) == COUNT


def test_other_memory_is_never_released(tmp_path: Path) -> None:
    state = save(tmp_path / "state.bin")
    ordinary, written = torch.ones(COUNT), state["b"]
    with releasable([state["a"]]):
        written += 1
        for value in (ordinary, written, torch.ones(2, 2, dtype=torch.bfloat16), "text", None):
            release(value)
        assert float(ordinary.sum()) == COUNT
        assert float(written.sum()) == 2 * COUNT
    state["a"] += 1
    release(state["a"])  # outside of the block
    assert int(state["a"][0]) == 1


def test_archives_are_mapped_and_files_of_older_torch_are_read(tmp_path: Path) -> None:
    path = tmp_path / "state.bin"
    save(path)
    assert is_mappable(path)
    legacy = tmp_path / "legacy.bin"
    torch.save({"a": torch.ones(4)}, legacy, _use_new_zipfile_serialization=False)
    assert not is_mappable(legacy)
