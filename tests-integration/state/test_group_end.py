"""Ranks leave their process group in order, and wait for nobody who does not answer."""

from __future__ import annotations

import sys

import pytest

from harness.programs import Ended, Program, run_programs

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="threads and processes are looked at in /proc"
)
BEGIN = """\
import atexit, os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

def gloo_threads():
    tasks = "/proc/self/task"
    return sum(open(f"{tasks}/{task}/comm").read() == "pt_gloo_runloop\\n" for task in os.listdir(tasks))

def is_gone(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True

def await_end_of_rank_0():
    pid = int(dist.distributed_c10d._get_default_store().get("pid of rank 0"))
    deadline = time.monotonic() + 120
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    print(is_gone(pid))

def last():
    print(dist.is_initialized(), gloo_threads())

from accel_state import runtime
atexit.unregister(runtime._shut_down)  # which the process has registered that forked this one
atexit.register(last)  # before, and so run after
atexit.register(runtime._shut_down)
"""
OURS = """\
from accel_state import PartialState
state = PartialState(cpu=True, timeout=timedelta(seconds=300))
rank = state.process_index
dist.barrier()
"""
# Rank 1 takes no part in a collective, and goes on only when rank 0 has ended, whose limit is 300 s.
DESERTED = (
    OURS
    + """\
if rank == 0:
    dist.distributed_c10d._get_default_store().set("pid of rank 0", str(os.getpid()))
else:
    await_end_of_rank_0()
    sys.stdout.flush()
    os._exit(0)
pending = dist.all_reduce(torch.ones(3), async_op=True)
"""
)
ACCELERATOR = """\
from accel_train import Accelerator
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
accelerator.gather(torch.ones(1))
"""
PROGRAMS = {
    "ends": OURS,
    "ends training": ACCELERATOR + "accelerator.end_training(); print(dist.is_initialized())",
    "fails": ACCELERATOR + "raise ValueError('for a test')",
    "group of the user": 'dist.init_process_group("gloo")\n' + OURS,
    "forks": OURS
    + """\
pid = os.fork()
if pid:
    print(os.waitpid(pid, 0)[1])
else:
    atexit.unregister(last)
""",
    "killed": OURS
    + """\
if rank == 1:
    os.kill(os.getpid(), 9)
pending = dist.all_reduce(torch.ones(3), async_op=True)
""",
    "deserted": DESERTED,
    "deserted, exception": DESERTED + "raise ValueError('for a test')",
    "deserted, exception, end_training": DESERTED
    + """\
try:
    raise ValueError('for a test')
finally:
    state.destroy_process_group()
""",
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ended]]:
    """How the ranks of each program ended."""
    programs = {name: Program(BEGIN + source) for name, source in PROGRAMS.items()}
    return run_programs(programs, tmp_path_factory.mktemp("programs"))


@pytest.mark.parametrize("name", ["ends", "ends training", "forks"])
def test_a_program_that_is_done_leaves_its_group_and_ends_with_0(ends, name) -> None:
    assert [(end.code, end.errors) for end in ends[name]] == [(0, "")] * 2
    before, after = {"ends": ("", 2), "ends training": ("False\n", 0), "forks": ("0\n", 2)}[name]
    # gloo's threads, which are asleep, are left to the end of the process unless `end_training` was called.
    assert {end.output for end in ends[name]} == {f"{before}False {after}\n"}


def test_a_program_that_fails_leaves_its_group(ends) -> None:
    for end in ends["fails"]:
        assert end.code == 1
        assert end.errors.endswith("ValueError: for a test\n")
        assert end.output.startswith("False ")


def test_the_group_of_a_user_is_theirs(ends) -> None:
    assert [(end.code, end.errors) for end in ends["group of the user"]] == [(0, "")] * 2
    assert {end.output.split()[0] for end in ends["group of the user"]} == {"True"}


def test_nobody_waits_for_a_rank_that_was_killed(ends) -> None:
    left, _ = ends["killed"]
    assert (left.code, left.output, left.errors) == (0, "False 2\n", "")


@pytest.mark.parametrize(
    ("name", "code"),
    [("deserted", 0), ("deserted, exception", 1), ("deserted, exception, end_training", 1)],
)
def test_nobody_waits_for_a_rank_that_does_not_answer(ends, name, code) -> None:
    left, other = ends[name]
    assert other.output == "True\n"  # rank 0 had ended
    assert left.code == code, left.errors
    assert left.output == "False 2\n"
