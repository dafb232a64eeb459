"""Each row of `platforms` under a planted system; functions that the system lacks are deleted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from accel_state import platforms
from accel_state.topology import free_port, is_port_in_use, reserved_port

ORPHAN = """
import os, subprocess, sys, time
from accel_state import platforms
platforms.SYSTEM = sys.argv[1]
if sys.argv[2:]:
    platforms.die_with_parent(int(sys.argv[2]))
    print(os.getpid(), flush=True)
    time.sleep(3600)
child = subprocess.Popen([sys.executable, __file__, sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE)
print(int(child.stdout.readline()), flush=True)
"""


@pytest.fixture
def planted(monkeypatch):
    """Plant a system, without the functions that it lacks."""

    def plant(system):
        monkeypatch.setattr(platforms, "SYSTEM", system)
        lacking = {"win32": ((os, "killpg"), (os, "preadv"), (signal, "sigwaitinfo"))}
        lacking["darwin"] = ((signal, "sigwaitinfo"),)
        for module, name in lacking.get(system, ()):
            monkeypatch.delattr(module, name)

    return plant


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_what_is_written_to_a_private_mapping_stays_in_memory(tmp_path, planted, system):
    planted(system)
    path = tmp_path / "weights"
    path.write_bytes(b"abcd")
    with path.open("rb") as file, platforms.map_private(file.fileno(), 4) as mapping:
        mapping[:2] = b"xy"
        assert bytes(mapping) == b"xycd"
    assert path.read_bytes() == b"abcd"


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_only_linux_has_the_c_library_of_its_calls(planted, system):
    planted(system)
    assert platforms.libc() is None
    platforms.trim_heap()
    platforms.adopt_orphans()
    assert not platforms.can_wait_for_signals()


@pytest.mark.parametrize(("system", "is_possible"), [("linux", True), ("darwin", True), ("win32", False)])
def test_mapped_files_are_replaced_except_on_windows(planted, system, is_possible):
    planted(system)
    assert platforms.can_replace_mapped() is is_possible
    assert platforms.is_windows() is not is_possible


def test_a_new_file_is_binary_and_never_another_one(tmp_path, monkeypatch):
    flags = []
    opened = os.open
    monkeypatch.setattr(os, "O_BINARY", 0o100000, raising=False)  # Linux ignores it
    monkeypatch.setattr(os, "open", lambda path, flag, mode: flags.append(flag) or opened(path, flag, mode))
    os.close(platforms.create_file(tmp_path / "new"))
    assert flags[0] & 0o100000
    with pytest.raises(FileExistsError):
        platforms.create_file(tmp_path / "new")


@pytest.mark.skipif(sys.platform == "win32", reason="reads the flags of a descriptor")
@pytest.mark.parametrize(("system", "mode"), [("linux", os.O_RDONLY), ("win32", os.O_RDWR)])
def test_windows_flushes_through_a_descriptor_that_writes(tmp_path, planted, monkeypatch, system, mode):
    import fcntl

    planted(system)
    modes = []
    monkeypatch.setattr(os, "fsync", lambda file: modes.append(fcntl.fcntl(file, fcntl.F_GETFL) & 3))
    (tmp_path / "a").write_bytes(b"kept")
    platforms.flush_file(tmp_path / "a")
    assert modes == [mode]
    assert (tmp_path / "a").read_bytes() == b"kept"


def test_only_linux_holds_a_reserved_port(planted):
    planted("darwin")
    assert not is_port_in_use(reserved_port())


def test_a_port_is_bound_as_windows_wants_it(monkeypatch):
    asked = []

    class Server:
        def setsockopt(self, level, option, value):
            asked.append(option)

        def bind(self, address):
            asked.append(address)

    monkeypatch.setattr("socket.SO_EXCLUSIVEADDRUSE", -5, raising=False)
    port = free_port()
    platforms.bind_alone(Server(), port)
    assert asked == [-5, ("", port)]


@pytest.mark.skipif(sys.platform == "win32", reason="no process of Windows dies with its parent")
@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_a_process_dies_with_its_parent(tmp_path, system):
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    done = subprocess.run([sys.executable, script, system], capture_output=True, text=True, check=True)
    number = int(done.stdout)
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(number).status() != psutil.STATUS_ZOMBIE:  # of a container without an init
            time.sleep(0.05)


def test_windows_does_not_probe_a_parent_with_a_signal(planted, monkeypatch):
    planted("win32")
    killed = []  # any signal ends a process there
    monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
    platforms.die_with_parent(os.getppid())
    assert killed == []


@pytest.mark.parametrize("system", [sys.platform, "win32"])
def test_a_signal_reaches_the_leader_of_a_group(planted, system):
    line = [sys.executable, "-c", "input()"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, start_new_session=True) as leader:
        planted(system)
        platforms.signal_group(leader.pid, signal.SIGTERM)
        assert leader.wait() == (signal.SIGTERM if sys.platform == "win32" else -signal.SIGTERM)


def test_no_other_module_asks_which_system_this_is():
    """Names of systems, and functions that some lack, stand in `platforms` alone."""
    words = ("sys.platform", "os.name", "O_BINARY", "SO_EXCLUSIVEADDRUSE", 'sigwaitinfo"')
    packages = Path(__file__).parents[2]
    assert [
        (path.name, word)
        for path in packages.glob("*/src/**/*.py")
        for word in words
        if word in path.read_text(encoding="utf-8") and path.name != "platforms.py"
    ] == []
