from __future__ import annotations

import subprocess
import sys

import pytest

STORM = """\
import os, sys, torch
import torch.distributed as dist
import accel_state.runtime

def gather():
    for _ in range(2):
        results = [torch.empty(1)]
        dist.all_gather(results, torch.ones(1))

for _ in range(6):
    pid = os.fork()
    if not pid:
        break
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit(f"ended with {os.waitstatus_to_exitcode(status)}")
if not pid:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != os.getpid():
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
    gather()
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="threads are slowed down as Linux does it")
def test_a_process_ends_with_0_although_gloo_is_slow_to_drop_the_last_collective():
    done = subprocess.run([sys.executable, "-c", STORM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
