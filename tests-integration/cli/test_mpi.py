"""Starting with `mpirun`, for real where there is one: Open MPI, or Hydra, as of Intel MPI and MPICH."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun on this machine")

IS_OPEN = (
    shutil.which("mpirun") is not None
    and "Open MPI"
    in subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
)
TELL = """\
import json, os, pathlib, sys
from accel_state.environ import read
from accel_state.settings import from_environ
from accel_state.topology import detect, rendezvous
place, settings = detect(read()), from_environ(read())
facts = {"rank": place.rank, "world": place.world_size, "launcher": place.launcher, "argv": sys.argv[1:],
         "precision": settings.precision.mixed_precision, "cpu": settings.process.use_cpu,
         "port": rendezvous(read(), place).port}
pathlib.Path(os.environ["TELL_TO"], f"{place.rank}.json").write_text(json.dumps(facts))
if "fail" in sys.argv and place.rank == 1:
    raise SystemExit(6)
"""


@pytest.fixture
def job(tmp_path):
    """Run a command line on two slots of this machine; give how it ended and what each process told."""
    (tmp_path / "tell.py").write_text(TELL)
    (tmp_path / "hosts").write_text("localhost slots=2\n" if IS_OPEN else "localhost:2\n")

    def run(*command):
        environ = {
            **os.environ,
            "HF_HOME": str(tmp_path),
            "TELL_TO": str(tmp_path),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        return done, [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]

    return run


ACCEL = [sys.executable, "-m", "accel_cli", "launch"]


@pytest.mark.parametrize(("words", "code"), [(["x"], 0), (["fail"], 6)])
def test_mpirun_starts_the_processes_with_the_settings(job, words, code):
    line = ["--cpu", "--mixed_precision", "bf16", "--mpirun_hostfile", "hosts", "--num_processes", "2"]
    done, facts = job(*ACCEL, *line, "--main_process_port", "0", "tell.py", *words)
    assert done.returncode == code, done.stderr
    same = {
        "world": 2,
        "launcher": "Open MPI" if IS_OPEN else "Intel MPI",
        "argv": words,
        "precision": "bf16",
        "cpu": True,
    }
    assert facts == [{"rank": rank, "port": facts[0]["port"], **same} for rank in range(2)]


def test_inside_mpirun_each_process_becomes_the_script(job):
    done, facts = job("mpirun", "-n", "2", *ACCEL, "--cpu", "tell.py")
    assert done.returncode == 0, done.stderr
    assert [(fact["rank"], fact["world"], fact["cpu"]) for fact in facts] == [(0, 2, True), (1, 2, True)]
