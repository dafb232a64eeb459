"""States of torchdata's loaders in checkpoints: either library goes on where the other one was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.clients import run_client

PROGRAM = Path(__file__).parent / "programs" / "loaders.py"
LIBRARIES = ("accel_train", "accelerate")
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def runs(
    request: pytest.FixtureRequest,
    python: Path,
    clients_environ: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[int, dict[bool, Path]]:
    """The number of ranks, and the folder of those that accel saved and of those that the reference did."""
    base = tmp_path_factory.mktemp("loaders")
    folders = {True: base / "accel", False: base / "reference"}
    for folder in folders.values():
        folder.mkdir()
    of_accel, of_reference = map(str, folders.values())
    for on_accel, words in (
        (True, ("save", of_accel)),
        (False, ("load", of_accel, "save", of_reference)),
        (True, ("load", of_reference)),
    ):
        run_client(
            *(python, PROGRAM, *words),
            ranks=request.param,
            on_accel=on_accel,
            environ=clients_environ,
            folder=base,
        )
    return request.param, folders


@pytest.mark.parametrize("accel_saves", [True, False], ids=["accel saves", "the reference saves"])
def test_the_other_library_goes_on_with_the_next_batch(
    accel_saves: bool, runs: tuple[int, dict[bool, Path]]
) -> None:
    ranks, folders = runs
    for rank in range(ranks):
        saved, loaded = (
            json.loads((folders[accel_saves] / f"{action}_{rank}.json").read_text())
            for action in ("save", "load")
        )
        assert (saved["library"], loaded["library"]) == LIBRARIES[:: 1 if accel_saves else -1]
        assert all(saved["rest"].values())
        assert loaded["rest"] == saved["rest"]
