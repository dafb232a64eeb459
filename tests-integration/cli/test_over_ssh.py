"""Machines that are reached over ssh, for real: addresses of this one behind a server of the tests' own."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
MACHINES = ("127.0.0.1", "127.0.0.2")

pytestmark = [
    pytest.mark.skipif(
        SSHD is None or shutil.which("ssh") is None, reason="there is no sshd on this machine"
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has more than one loopback address"),
]

SERVER = """\
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
"""

CLIENT = """\
Host *
Port {port}
User {user}
IdentityFile {folder}/user
IdentitiesOnly yes
UserKnownHostsFile /dev/null
StrictHostKeyChecking no
LogLevel ERROR
BatchMode yes
"""


@pytest.fixture(scope="module")
def reached(tmp_path_factory):
    """The environment of a user who reaches both machines with `ssh`."""
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    with socket.socket() as free:
        free.bind((MACHINES[0], 0))
        port = free.getsockname()[1]
    (folder / "server").write_text(SERVER.format(port=port, folder=folder))
    (folder / "client").write_text(CLIENT.format(port=port, folder=folder, user=getpass.getuser()))
    # The client reads its configuration from a user's home, and nowhere else unless told so.
    (folder / "bin").mkdir()
    ssh = folder / "bin/ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/client "$@"\n')
    ssh.chmod(0o755)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # of which the server makes sure
    environ = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HF_HOME": str(folder)}
    with subprocess.Popen([str(SSHD), "-D", "-e", "-f", folder / "server"]) as server:
        try:
            while subprocess.run([ssh, MACHINES[1], "true"], check=False).returncode:
                assert server.poll() is None
                time.sleep(0.1)
            yield environ
        finally:
            server.terminate()


TRAIN = """\
import json, os, pathlib, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator

folder, *words = sys.argv[1:]
accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
loader = DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), loader)
for inputs, targets in loader:
    accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
if "fail" in words and accelerator.process_index == 1:
    raise ValueError("boom")
facts = {
    "machine": os.environ["SSH_CONNECTION"].split()[2],
    "place": [accelerator.process_index, accelerator.local_process_index, accelerator.num_processes],
    "kind": accelerator.distributed_type.value,
    "stage": accelerator.state.deepspeed_plugin.zero_stage,
    "words": words,
    "weights": torch.cat([weight.detach().flatten() for weight in model.parameters()]).tolist(),
}
pathlib.Path(folder, f"{accelerator.process_index}.json").write_text(json.dumps(facts))
"""


def trained():
    """The weights after the same training in one process."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    inputs, targets = torch.randn(16, 4), torch.randn(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for some, wanted in zip(inputs.split(8), targets.split(8), strict=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(some), wanted).backward()
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()]).tolist()


WORDS = ["two words", "it's", '{"rate": [1, 2]}', "$HOME; `pwd` 100%n", ""]


@pytest.fixture
def job(reached, tmp_path):
    """Run a command line; give how it ended and what each process told."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts").write_text("".join(f"{machine} slots=1\n" for machine in MACHINES))

    def run(*line, **variables):
        done = subprocess.run(
            [sys.executable, "-m", "accel_cli", "launch", *line], cwd=tmp_path, env={**reached, **variables},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done, [json.loads(path.read_text()) for path in sorted(tmp_path.glob("[0-9].json"))]

    return run


@pytest.fixture
def config(tmp_path):
    """A config file for DeepSpeed on both machines, with a file of DeepSpeed's own."""

    def write(launcher):
        (tmp_path / "ds $1.json").write_text(
            json.dumps({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"})
        )
        content = {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "deepspeed_multinode_launcher": launcher,
                "deepspeed_hostfile": "hosts",
                "deepspeed_config_file": "ds $1.json",
            },
            "main_process_ip": MACHINES[0],
            "main_process_port": 0,
            "use_cpu": True,
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
        return "config.yaml"

    return write


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdsh") is None, reason="there is no pdsh on this machine")
def test_deepspeed_trains_on_the_machines_of_a_hostfile(job, config, tmp_path):
    line = ["--config_file", config("pdsh"), "train.py", str(tmp_path), *WORDS]
    done, facts = job(*line)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [fact.pop("weights") for fact in facts] == [pytest.approx(trained(), abs=1e-5)] * 2
    same = {"kind": "DEEPSPEED", "stage": 2, "words": WORDS}
    assert facts == [{"machine": MACHINES[rank], "place": [rank, 0, 2], **same} for rank in range(2)]


TELL = """\
import json, os, pathlib, sys
from accel_state.environ import read
from accel_state.topology import detect
folder, *words = sys.argv[1:]
place = detect(read())
machine = os.environ.get("SSH_CONNECTION", "none - here -").split()[2]
facts = [machine, place.rank, place.local_rank, os.environ["ACCELERATE_MIXED_PRECISION"], words]
pathlib.Path(folder, f"{place.rank}.json").write_text(json.dumps(facts))
"""


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun on this machine")
def test_mpirun_starts_the_processes_of_both_machines(job, tmp_path):
    (tmp_path / "tell.py").write_text(TELL)
    line = ["--cpu", "--mixed_precision", "bf16", "--mpirun_hostfile", "hosts", "--num_machines", "2"]
    line += ["--num_processes", "2", "--main_process_port", "0", "tell.py", str(tmp_path), *WORDS]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done, facts = job(*line, **root)
    assert done.returncode == 0, done.stderr[-3000:]
    assert facts == [["here", 0, 0, "bf16", WORDS], [MACHINES[1], 1, 0, "bf16", WORDS]]
