"""Launchers: what they run, what they refuse, and how they report a failure."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from accel_state import device_kinds, environ
from accel_state.device_kinds import BY_NAME, KINDS
from accel_state.environ import read
from accel_state.errors import SettingsError
from accel_state.logging import tqdm
from accel_state.topology import detect, free_port
from accel_train import Accelerator, launching
from accel_train.launching import (
    PrepareForLaunch,
    WorkerFailedError,
    debug_launcher,
    launch,
    notebook_launcher,
)

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")


def sum_of_ranks(plus):
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor(float(accelerator.process_index + plus)))
    fork = accelerator.state.fork_launched
    return accelerator.num_processes, total.item(), accelerator.mixed_precision, fork


def test_debug_launcher_runs_processes_that_find_each_other():
    Accelerator(cpu=True)  # a process alone, which its forks forget
    torch.ones(64, 64) @ torch.ones(64, 64)
    before = environ.read()
    assert debug_launcher(sum_of_ranks, (1,), num_processes=2) == dict.fromkeys(range(2), (2, 3, "no", True))
    assert environ.read() == before


def test_processes_compute_after_the_notebook_has_computed_with_several_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        images = torch.ones(512, 4096) @ torch.ones(4096, 64)
        sums = debug_launcher(lambda: (images @ torch.ones(64, 512)).sum().item(), num_processes=2)
    finally:
        torch.set_num_threads(threads)
    assert sums == dict.fromkeys(range(2), 512 * 4096 * 64 * 512.0)


def test_notebook_launcher_does_so_with_a_precision_and_shows_lines_with_a_prefix(capfd):
    def work(plus):
        print("here")
        return sum_of_ranks(plus)

    results = notebook_launcher(
        work, (0,), num_processes=2, mixed_precision="bf16", use_port=0, log_line_prefix_template="<${rank}> "
    )
    assert results == dict.fromkeys(range(2), (2, 1, "bf16", True))
    lines = capfd.readouterr().out.splitlines()  # gloo of torch 2.9 prints some, too
    assert sorted(line for line in lines if line.startswith("<")) == ["<0> here", "<1> here"]


def test_bars_of_launched_processes_are_text_where_those_of_a_notebook_are_widgets(monkeypatch, capfd):
    monkeypatch.setattr("tqdm.auto.tqdm", Widget)
    assert isinstance(tqdm(range(3)), Widget)

    def count():
        return sum(tqdm(range(3)))

    assert notebook_launcher(count, num_processes=2, use_port=0) == {0: 3, 1: 3}
    assert "3/3" in capfd.readouterr().err


class Widget:
    def __init__(self, iterable):
        self.iterable = iterable


def test_nccl_gets_its_variables_for_cards_that_cannot_reach_each_others_memory(monkeypatch):
    answers = {"name": ["NVIDIA GeForce RTX 4090"] * 2, "driver_version": ["545.23.08"]}
    monkeypatch.setenv("ACCELERATE_USE_CPU", "0")
    monkeypatch.setattr(device_kinds, "nvidia_smi", answers.__getitem__)
    monkeypatch.setattr(launching, "available_kind", lambda: BY_NAME["cuda"])
    monkeypatch.setattr(launching, "_refuse_initialised_devices", lambda: None)
    names = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
    seen = notebook_launcher(lambda: [os.environ.get(name) for name in names], (), 2, use_port=0)
    assert seen == {0: ["1", "1"], 1: ["1", "1"]}
    assert not {*names} & {*os.environ}


def test_one_process_runs_here_in_the_precision():
    seen = notebook_launcher(lambda: (os.getpid(), Accelerator().mixed_precision), (), 1, "bf16")
    assert seen == {0: (os.getpid(), "bf16")}


def test_processes_are_started_again_as_often_as_asked(tmp_path):
    def fail_twice():
        tries = len([*tmp_path.iterdir()])
        (tmp_path / str(tries)).touch()
        if tries < 2:
            raise ZeroDivisionError
        return tries

    assert notebook_launcher(fail_twice, (), 1, max_restarts=2, use_port=0) == {0: 2}


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_failure_names_the_rank_and_has_its_traceback(backend):
    def fail():
        accelerator = Accelerator(cpu=True)
        if accelerator.is_last_process:
            raise KeyError("no such column")
        accelerator.wait_for_everyone()

    with pytest.raises(WorkerFailedError) as caught:
        notebook_launcher(fail, (), 2, use_port=0, rdzv_backend=backend, rdzv_id="job")
    assert caught.value.ranks[0] == 1
    assert "Rank 1 failed with KeyError: 'no such column'" in str(caught.value)
    assert 'raise KeyError("no such column")' in str(caught.value)


def test_a_killed_process_is_named_too():
    with pytest.raises(WorkerFailedError, match="Rank 0 was ended by SIGKILL"):
        debug_launcher(lambda: os.kill(os.getpid(), signal.SIGKILL), (), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 0}, "num_processes=0"),
        ({"num_nodes": 2, "node_rank": 2}, "node_rank=2"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"mixed_precision": "half"}, "mixed_precision='half'"),
        ({"use_port": "http"}, "use_port='http'"),
        ({"use_port": 0, "num_nodes": 2}, "use_port=0"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        notebook_launcher(print, (), **{"num_processes": 1, **options})


def test_a_script_is_no_function():
    with pytest.raises(SettingsError, match=r"'train.py' is not a function. `accel.launch` runs scripts"):
        debug_launcher("train.py")


def test_a_port_that_is_taken_is_named():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SettingsError, match=f"use_port={port}"):
            notebook_launcher(print, (), 2, use_port=port)


def test_launches_at_the_same_time_do_not_meet_at_one_port():
    starts = {
        "debug": lambda: debug_launcher(sum_of_ranks, (1,), num_processes=2),
        "notebook": lambda: notebook_launcher(sum_of_ranks, (0,), 2),
    }
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    processes = [
        fork.Process(target=lambda name=name, function=function: queue.put((name, function())))
        for name, function in starts.items()
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)
    results = dict(queue.get() for _ in processes)
    assert results == {
        "debug": dict.fromkeys((0, 1), (2, 3, "no", True)),
        "notebook": dict.fromkeys((0, 1), (2, 1, "no", True)),
    }


def test_two_machines_meet():
    port = free_port()
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()

    def machine(rank):
        queue.put(notebook_launcher(sum_of_ranks, (0,), 1, use_port=port, num_nodes=2, node_rank=rank))

    machines = [fork.Process(target=machine, args=(rank,)) for rank in range(2)]
    for process in machines:
        process.start()
    for process in machines:
        process.join()
    assert [process.exitcode for process in machines] == [0, 0]
    results = queue.get() | queue.get()
    assert results == dict.fromkeys((0, 1), (2, 1, "no", True))


def test_of_several_that_fail_the_first_is_reported_first():
    """Torch looks at them once a second here, and knows the time of an error in whole seconds."""

    def fail():
        rank = int(environ.read()["RANK"])
        own = Path(environ.read()["TORCHELASTIC_ERROR_FILE"])
        previous = own.parents[1] / str(rank + 1) / own.name
        while rank < 2 and not (
            previous.is_file() and previous.stat().st_size
        ):  # its time is that of the text
            time.sleep(0.02)
        time.sleep(0.02)
        raise KeyError(f"of rank {rank}")

    with pytest.raises(WorkerFailedError, match="Rank 2 failed with KeyError: 'of rank 2'") as caught:
        notebook_launcher(fail, (), 3, use_port=0, monitor_interval=1)
    assert caught.value.ranks == (2, 1, 0)


def test_a_process_that_is_one_of_several_launches_none(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match="one of several"):
        debug_launcher(print)


def test_a_device_that_was_initialised_before_forking_is_said(monkeypatch):
    """#940, #3524, #3833, #3925: the child would fail in the driver, far from the cause."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "0")
    gpu = next(kind for kind in KINDS if kind.type == "cuda")
    monkeypatch.setattr(launching, "available_kind", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(SettingsError, match=r"has initialised .*Restart the notebook"):
        notebook_launcher(print, (), 2)


def test_a_driver_that_another_library_holds_is_found(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "0")
    monkeypatch.setattr(launching, "available_kind", lambda: BY_NAME["cuda"])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(os.path, "realpath", lambda link: "/dev/nvidia-uvm")
    with pytest.raises(SettingsError, match="has initialised CUDA"):
        notebook_launcher(print, (), 2)


def test_a_function_prepared_for_launch_knows_its_place(monkeypatch):
    def place():
        variables = environ.read()
        return [variables.get(name) for name in ("LOCAL_RANK", "RANK", "FORK_LAUNCHED")]

    with environ.clear_environment():
        environ.publish({"WORLD_SIZE": "8", "NPROC": "4", "NODE_RANK": "1"})
        assert PrepareForLaunch(place, "MULTI_CPU")(2) == ["2", "6", "1"]
    with environ.clear_environment():
        assert PrepareForLaunch(place)(2) == [None, None, "1"]
        with pytest.raises(SettingsError, match="ACCELERATE_DEBUG_RDV_FILE and WORLD_SIZE"):
            PrepareForLaunch(place, debug=True)(0)


def test_torch_starts_functions_that_are_prepared(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEBUG_RDV_FILE", str(tmp_path / "meeting"))
    monkeypatch.setenv("WORLD_SIZE", "2")

    def work():
        assert sum_of_ranks(1) == (2, 3, "no", True)

    torch.multiprocessing.start_processes(
        PrepareForLaunch(work, "MULTI_CPU", debug=True), nprocs=2, start_method="fork"
    )


def test_a_rank_that_fails_is_reported_with_its_traceback():
    def fail():
        if detect(read()).rank == 1:
            raise ValueError("boom")

    with pytest.raises(WorkerFailedError, match=r"(?s)Rank 1 failed with ValueError: boom\nTraceback.*boom"):
        debug_launcher(fail)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: lambda: 1, r"(?i)rank \d failed with .*pickle.*lambda"),
        (lambda: sys.exit(3), r"Rank \d ended with exit code 3"),
    ],
)
def test_how_a_process_ended_without_an_error_of_the_function_is_reported(work, message):
    with pytest.raises(WorkerFailedError, match=message):
        debug_launcher(work)


