"""States of torchdata's loaders in checkpoints: either library goes on where the other one was."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "loaders.py"


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.thorough)], ids=["one rank", "two ranks"]
)
@pytest.mark.parametrize("accel_saves", [True, False], ids=["accel saves", "the reference saves"])
def test_the_other_library_goes_on_with_the_next_batch(
    accel_saves: bool, ranks: int, python: Path, clients_environ: dict[str, str], tmp_path: Path
) -> None:
    several = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
    for action, on_accel in (("save", accel_saves), ("load", not accel_saves)):
        start = [str(python), *(several if ranks > 1 else []), *(["-m", "accel_compat"] if on_accel else [])]
        done = subprocess.run(
            [*start, str(PROGRAM), action, str(tmp_path)],
            env=clients_environ,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        saved, loaded = (
            json.loads((tmp_path / f"{action}_{rank}.json").read_text()) for action in ("save", "load")
        )
        assert {saved["library"], loaded["library"]} == {"accel_train", "accelerate"}
        assert all(saved["rest"].values())
        assert loaded["rest"] == saved["rest"]
