"""The commands as users run them: real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_cli.commands.selftest_checks import CHECKS
from accel_cli.config_file import read_config
from accel_cli.launch.checks import find_launch_problems
from accel_cli.launch.hosts import HostDevices
from accel_cli.launch.plan import LaunchPlan
from accel_state.settings import merge_layers
from harness.checks import Checked, run_checks

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
    assert {name: one["result"] for name, one in found["checks"].items()} == dict.fromkeys(CHECKS, "passed")
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
    print(f"loss {{loss.item():.3f}} {{loss:.3f}}", loss.tolist(), rows.numpy().shape)
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


SHARED = """
import os
import torch
from torch.utils.data import DataLoader
from accel import Accelerator

class Own:
    __len__ = lambda self: 8
    __iter__ = lambda self: iter(range(int(os.environ["RANK"]), 16, 2))

class Same(torch.utils.data.IterableDataset):
    world_size, rank = 2, int(os.environ["RANK"])
    __iter__ = lambda self: (float(number) for number in range(16))

accelerator = Accelerator(cpu=True)
twice = accelerator.prepare(DataLoader(range(16), batch_size=2, sampler=Own()))
same = accelerator.prepare(DataLoader(Same(), batch_size=2))
fine = accelerator.prepare(DataLoader(range(16), batch_size=2, shuffle=True))
print(len([[*loader] for loader in (twice, same, fine)]))
"""

CONFIG = "mixed_precision: {}\nfp8_config:\n  backend: TE\n"
MISSED = {"layers": 2, "condition": "accelerator.is_main_process"}
FILES = {
    "bf16": {"train.py": GOOD.format(layers=2, condition="True"), "run.yaml": CONFIG.format("bf16")},
    "fp8": {"train.py": GOOD.format(layers=2, condition="True"), "run.yaml": CONFIG.format("fp8")},
    "missed": {"train.py": GOOD.format(**MISSED)},
    "fails": {"fails.py": "import accel\n\nraise ValueError('no such thing')\n"},
    "ends": {"ends.py": "import os, sys; print('bye', file=sys.stderr, flush=True); os._exit(3)"},
    "shared": {"train.py": SHARED},
    "example": {},
}
"""What is in the folder of each check of `checked`."""
JSON = ("--world", "128", "--json")
LINES = {
    "bf16": (*JSON, "--config_file", "run.yaml", "--ranks", "1", "train.py"),
    "fp8": (*JSON, "--config_file", "run.yaml", "--ranks", "1", "train.py"),
    "missed": (*JSON, "--ranks", "0,1", "train.py"),
    "fails": ("--world", "4", "--ranks", "0", "fails.py"),
    "ends": ("--world", "2", "--timeout", "3600", "--quiet", "ends.py"),
    "shared": ("--world", "2", "--json", "train.py"),
    "example": ("--world", "2", "--ranks", "1", "--json", str(EXAMPLES / "by_feature/checkpointing.py")),
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> dict[str, Checked]:
    """How checks end on a machine whose tool of the driver leaves a file where it is asked."""
    base = tmp_path_factory.mktemp("checked")
    for name, files in FILES.items():
        (base / name).mkdir()
        for file, text in files.items():
            (base / name / file).write_text(text)
    tool = base / "nvidia-smi"
    tool.write_text("#!/bin/sh\ntouch asked\n")
    tool.chmod(0o755)
    path = os.pathsep.join([str(base), os.environ["PATH"]])
    return run_checks(LINES, base, {"PATH": path, "HF_HOME": str(base / "hf")})


def told(check):
    """The exit code of a check and what it found."""
    assert check.output, check.errors
    return check.code, json.loads(check.output)


def test_transformer_engine_is_checked_where_it_is_not_as_what_it_stores(checked):
    """Nothing is asked of the driver's tool."""
    memory = {}
    for name in ("bf16", "fp8"):
        code, found = told(checked[name])
        assert (code, found["problems"]) == (0, [])
        assert not (checked[name].folder / "asked").exists()
        memory[name] = found["ranks"]["1"]["memory"]
    assert memory["fp8"] == memory["bf16"]


def test_a_collective_that_one_rank_would_miss_is_named(checked):
    code, found = told(checked["missed"])
    assert code == 1
    (problem,) = found["problems"]
    assert "rank 0 calls gather at train.py:18" in problem
    assert "rank 1 calls save_state at train.py:19" in problem