def test_nothing_of_torchs_launcher_stays(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for launcher in (debug_launcher, partial(notebook_launcher, num_processes=2, use_port=0)):
        with pytest.raises(WorkerFailedError):
            launcher(lambda: 1 / 0)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert [*tmp_path.glob("torchelastic*")] == []
    assert "Traceback" not in capfd.readouterr().err


def test_an_interrupt_lets_the_processes_clean_up_and_arrives_as_one(tmp_path):
    def work(clean):
        rank = detect(read()).rank
        try:
            (tmp_path / f"{rank}").touch()
            while rank or len([*tmp_path.iterdir()]) < 2:
                time.sleep(0.01)
            time.sleep(0.5)  # until the launcher has noted that both have started
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(600)
        except KeyboardInterrupt:
            time.sleep(0.2)
            (tmp_path / f"{clean}{rank}").touch()

    with pytest.raises(KeyboardInterrupt):
        debug_launcher(work, ("saved",))
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "saved0", "saved1"}


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (lambda: debug_launcher(5), "5 is not a function"),
        (lambda: debug_launcher(print, 5), "args=5: expected the arguments of the function"),
        (lambda: debug_launcher(print, "ab"), "args='ab': expected"),
        (lambda: launch(print), r"runs scripts: pass a function to notebook_launcher"),
        (lambda: launch("train.py", config="run.yaml"), r"launch\(config='run.yaml'\): .*yaml.safe_load"),
        (lambda: launch("train.py", config=2), r"launch\(config=2\): expected settings"),
        (lambda: launch("train.py", config={"num_procs": 2}), "num_procs"),
    ],
)
def test_what_cannot_be_launched_is_said_before_anything_starts(start, message):
    with pytest.raises(SettingsError, match=message):
        start()
