"""States of torchdata's loaders in checkpoints: either library goes on where the other one was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.running import run_client

PROGRAM = Path(__file__).parent / "programs" / "loaders.py"


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.thorough)], ids=["one rank", "two ranks"]
)
@pytest.mark.parametrize("accel_saves", [True, False], ids=["accel saves", "the reference saves"])
def test_the_other_library_goes_on_with_the_next_batch(
    accel_saves: bool, ranks: int, python: Path, clients_environ: dict[str, str], tmp_path: Path
) -> None:
    for action, on_accel in (("save", accel_saves), ("load", not accel_saves)):
        run_client(
            *(python, PROGRAM, action, str(tmp_path)),
            ranks=ranks,
            on_accel=on_accel,
            environ=clients_environ,
            folder=tmp_path,
        )
    for rank in range(ranks):
        saved, loaded = (
            json.loads((tmp_path / f"{action}_{rank}.json").read_text()) for action in ("save", "load")
        )
        assert {saved["library"], loaded["library"]} == {"accel_train", "accelerate"}
        assert all(saved["rest"].values())
        assert loaded["rest"] == saved["rest"]
