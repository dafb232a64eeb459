"""The commands as users run them: real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_cli.commands.selftest.results import CHECK_NAMES

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "packages/accel-suite/examples"


@pytest.fixture(autouse=True)
def _no_config(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)


def accel(*line):
    return subprocess.run(
        [sys.executable, "-m", "accel_cli", *line], capture_output=True, text=True, check=False
    )


def test_the_checks_of_a_machine_pass_on_two_processes():
    done = accel("test", "--cpu", "--num_processes", "2", "--mixed_precision", "bf16", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert {name: one["result"] for name, one in found["checks"].items()} == dict.fromkeys(
        CHECK_NAMES, "passed"
    )
    assert [one["mixed precision"] for one in found["processes"]] == ["bf16", "bf16"]
    assert found["bytes per second"]["all-reduce"] > 0
    assert found["seconds"] < 120


def test_a_config_that_cannot_be_used_is_no_failed_check(tmp_path):
    (tmp_path / "bad.yaml").write_text("num_proceses: 2\n")
    done = accel("test", "--config_file", str(tmp_path / "bad.yaml"))
    assert done.returncode == 2
    assert "num_processes" in done.stderr
    assert "Traceback" not in done.stderr


GOOD = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator

accelerator = Accelerator()
model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range({layers})]).to(accelerator.device)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(2048, 4096)), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (rows,) in loader:
    loss = model(rows).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {{loss.item():.3f}}", loss.tolist(), rows.numpy().shape)
if {condition}:
    accelerator.gather(loss)
accelerator.save_state("out")
"""


def check(tmp_path, *line, **parts):
    (tmp_path / "train.py").write_text(GOOD.format(**parts))
    done = accel("check", "--world", "128", *line, "--json", "train.py")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_script_is_checked_for_many_ranks_without_memory_or_devices(tmp_path):
    """16 GB for weights and their training: nothing of this is computed or written."""
    code, found = check(tmp_path, "--memory", "8GiB", "--ranks", "0,127", layers=40, condition="True")
    elements = 40 * (4096**2 + 4096)
    assert set(found["ranks"]) == {"0", "127"}
    for rank, one in found["ranks"].items():
        assert one["stopped"] == ""
        kinds = [line.partition(" ")[0] for line in one["collectives"]]
        assert kinds[:4] == ["prepare", "backward", "backward", "backward"]
        assert kinds[-2:] == ["gather", "save_state"]
        assert one["memory"] >= 24 * elements
        files = {Path(name).name: size for name, size in one["files"].items()}
        assert files.get("model.safetensors") == (4 * elements if rank == "0" else None)
        assert f"random_states_{rank}.pkl" in files
    assert code == 1
    assert any("rank 0 needs" in problem for problem in found["problems"])
    assert not (tmp_path / "out").exists()


def test_transformer_engine_is_checked_where_it_is_not_as_what_it_stores(tmp_path, monkeypatch):
    """The driver's tool is asked about this machine for FP8 alone."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\ntouch asked\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    memory = {}
    for name in ("bf16", "fp8"):
        Path("run.yaml").write_text(f"mixed_precision: {name}\nfp8_config:\n  backend: TE\n")
        line = ("--config_file", "run.yaml", "--ranks", "1")
        code, found = check(tmp_path, *line, layers=2, condition="True")
        assert (code, found["problems"]) == (0, [])
        assert name == "fp8" or not Path("asked").exists()
        memory[name] = found["ranks"]["1"]["memory"]
    assert memory["fp8"] == memory["bf16"]


def test_a_collective_that_one_rank_would_miss_is_named(tmp_path):
    code, found = check(tmp_path, "--ranks", "0,1", layers=2, condition="accelerator.is_main_process")
    assert code == 1
    (problem,) = found["problems"]
    assert "rank 0 calls gather at train.py:18" in problem
    assert "rank 1 calls save_state at train.py:19" in problem


def test_an_example_with_epochs_and_numbered_checkpoints_is_followed_to_its_end(tmp_path):
    script = EXAMPLES / "by_feature/checkpointing.py"
    done = accel("check", "--world", "2", "--ranks", "1", "--json", str(script))
    found = json.loads(done.stdout)
    assert (done.returncode, found["problems"]) == (0, [])
    assert sum(line.startswith("backward") for line in found["ranks"]["1"]["collectives"]) == 9
    assert not (tmp_path / "digits-run").exists()


def test_ranks_that_never_end_or_end_at_once_are_reported(tmp_path):
    lines = ["import os, sys, time", "if os.environ['RANK'] == '0':", "    time.sleep(1000)"]
    lines += ["print('bye', file=sys.stderr, flush=True)", "os._exit(3)"]
    (tmp_path / "ends.py").write_text("\n".join(lines))
    done = accel("check", "--world", "2", "--timeout", "6", "--quiet", "ends.py")
    assert done.returncode == 1
    late, gone = done.stdout.splitlines()
    assert late.startswith("problem: rank 0: it has not ended after 6 s (--timeout); values are made up")
    assert gone == "problem: rank 1: it ended with exit code 3: bye"


def test_an_error_of_the_script_is_reported_with_its_line(tmp_path):
    (tmp_path / "fails.py").write_text("import accel\n\nraise ValueError('no such thing')\n")
    done = accel("check", "--world", "4", "--ranks", "0", "fails.py")
    assert done.returncode == 1
    assert "ValueError at fails.py:3: no such thing" in done.stdout


@pytest.mark.parametrize("name", ["launch", "config", "estimate", "env", "test", "merge", "to_fsdp2", "tpu"])
def test_the_documented_modules_are_the_subcommands(name):
    line = [sys.executable, "-m", f"accel.commands.{name}", "--help"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: accel ")


@pytest.mark.parametrize("name", ["config", "estimate-memory", "launch", "merge-weights"])
def test_the_documented_programs_are_the_subcommands(name):
    program = Path(sys.executable).parent / f"accel-{name}"
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: accel {name}")
