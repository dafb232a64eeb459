"""`accel launch` as users run it: real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from accel_cli.launch.hosts import VISIBLE_DEVICES
from accel_state.device_kinds import KINDS
from accel_state.settings import (
    LaunchSettings,
    PrecisionSettings,
    ProcessSettings,
    SageMakerSettings,
    Settings,
)
from accel_train.launching import WorkerFailedError, launch

TELL = """\
import json, os, sys
facts = {
    "argv": sys.argv, "path": sys.path, "name": __name__, "package": __package__, "file": __file__,
    "executable": sys.executable, "flags": str(sys.flags),
    "stdin": sys.stdin.read(), "environ": dict(os.environ),
}
place = os.environ.get("TELL_TO")
if place:
    open(os.path.join(place, os.environ["RANK"] + ".json"), "w").write(json.dumps(facts))
else:
    print(json.dumps(facts))
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a script and a module that tell how they were run, and no config file in reach."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/tell.py").write_text(TELL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


def accel(*line, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "accel_cli", "launch", *line],
        capture_output=True, text=True, check=False, input="typed", **kwargs,
    )  # fmt: skip


def python(*line):
    return subprocess.run([sys.executable, *line], capture_output=True, text=True, check=True, input="typed")


@pytest.mark.parametrize("line", [["code/tell.py", "--lr", "1"], ["-m", "tell", "--cpu", "x"]])
def test_one_process_runs_exactly_as_python_would(here, line):
    ours, pythons = json.loads(accel(*line).stdout), json.loads(python(*line).stdout)
    assert ours == pythons
    assert ours["name"] == "__main__"


def test_one_process_gets_the_settings_in_its_environment_and_nothing_else(here):
    ours = json.loads(accel("--cpu", "--mixed_precision", "bf16", "code/tell.py").stdout)
    pythons = json.loads(python("code/tell.py").stdout)
    added = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert ours["environ"] == pythons["environ"] | added


def test_the_installed_command_is_the_same(here):
    command = Path(sys.executable).parent / "accel"
    result = subprocess.run(
        [command, "launch", "code/tell.py", "x"], capture_output=True, text=True, check=True, input=""
    )
    assert json.loads(result.stdout)["argv"] == ["code/tell.py", "x"]


def test_a_program_need_not_be_python(here):
    program = here / "program"
    program.write_text('#!/bin/sh\necho "$ACCELERATE_MIXED_PRECISION $@"\n')
    program.chmod(0o755)
    assert (
        accel("--no_python", "--mixed_precision", "fp16", str(program), "a b", "c").stdout == "fp16 a b c\n"
    )


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("1 / 0", 1),
        (f"import os; os.kill(os.getpid(), {int(signal.SIGTERM)})", -signal.SIGTERM),
    ],
)
def test_the_exit_code_is_the_scripts(here, body, code):
    (here / "ends.py").write_text(body)
    assert accel("ends.py").returncode == code


def test_a_script_that_is_not_there_is_a_sentence(here):
    result = accel("nowhere.py")
    assert result.returncode == 2
    assert result.stderr == "accel launch: error: the script 'nowhere.py' does not exist.\n"


def test_scripts_are_launched_from_python_by_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom accel import Accelerator\n"
        "accelerator = Accelerator()\n"
        "facts = accelerator.num_processes, accelerator.mixed_precision, sys.argv[2:]\n"
        "Path(sys.argv[1], str(accelerator.process_index)).write_text(repr(facts))\n"
    )
    config = Settings(
        process=ProcessSettings(use_cpu=True),
        precision=PrecisionSettings(mixed_precision="bf16"),
        launch=LaunchSettings(num_processes=2),
    )
    launch(script, (tmp_path, "--lr", 1), config=config)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["(2, 'bf16', ['--lr', '1'])"] * 2
    with pytest.raises(WorkerFailedError, match=r"nowhere.py` ended with exit code 2"):
        launch("nowhere.py", config=config)


def test_settings_without_a_config_key_reach_a_launched_program(tmp_path, capfd):
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho $ACCELERATE_LOG_LEVEL $AWS_ACCESS_KEY_ID > "$1"\nexit 3\n')
    program.chmod(0o700)
    config = Settings(
        process=ProcessSettings(use_cpu=True, log_level="debug"),
        launch=LaunchSettings(num_processes=1, no_python=True, quiet=True),
        sagemaker=SageMakerSettings(aws_access_key_id="secret"),
    )
    with pytest.raises(WorkerFailedError, match="exit code 3"):
        launch(program, (tmp_path / "seen",), config=config)
    assert (tmp_path / "seen").read_text().lower() == "debug secret\n"
    assert "ended with exit code" not in capfd.readouterr().err, "quiet"


