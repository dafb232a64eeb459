"""The files for schedulers of clouds: their own packages read them, and each node starts its processes."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "packages/accel-suite/examples/clusters"

# The variables of the second of two nodes, as the schedulers document them.
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
DSTACK = {
    "DSTACK_NODES_NUM": "2",
    "DSTACK_NODE_RANK": "1",
    "DSTACK_MASTER_NODE_IP": "10.0.0.1",
    "DSTACK_GPUS_NUM": "16",
}

READ_SKYPILOT = "import sky, sys; task = sky.Task.from_yaml(sys.argv[1]); print(task.name, task.num_nodes)"
READ_DSTACK = """
import sys, yaml
from dstack._internal.core.models.configurations import parse_apply_configuration

task = parse_apply_configuration(yaml.safe_load(open(sys.argv[1])))
print(task.name, task.nodes)
"""
SCRIPT = """
from accel import Accelerator

accelerator = Accelerator(cpu=True)
print("rank", accelerator.process_index, "of", accelerator.num_processes, flush=True)
accelerator.end_training()
"""


def accel_line(name: str) -> str:
    """The part of a file's commands that starts accel."""
    content = yaml.safe_load((CLUSTERS / name).read_text())
    text = content["run"] if "run" in content else content["commands"][-1]
    return text[text.index("accel launch") :]


@pytest.mark.parametrize(("name", "variables"), [("skypilot.yaml", SKYPILOT), ("dstack.yml", DSTACK)])
def test_each_node_starts_its_processes(tmp_path, name, variables):
    (tmp_path / "train.py").write_text(SCRIPT)
    accel = shlex.join([sys.executable, "-m", "accel_cli", "launch", "--dry_run"])
    done = subprocess.run(
        ["bash", "-c", accel_line(name).replace("accel launch", accel)],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    words = shlex.split(done.stdout)
    assert {
        "--nproc_per_node=8",
        "--nnodes=2",
        "--node_rank=1",
        "--master_addr=10.0.0.1",
        "--master_port=29500",
    } <= {*words}
    assert words[-1] == "train.py"


def run_with(package: str, *command: str, folder: Path, project: bool = False) -> str:
    """Run a command beside a package that is installed for it alone; return what it printed, errors last."""
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        pytest.skip("it needs uv, which installs the package")
    where = ["--project", str(ROOT)] if project else ["--no-project"]
    done = subprocess.run(
        [uv, "run", "-q", *where, "--with", package, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("package", "read", "name"),
    [("skypilot", READ_SKYPILOT, "skypilot.yaml"), ("dstack", READ_DSTACK, "dstack.yml")],
)
def test_the_scheduler_reads_its_file(tmp_path, package, read, name):
    said = run_with(package, "python", "-c", read, str(CLUSTERS / name), folder=tmp_path)
    assert said.split()[:2] == ["accel", "2"]


@pytest.mark.thorough
def test_torchx_starts_a_script_on_two_processes(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["torchx", "run", "-s", "local_cwd", "dist.ddp", "-j", "1x2", "--script", "train.py"]
    said = run_with("torchx", *words, folder=tmp_path, project=True)
    assert "rank 0 of 2" in said
    assert "rank 1 of 2" in said