def test_samples_that_ranks_share_or_miss_are_named(checked):
    code, found = told(checked["shared"])
    assert code == 1
    missed, same = found["problems"]
    assert "rank 0 and rank 1 miss samples of the loader prepared at train.py:16" in missed
    assert same == "rank 0 and rank 1 read the same samples from the loader prepared at train.py:17"


def test_an_example_with_epochs_and_numbered_checkpoints_is_followed_to_its_end(checked):
    code, found = told(checked["example"])
    assert (code, found["problems"]) == (0, [])
    assert sum(line.startswith("backward") for line in found["ranks"]["1"]["collectives"]) == 9
    assert not (checked["example"].folder / "digits-run").exists()


def test_an_error_of_the_script_is_reported_with_its_line(checked):
    assert checked["fails"].code == 1
    assert "ValueError at fails.py:3: no such thing" in checked["fails"].output


@pytest.mark.thorough
def test_a_rank_that_never_ends_is_reported(tmp_path):
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(100_000)")
    done = accel("check", "--world", "2", "--timeout", "6", "--quiet", "sleeps.py")
    assert done.returncode == 1
    assert "it did not end within 6 s (--timeout). Values are made up" in done.stdout


def test_a_rank_that_ends_at_once_is_reported(checked):
    assert checked["ends"].code == 1
    assert "it exited with code 3: bye" in checked["ends"].output


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


def test_the_examples_of_the_repository_are_copied(tmp_path):
    command = [sys.executable, "-m", "accel_cli", "examples", str(tmp_path / "new")]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "new/digits.py").is_file()
    assert (tmp_path / "new/config_templates/fsdp2.yaml").is_file()


TEMPLATES = EXAMPLES / "config_templates"


@pytest.mark.parametrize("template", sorted(TEMPLATES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_template_is_valid_and_fits_its_machine(template):
    merged = merge_layers(read_config(str(template), {}).sourced)
    launch = merged.settings.launch
    gpus = (launch.num_processes or 1) // launch.num_machines
    machine = HostDevices(gpus=gpus, cores=64, capability=lambda: (9, 0))
    assert find_launch_problems(LaunchPlan(merged=merged, machine=machine, environ={})) == []


FINISHED = """\
import json, os, shutil, sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from accel import Accelerator
from torch.utils.tensorboard import SummaryWriter

accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir="runs")
accelerator.init_trackers("mine")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(16, 8), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for rows in loader:
    loss = model(rows).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": 1.0})
accelerator.get_tracker("tensorboard").log({"last": 1.0})
if accelerator.is_main_process:
    SummaryWriter("own").add_scalar("loss", 1.0)
    shutil.rmtree("old")
    os.remove("log.txt")
    os.makedirs("out/new")
    Path("out/new/values.json").write_text(json.dumps({"loss": 1.0}))
    assert json.loads(Path("out/new/values.json").read_text()) == {"loss": 1.0}
    os.replace("out/new/values.json", "result.json")
    with open("log.txt", "a") as log:
        log.write("another line")
    torch.save({"weight": torch.ones(2)}, "best.pt")
    save_file({"weight": torch.ones(2)}, "weights/model.safetensors")
    if sys.argv[1:] == ["reads"]:
        assert torch.load("best.pt")["weight"].tolist() == [1, 1]
        assert load_file("weights/model.safetensors")["weight"].tolist() == [1, 1]
accelerator.wait_for_everyone()
accelerator.save_model(model, "weights")
accelerator.save({"weight": torch.ones(2)}, Path("weights").resolve() / "best.pt")
accelerator.save_state("state")
accelerator.end_training()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("command", [["check", "--world", "2"], ["doctor", "--timeout", "60"]])
def test_a_trial_changes_no_file_and_starts_no_run_of_a_tracker(tmp_path, command):
    pytest.importorskip("tensorboard")
    (tmp_path / "train.py").write_text(FINISHED)
    for name in ("result.json", "log.txt", "best.pt", "old/kept.txt", "weights/model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("of the real run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = accel(*command, "train.py", *(["reads"] if "doctor" in command else []))
    assert done.returncode == 0, done.stdout + done.stderr
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before
