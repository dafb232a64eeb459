"""Two hosts, as network namespaces with a cable between them: `accel launch --num_machines 2`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from contextlib import ExitStack

import pytest

PORT = 29517
SCRIPT = """\
import torch
from accel import Accelerator

accelerator = Accelerator()
weight = torch.zeros(1, requires_grad=True)
accelerator.backward(weight.sum() * (accelerator.process_index + 1))
mean = accelerator.reduce(weight.grad, "mean")  # as DDP does, for which torch imports its compiler for 4 s
places = accelerator.gather(torch.tensor([[accelerator.process_index, accelerator.local_process_index]]))
if accelerator.is_main_process:
    print("places", places.tolist(), "gradient", mean.item())
"""


def ip(*line):
    subprocess.run(["ip", *line], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """The names of two namespaces, 10.99.0.1 and 10.99.0.2; skipped where they cannot be made."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and `ip`")
    tag = uuid.uuid4().hex[:6]
    names = [f"accel-{tag}-{number}" for number in range(2)]
    with ExitStack() as undo:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this machine makes no network namespaces: {error.stderr}")
            undo.callback(ip, "netns", "delete", name)
        cable = [f"v{tag}{number}" for number in range(2)]
        ip("link", "add", cable[0], "netns", names[0], "type", "veth", "peer", cable[1], "netns", names[1])
        for number, (name, end) in enumerate(zip(names, cable, strict=True)):
            ip("-n", name, "address", "add", f"10.99.0.{number + 1}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield list(zip(names, cable, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "processes", "is_ranked"),
    [
        ("c10d", 2, False),
        pytest.param("c10d", 4, True, marks=pytest.mark.thorough),
        pytest.param("static", 2, True, marks=pytest.mark.thorough),
    ],
)
def test_two_hosts_train_together(hosts, tmp_path, backend, processes, is_ranked):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    started = []
    for rank, (name, end) in enumerate(hosts):
        line = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_machines", "2"]
        line += ["--num_processes", str(processes), "--main_process_ip", "10.99.0.1"]
        line += ["--machine_rank", str(rank)] if is_ranked else []
        line += ["--main_process_port", str(PORT), "--rdzv_backend", backend, str(script)]
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *line],
                env={**os.environ, "GLOO_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    heard = [process.communicate() for process in started]
    codes = [process.returncode for process in started]
    assert codes == [0, 0], "\n".join(error[-3000:] for _, error in heard)
    each = processes // 2
    places = [[rank, rank % each] for rank in range(processes)]
    mean = sum(range(1, processes + 1)) / processes  # of the gradients
    outputs = [output for output, _ in heard]
    if is_ranked:
        assert outputs[1] == ""
    assert "".join(outputs).split("places ")[1].strip() == f"{places} gradient {mean}"
