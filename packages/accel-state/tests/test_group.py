"""How this process joins its process group, and how it leaves it."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from accel_state import libraries, process_group, runtime
from accel_state.device_kinds import BY_NAME
from accel_state.runtime import Runtime
from accel_state.topology import Topology

CUDA = torch.device("cuda", 1)
AS_TORCHRUN = Topology(rank=1, world_size=2, local_rank=1, local_world_size=2, launcher="torchrun")


def options_of(kind: str, device: torch.device, **asked: object) -> dict[str, object]:
    return runtime._group_options(Runtime(topology=AS_TORCHRUN, device=device, kind=BY_NAME[kind]), {}, asked)


def test_nccl_beside_gloo_has_the_limit_of_nccl_alone():
    assert options_of("cuda", CUDA)["timeout"] == timedelta(minutes=10)
    assert options_of("cuda", CUDA, timeout=timedelta(minutes=2))["timeout"] == timedelta(minutes=2)
    assert "timeout" not in options_of("cpu", torch.device("cpu"))


@pytest.mark.parametrize(("installed", "bound"), [("2.9.1", False), ("2.10.0", True), ("2.11.0+cu130", True)])
def test_a_group_with_two_backends_is_bound_to_its_device_where_its_subgroups_then_work(
    monkeypatch, installed, bound
):
    monkeypatch.setattr(libraries, "installed_version", lambda _: Version(installed))
    assert options_of("cuda", CUDA).get("device_id") == (CUDA if bound else None)
    assert options_of("cuda", CUDA, backend="nccl").get("device_id") == CUDA  # as asked for by the user


def test_a_group_of_one_process_is_bound_to_the_device_of_the_run(monkeypatch):
    made: list[dict[str, object]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: made.append(options))
    monkeypatch.setattr(process_group, "joined", lambda: None)
    process_group.join_single("nccl", CUDA)
    process_group.join_single(None, torch.device("cpu"))
    assert [options.get("device_id") for options in made] == [CUDA, None]


LEAVE = """\
import threading
import torch.distributed as dist
from accel_state import process_group as group_end, runtime

def refuse(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group_end.joined()
threading.Thread.start = refuse
runtime._shut_down()
assert not dist.is_initialized()
"""


def test_the_group_is_destroyed_where_no_thread_can_be_started_any_more():
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
