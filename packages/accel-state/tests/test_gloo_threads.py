from __future__ import annotations

import os
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_does_not_destroy_groups_that_its_parent_has_left_as_garbage():
    """It would wait for threads that were not copied; data workers and ranks hung so."""
    script = (
        "import gc, os, torch.distributed as dist\n"
        "import accel_state.runtime\n"
        "gc.disable()\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "cycle = {'group': dist.group.WORLD}\n"
        "cycle['itself'] = cycle\n"
        "del cycle\n"
        "dist.destroy_process_group()\n"
        "if pid := os.fork():\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)\n"
        "else:\n"
        "    os._exit(3 if gc.get_freeze_count() and gc.collect() == 0 else 4)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1:] == ["3"]  # older versions of gloo say there that they are connected
