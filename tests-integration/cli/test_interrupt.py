"""Ctrl-C on a real terminal, and what is left when `accel launch` ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pexpect
import psutil
import pytest

READY = "open('ready' + os.environ.get('RANK', '0'), 'w').write(str(os.getpid()))\n"
"""Tell that the process is where it waits, and which it is."""

LOOP = f"""\
import os, time
def train():
    {READY}    time.sleep(600)
train()
"""

STAND = f"""\
import os, time
def evaluate():
    {READY}    time.sleep(600)
def train():
    {READY}    time.sleep(600)
if os.environ["RANK"] == "0":
    train()
elif os.environ["RANK"] == "1":
    evaluate()
try:
    train()
except KeyboardInterrupt:
    time.sleep(0.5)
    open("saved", "w")
"""

STUCK = f"""\
import ctypes, os
def wait_in_c():
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    {READY}    lock(mutex)
wait_in_c()
"""


@pytest.fixture
def terminal(tmp_path):
    """Start a script on a terminal in its folder; press Ctrl-C when its processes are ready."""
    started = []

    def start(source, *line, processes):
        (tmp_path / "script.py").write_text(source)
        for old in tmp_path.glob("ready*"):
            old.unlink()
        child = pexpect.spawn(
            sys.executable, [*line, "script.py"],
            cwd=tmp_path, env={**os.environ, "HF_HOME": str(tmp_path)}, encoding="utf-8", timeout=None,
        )  # fmt: skip
        started.append(child)
        while not all(read_pid(tmp_path, rank) for rank in range(processes)):
            assert child.isalive(), child.read()
            time.sleep(0.05)
        while not all(waits(read_pid(tmp_path, rank)) for rank in range(processes)):
            assert child.isalive(), child.read()
        child.sendintr()
        return child

    yield start
    for child in started:
        child.close(force=True)


def read_pid(folder, rank):
    file = folder / f"ready{rank}"
    return int(file.read_text() or 0) if file.exists() else 0


def waits(pid):
    """Whether the main thread of a process sleeps, as it does after the line that tells its pid."""

    def look():
        return process.status(), process.num_ctx_switches()

    process = psutil.Process(pid)
    before = look()
    time.sleep(0.1)
    return before[0] == psutil.STATUS_SLEEPING and look() == before


def rest(child):
    """What the terminal shows until the end; then the exit code, or the signal as a negative one."""
    child.expect(pexpect.EOF)
    child.close()
    code = child.exitstatus if child.signalstatus is None else -child.signalstatus
    return child.before.replace("\r\n", "\n"), code


def is_gone(pid):
    """Whether a process ends, which one that was killed need not have done yet."""
    try:
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:  # for whose exit code nobody asks
            time.sleep(0.05)
    except psutil.NoSuchProcess:
        pass
    return True


LAUNCH = ["-m", "accel_cli", "launch", "--cpu"]


def test_one_process_is_interrupted_as_python_is(terminal):
    pythons = rest(terminal(LOOP, processes=1))
    ours = rest(terminal(LOOP, *LAUNCH, processes=1))
    assert ours == pythons
    assert ours[1] == -2


def test_each_of_several_processes_tells_where_it_stood(terminal, tmp_path):
    line = [*LAUNCH, "--num_processes", "3", "--main_process_port", "0"]
    shown, code = rest(terminal(STAND, *line, processes=3))
    _, *told = shown.split("accel launch: rank ")
    trace = (
        "{} was interrupted\nTraceback (most recent call last):\n"
        '  File "{path}", line {}, in <module>\n    {name}()\n'
        '  File "{path}", line {}, in {name}\n    time.sleep(600)\nKeyboardInterrupt\n'
    )
    path = tmp_path / "script.py"
    assert told == [
        trace.format(0, 9, 7, name="train", path=path),
        trace.format(1, 11, 4, name="evaluate", path=path),
    ]
    assert code == 130
    assert shown.count("Traceback") == 2
    assert (tmp_path / "saved").exists()
    assert all(is_gone(read_pid(tmp_path, rank)) for rank in range(3))


def test_a_second_interrupt_ends_processes_that_do_not_hear_the_first(terminal, tmp_path):
    child = terminal(STUCK, *LAUNCH, "--num_processes", "2", "--main_process_port", "0", processes=2)
    child.expect("Press Ctrl-C to end them immediately")
    time.sleep(1)
    child.sendintr()
    shown, code = rest(child)
    assert shown.endswith(
        "accel launch: ranks 0-1 were interrupted, and did not end\n"
        "Stack (most recent call last):\n"
        f'  File "{tmp_path}/script.py", line 8 in <module>\n'
        f'  File "{tmp_path}/script.py", line 7 in wait_in_c\n'
    )
    assert code == 130
    assert all(is_gone(read_pid(tmp_path, rank)) for rank in range(2))


FAILS = f"""\
import multiprocessing, os, subprocess, sys, time
rank = os.environ["RANK"]
child = subprocess.Popen(["sleep", "600"])
fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
fork.start()
alone = subprocess.Popen(["sleep", "600"], start_new_session=True)
open("left" + rank, "w").write(f"{{child.pid}} {{fork.pid}} {{alone.pid}}")
if rank == "0":
    {READY}    while True:
        time.sleep(600)
while not os.path.exists("ready0"):
    time.sleep(0.05)
if sys.argv[1:]:
    os._exit(5)
raise ValueError("boom")
"""


@pytest.mark.parametrize(("words", "code"), [([], 1), (["quietly"], 5)])
def test_a_failure_beside_a_process_that_hangs_leaves_nothing_behind(tmp_path, words, code):
    (tmp_path / "fails.py").write_text(FAILS)
    environ = {**os.environ, "HF_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *LAUNCH, "--num_processes=2", "--main_process_port=0", "fails.py", *words],
        cwd=tmp_path, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code
    told = "accel launch: rank 0 was ended by SIGTERM\naccel launch: rank 1 "
    if words:
        assert done.stderr.endswith(told + "ended with exit code 5\n")
    else:
        assert done.stderr.endswith(
            told + "failed with ValueError: boom\nTraceback (most recent call last):\n"
            f'  File "{tmp_path}/fails.py", line 16, in <module>\n    raise ValueError("boom")\n'
            "ValueError: boom\n"
        )
    assert done.stderr.count("Traceback") == bool(not words)
    left = [int(pid) for rank in range(2) for pid in (tmp_path / f"left{rank}").read_text().split()]
    assert all(map(is_gone, [*left, read_pid(tmp_path, 0)]))
    assert {path.name for path in tmp_path.iterdir()} == {"fails.py", "ready0", "left0", "left1"}


HANDLES = f"""\
import os, signal, sys
class Stop(Exception):
    pass
def stop(number, frame):
    raise Stop
signal.signal(signal.SIGTERM, stop)
try:
    {READY}    signal.pause()
except Stop:
    if sys.argv[1:]:
        sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("words", "code"), [([], 0), (["7"], 7)])
def test_the_exit_code_after_a_signal_that_the_script_handles_is_the_scripts(tmp_path, words, code):
    (tmp_path / "handles.py").write_text(HANDLES)
    with subprocess.Popen(
        [sys.executable, *LAUNCH, "--num_processes=2", "--main_process_port=0", "handles.py", *words],
        cwd=tmp_path, env={**os.environ, "HF_HOME": str(tmp_path)},
    ) as launcher:  # fmt: skip
        while not all(read_pid(tmp_path, rank) for rank in range(2)):
            assert launcher.poll() is None
            time.sleep(0.05)
        launcher.terminate()
        assert launcher.wait() == code