def test_two_processes_on_the_cpu_know_their_ranks_and_settings(here, monkeypatch):
    monkeypatch.setenv("TELL_TO", str(here))
    line = ["--cpu", "--num_processes", "2", "--main_process_port", "0", "--mixed_precision", "bf16"]
    result = accel(*line, "code/tell.py", "--num_processes", "9")
    assert result.returncode == 0, result.stderr
    facts = [json.loads((here / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, fact in enumerate(facts):
        assert fact["argv"] == ["code/tell.py", "--num_processes", "9"]
        assert fact["path"][0] == str(here / "code")
        wanted = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
        }
        assert {name: fact["environ"].get(name) for name in wanted} == wanted
    assert facts[0]["environ"]["MASTER_PORT"] == facts[1]["environ"]["MASTER_PORT"] != "0"


@pytest.mark.parametrize("quiet", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_of_several_processes_the_first_that_fails_decides_the_exit_code(here, quiet):
    (here / "fails.py").write_text(
        "import os, time; os.environ['RANK'] == '1' and os._exit(5); time.sleep(60)"
    )
    line = ["--cpu", "--num-processes=2", "--main-process-port=0", *["--quiet"][: int(quiet)]]
    result = accel(*line, "fails.py")
    assert result.returncode == 5
    assert result.stderr.endswith("accel launch: rank 1 ended with exit code 5\n") is not quiet
    assert "Traceback" not in result.stderr


def test_the_traceback_of_the_rank_that_failed_first_comes_last_and_once(here):
    (here / "fails.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('boom')\ntime.sleep(60)"
    )
    result = accel("--cpu", "--num-processes=2", "--main-process-port=0", "fails.py")
    assert result.returncode == 1
    assert result.stderr.endswith(
        "accel launch: rank 0 was ended by SIGTERM\n"
        "accel launch: rank 1 failed with ValueError: boom\n"
        "Traceback (most recent call last):\n"
        f'  File "{here}/fails.py", line 3, in <module>\n'
        "    raise ValueError('boom')\n"
        "ValueError: boom\n"
    )
    assert result.stderr.count("Traceback") == 1


def test_a_signal_reaches_the_processes_whose_handler_decides_the_exit_code(here):
    (here / "waits.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "def leave(number, frame):\n    pathlib.Path('left' + os.environ['RANK']).touch()\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "pathlib.Path('here' + os.environ['RANK']).touch()\ntime.sleep(600)"
    )
    line = [
        sys.executable,
        "-m",
        "accel_cli",
        "launch",
        "--cpu",
        "--num_processes=2",
        "--main_process_port=0",
    ]
    with subprocess.Popen([*line, "waits.py"], stderr=subprocess.PIPE) as running:
        while not all((here / f"here{rank}").exists() for rank in range(2)):
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        running.communicate()
    assert running.returncode == 0, "as with one process"
    assert all((here / f"left{rank}").exists() for rank in range(2))


@pytest.mark.thorough
def test_two_launches_at_the_same_time_do_not_meet_at_one_port(here):
    (here / "starts.py").write_text("import os; open('port' + os.environ['MASTER_PORT'], 'w')")
    line = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes=2", "starts.py"]
    running = [subprocess.Popen(line, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    assert len(list(here.glob("port*"))) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process gets no signal at its parent's end")
@pytest.mark.parametrize("is_program", [False, True])
def test_the_processes_of_a_launcher_that_was_killed_end(here, is_program):
    (here / "waits.py").write_text(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open('pid' + os.environ['RANK'], 'w').write(str(os.getpid()) + ' ')\ntime.sleep(600)"
    )
    program = here / "program"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} waits.py")
    program.chmod(0o755)
    what = ["--no_python", str(program)] if is_program else ["waits.py"]
    line = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes=2", *what]
    with subprocess.Popen(line) as running:
        files = [here / f"pid{rank}" for rank in range(2)]
        while not all(file.exists() and file.read_text().endswith(" ") for file in files):
            assert running.poll() is None
            time.sleep(0.05)
        running.kill()
    assert all(is_gone(int(file.read_text())) for file in files)


def is_gone(pid):
    """Whether a process ends; a zombie may be left of it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for _ in range(600):
            if process.status() == psutil.STATUS_ZOMBIE:
                break
            time.sleep(0.05)
        else:
            return False
    return True


def test_a_busy_port_is_reported_before_anything_starts(here):
    (here / "starts.py").write_text(f"open({str(here / 'started')!r}, 'w')")
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = str(server.getsockname()[1])
        result = accel("--cpu", "--num_processes", "2", "--main_process_port", port, "starts.py")
    assert result.returncode == 2
    assert port in result.stderr
    assert not (here / "started").exists()


def test_the_command_knows_the_same_device_families_as_the_library():
    assert {
        str(kind.distributed_type.value): kind.visible_devices_env
        for kind in reversed(KINDS)
        if kind.visible_devices_env and kind.distributed_type.value.startswith("MULTI_")
    } == VISIBLE_DEVICES


def test_the_report_of_this_machine_is_complete(here):
    result = subprocess.run(
        [sys.executable, "-m", "accel_cli", "env", "--json"], capture_output=True, text=True, check=True
    )
    facts = json.loads(result.stdout)
    assert facts["devices"]["count"] >= 1
    assert facts["torch"]["version"]


@pytest.mark.thorough
def test_what_torchao_logs_when_it_is_imported_is_not_shown(here):
    pytest.importorskip("torchao")
    (here / "imports.py").write_text("import torchao\nprint('done')")
    result = accel("--cpu", "--num_processes", "2", "imports.py")
    assert result.stdout.split() == ["done", "done"]
    assert result.stderr == ""
    (here / "imports.py").write_text("from accel import Accelerator\nimport torchao\nprint('done')")
    result = accel("--cpu", "--num_processes", "1", "imports.py")
    assert (result.stdout, result.stderr) == ("done\n", "")
