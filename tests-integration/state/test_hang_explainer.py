"""Ranks in a hanging collective report the source lines of all ranks; each is a process of its own."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from harness.programs import TORCHRUN, Ended, Program, run_programs

BEGIN = """\
import functools, os, sys, time, threading
from datetime import timedelta
import torch
from accel_state import PartialState, StalledCollectiveError
from accel_state.hang_monitor import collective_scope
state = PartialState(cpu=True)
collectives = state.runtime.collectives
gather = functools.partial(collectives.all_gather_into, torch.empty(state.num_processes), torch.ones(1))
backward = functools.partial(collectives.all_reduce, torch.ones(3))
gather(); PartialState(cpu=True, timeout=timedelta(seconds=4))  # once all have started
"""
PROGRAMS = {
    "elsewhere": (
        2,
        """
try:
    if state.process_index == 1:
        while not os.path.exists("given_up"):
            time.sleep(0.05)  # busy with something else
    gather()  # what the others do
except StalledCollectiveError as error:
    print(error)
    open("given_up", "w").close()
""",
    ),
    "disagreement": (
        3,
        """
try:
    if state.process_index == 2:
        gather()  # evaluates already
    else:
        backward()  # still trains
        backward()
except RuntimeError as error:
    print(error)
""",
    ),
    "death": (
        2,
        """
if state.process_index == 1:
    time.sleep(2)  # long enough to be seen here
    os._exit(7)
try:
    gather()  # hangs
except StalledCollectiveError as error:
    print(error)
""",
    ),
    "early end": (
        2,
        """
if state.process_index == 1:
    sys.exit(0)
try:
    gather()
except StalledCollectiveError as error:
    print(error)
""",
    ),
    "forward of DDP": (
        2,
        """
from accel_train import Accelerator
model = Accelerator().prepare(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
model(torch.randn(4, 2)).sum().backward()
try:
    if state.process_index == 1:
        while not os.path.exists("given_up"):
            time.sleep(0.05)
    model(torch.randn(4, 2))  # sends buffers
except StalledCollectiveError as error:
    print(error)
    open("given_up", "w").close()
""",
    ),
    "forward of FSDP1": (
        2,
        """
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_train import Accelerator
accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
model = accelerator.prepare(torch.nn.Linear(2, 2))
accelerator.backward(model(torch.randn(4, 2)).sum())
try:
    if state.process_index == 1:
        while not os.path.exists("given_up_by_1"):
            time.sleep(0.05)
    model(torch.randn(4, 2))  # gathers weights
except StalledCollectiveError as error:
    print(error)
    open("given_up_by_1", "w").close()
""",
    ),
    "user's error": (
        2,
        """
from accel_train import Accelerator
class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("HTTP request timed out while fetching tokenizer")
accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(2, 2))
if state.process_index == 0:
    try:
        accelerator.backward(Failing.apply(model(torch.randn(4, 2))).sum())
    except RuntimeError as error:
        print(type(error).__name__, error)
else:
    model(torch.randn(4, 2))
time.sleep(3)  # long enough to hear of a stall
gather()
print("gathered")
""",
    ),
    "destroyed": (2, "state.destroy_process_group()\nprint([t.name for t in threading.enumerate()])"),
    "left alone": (2, "print([t.name for t in threading.enumerate()])"),
    "one by one": (2, "time.sleep(state.process_index)"),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ended]]:
    """How the ranks of each program ended."""
    programs = {name: Program(BEGIN + source, world_size) for name, (world_size, source) in PROGRAMS.items()}
    programs["late connections"] = replace(
        programs["elsewhere"], variables={**TORCHRUN, "TORCH_GLOO_LAZY_INIT": "1"}
    )
    imports = ("accel_train.accelerator.build", "accel_plugins.ddp", "torch._dynamo")
    return run_programs(programs, tmp_path_factory.mktemp("programs"), imports)


@pytest.mark.parametrize("name", ["elsewhere", "late connections"])
def test_every_rank_hears_who_is_where(ends, name) -> None:
    for end in ends[name]:
        assert end.code == 0, end.errors
        assert "rank 0 is at program.py:16 `gather()  # what the others do` (collective 2)" in end.output
        assert "rank 1 is at program.py:15 `time.sleep(0.05)  # busy with something else`" in end.output
        assert "(in no collective, after 1)" in end.output
    assert re.search(r"Rank 0 heard from its backend: .*Timed out waiting 4000ms", ends[name][0].output)


def test_a_wait_is_warned_about_before_the_limit(ends) -> None:
    assert re.search(r"Waiting for \d+ s \(limit 4 s\): rank 0 is at", ends["elsewhere"][0].errors)


def test_ranks_in_different_collectives_are_distinguished(ends) -> None:
    for end in ends["disagreement"]:
        assert end.code == 0, end.errors
        assert "rank 2 is at program.py:14 `gather()  # evaluates already` (collective 2)" in end.output
        assert "ranks 0-1 are at program.py:16 `backward()  # still trains` (collective 2)" in end.output


def test_a_rank_that_died_is_named(ends) -> None:
    survivor, dead = ends["death"]
    assert dead.code == 7
    assert survivor.code == 0, survivor.errors
    assert "rank 1 is at program.py:13 `time.sleep(2)" in survivor.output
    assert "(in no collective, after 1, no longer answers)" in survivor.output
    assert "rank 0 is at program.py:16 `gather()  # hangs` (collective 2)" in survivor.output


def test_a_rank_that_ended_early_is_named(ends) -> None:
    assert [end.code for end in ends["early end"]] == [0, 0]
    assert "rank 1 is gone after 1 collectives" in ends["early end"][0].output


def test_a_stall_in_the_forward_pass_of_ddp_is_explained(ends) -> None:
    for end in ends["forward of DDP"]:
        assert end.code == 0, end.errors
        assert "`forward` did not complete: " in end.output
        assert "`model(torch.randn(4, 2))  # sends buffers` (collective " in end.output
        assert "`time.sleep(0.05)` (in no collective, after " in end.output


def test_a_stall_in_the_forward_pass_of_fsdp1_is_explained(ends) -> None:
    for end in ends["forward of FSDP1"]:
        assert end.code == 0, end.errors
        assert "`forward` did not complete: " in end.output
        assert "`time.sleep(0.05)` (in no collective, after " in end.output


def test_an_error_of_the_user_that_speaks_of_a_time_out_is_no_stall(ends) -> None:
    failed, other = ends["user's error"]
    assert failed.output == "RuntimeError HTTP request timed out while fetching tokenizer\ngathered\n"
    assert other.output == "gathered\n"
    assert (failed.code, other.code) == (0, 0), failed.errors + other.errors


@pytest.mark.parametrize("name", ["destroyed", "left alone", "one by one"])
def test_a_run_without_a_hang_ends_in_silence(ends, name) -> None:
    assert [(end.code, end.errors) for end in ends[name]] == [(0, "")] * 2


def test_leaving_the_group_ends_the_thread(ends) -> None:
    assert {end.output for end in ends["destroyed"]} == {"['MainThread']\n"}
    assert {end.output for end in ends["left alone"]} == {"['MainThread', 'accel-hang-monitor']\n"}
