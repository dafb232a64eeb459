"""A real cluster of Ray, of two nodes on this machine: nodes are placed, killed, and start again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from harness.ray_cluster import IN_THIS_FOLDER, SKIP, LocalRay

pytestmark = pytest.mark.skipif(bool(SKIP), reason=SKIP)


@pytest.fixture(scope="module")
def cluster():
    with LocalRay() as started:
        yield started


@contextmanager
def launched(folder, cluster, *line):
    """Start `accel launch --launcher ray`, a rank on each node; end it if it is left running."""
    command = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--launcher", "ray"]
    command += ["--ray_address", cluster.address, "--num_machines", "2", "--num_processes", "2", *line]
    environ = {**os.environ, **IN_THIS_FOLDER, "HF_HOME": str(folder), "ONLY_HERE": "a b"}
    with subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


PLACED = """\
import os, pathlib, psutil, sys, time
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ONLY_HERE")
actor = psutil.Process(os.getppid()).ppid()
print(*(os.environ[name] for name in names), actor, sys.argv[1:], os.getcwd())
begun = pathlib.Path("begun" + os.environ["RANK"])
if not begun.exists():
    begun.touch()
    time.sleep(600)
if os.environ["RANK"] == "0":
    pathlib.Path("written").touch()
while not os.path.exists("written"):
    time.sleep(0.1)
sys.exit(int(os.environ["RANK"]) * 7)
"""


@pytest.mark.thorough
def test_the_command_runs_on_each_node_and_all_start_again_when_an_actor_dies(cluster, tmp_path):
    (tmp_path / "script.py").write_text(PLACED)
    line = ["--ray_strategy", "STRICT_SPREAD", "--max_restarts", "1", "script.py", "--lr", "$HOME"]
    words = f"['--lr', '$HOME'] {tmp_path}\n"
    with launched(tmp_path, cluster, *line) as process:
        first = sorted(process.stdout.readline() for _ in range(2))
        actors = [int(text.split()[-len(words.split()) - 1]) for text in first]
        assert first == [f"node {rank}: {rank} 0 1 {rank} a b {actors[rank]} {words}" for rank in range(2)]
        os.kill(actors[1], signal.SIGKILL)
        output, problems = process.communicate()
    again = sorted(line for line in output.splitlines() if "[" in line and "accel" not in line)
    assert [re.sub(r"\d+ \[", "[", text) + "\n" for text in again] == [
        f"node {rank}: {rank} 0 1 {rank} a b {words}" for rank in range(2)
    ]
    assert process.returncode == 7
    assert "node 1 is lost: ActorDiedError" in problems
    assert "restarting all nodes: restart 1 of 1" in problems
    assert "node 1 exited with 7" in problems


TRAIN = """\
import os, time
import psutil
import torch
from accel import Accelerator
from accel.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

accelerator = Accelerator(
    project_config=ProjectConfiguration("run", automatic_checkpoint_naming=True, save_on_preemption=True),
    dataloader_config=DataLoaderConfiguration(resume_mid_epoch=True),
)
set_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data))
if resumed := accelerator.has_checkpoint:
    accelerator.load_state()
steps = 0
for batch in loader:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    if steps == 4 and not resumed:
        accelerator.save_state()
        actor = psutil.Process(os.getppid()).ppid()
        print("saved", accelerator.num_processes, actor, os.getpid(), flush=True)
    if not resumed:
        time.sleep(0.5)
weights = [parameter.tolist() for parameter in accelerator.unwrap_model(model).parameters()]
print("steps", steps, weights, flush=True)
accelerator.end_training()
"""


def undisturbed_weights():
    """Return the weights after all steps, in one process with batches of two."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    for batch in data.split(2):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def saved(process):
    """Wait until both ranks have saved; return the processes of rank 1: actor and script."""
    texts = sorted(process.stdout.readline() for _ in range(2))
    for rank, text in enumerate(texts):
        assert text.startswith(f"node {rank}: saved 2 "), texts
    return map(int, texts[1].split()[-2:])


def check_end(output, earlier):
    """Check that both ranks did the other steps and have the weights of one process."""
    import torch

    ends = re.findall(r"node \d: steps (\d+) (.*)", output)
    expected = [parameter.detach() for parameter in undisturbed_weights().parameters()]
    for steps, text in ends:
        assert int(steps) == 12 - earlier
        for value, parameter in zip(eval(text), expected, strict=True):
            torch.testing.assert_close(torch.tensor(value), parameter)
    assert len(ends) == 2


@pytest.mark.thorough
def test_training_resumes_at_its_checkpoint_when_an_actor_dies(cluster, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    with launched(tmp_path, cluster, "--max_restarts", "1", "train.py") as process:
        actor, _ = saved(process)
        os.kill(actor, signal.SIGKILL)
        output, problems = process.communicate()
    assert process.returncode == 0, problems
    check_end(output, 4)


@pytest.mark.thorough
def test_a_preempted_rank_saves_on_all_and_all_resume_after_that_step(cluster, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    with launched(tmp_path, cluster, "--max_restarts", "1", "train.py") as process:
        _, script = saved(process)
        os.kill(script, signal.SIGTERM)
        output, problems = process.communicate()
    assert process.returncode == 0, problems
    assert "exited with 143" in problems
    done = int(re.search(r"steps (\d+)", output)[1])
    assert 0 < done <= 8, problems
    assert "This job is preempted. Saved" in output
    check_end(output, 12 - done)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks_and_decides_the_exit_code(cluster, tmp_path, number):
    source = "import signal, sys\nprint('up', flush=True)\nsignal.pause()\n"
    (tmp_path / "script.py").write_text(source)
    with launched(tmp_path, cluster, "--max_restarts", "3", "script.py") as process:
        for _ in range(2):
            assert process.stdout.readline().endswith(": up\n")
        process.send_signal(number)
        process.communicate()
    assert process.returncode == 128 + number


@pytest.mark.thorough
def test_a_user_signal_reaches_all_ranks(cluster, tmp_path):
    source = "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('told'))\n"
    (tmp_path / "script.py").write_text(source + "print('up')\nsignal.pause()\n")
    with launched(tmp_path, cluster, "script.py") as process:
        for _ in range(2):
            process.stdout.readline()
        process.send_signal(signal.SIGUSR1)
        output, _ = process.communicate()
    assert {f"node {rank}: told" for rank in range(2)} <= {*output.splitlines()}
    assert process.returncode == 0


@pytest.mark.thorough
def test_without_a_cluster_one_sentence_says_so(tmp_path):
    (tmp_path / "script.py").write_text("")
    line = [
        sys.executable,
        "-m",
        "accel_cli",
        "launch",
        "--launcher=ray",
        "--ray_address=127.0.0.1:1",
        "script.py",
    ]
    environ = {**os.environ, "HF_HOME": str(tmp_path)}
    done = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "accel launch: error: no Ray cluster found at '127.0.0.1:1'" in done.stderr
