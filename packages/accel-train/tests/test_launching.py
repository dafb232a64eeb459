from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from dataclasses import replace

import pytest
import torch

from accel_state.environ import read
from accel_state.errors import SettingsError
from accel_state.settings import LaunchSettings, PrecisionSettings, ProcessSettings, Settings, from_environ
from accel_state.topology import detect
from accel_train.forking import WorkerFailedError
from accel_train.launching import launch

TWO = Settings(
    process=ProcessSettings(use_cpu=True),
    precision=PrecisionSettings(mixed_precision="bf16"),
    launch=LaunchSettings(num_processes=2),
)


def told(*words):
    place = detect(read())
    return place.rank, place.world_size, from_environ(read()).precision.mixed_precision, words


def test_a_function_runs_on_every_rank_with_the_settings_and_gives_its_results(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.setenv("FSDP_VERSION", "2")
    before = read()
    results = launch(lambda *words: (*told(*words), "FSDP_VERSION" in read()), ("a", 1), config=TWO)
    assert results == {rank: (rank, 2, "bf16", ("a", 1), False) for rank in range(2)}
    assert read() == before


def test_a_table_of_a_config_file_is_as_good_as_settings():
    table = {"use_cpu": True, "num_processes": 2, "mixed_precision": "bf16", "num_cpu_threads_per_process": 3}
    results = launch(lambda: (*told(), torch.get_num_threads(), read()["OMP_NUM_THREADS"]), config=table)
    assert results == {rank: (rank, 2, "bf16", (), 3, "3") for rank in range(2)}


def test_a_script_gives_what_it_calls_its_result(tmp_path, monkeypatch):
    (tmp_path / "trainer.py").write_text(
        "import sys\nfrom accel_state import PartialState\nfrom beside import factor\n"
        "if __name__ == '__main__':\n    result = (PartialState().process_index * factor, sys.argv[1:])\n"
    )
    (tmp_path / "beside.py").write_text("factor = 5\n")
    expected = {rank: (rank * 5, ["--lr", "1"]) for rank in range(2)}
    assert launch(tmp_path / "trainer.py", ("--lr", 1), config=TWO) == expected
    monkeypatch.chdir(tmp_path)
    module = replace(TWO, launch=replace(TWO.launch, module=True))
    assert launch("trainer", ("--lr", 1), config=module) == expected
    assert "beside" not in sys.modules


def test_a_rank_that_fails_is_reported_with_its_traceback():
    def fail():
        if detect(read()).rank == 1:
            raise ValueError("boom")

    with pytest.raises(WorkerFailedError, match=r"(?s)Rank 1 failed: ValueError: boom\nTraceback.*boom"):
        launch(fail, config=TWO)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: lambda: 1, "has returned <function .*cannot be pickled"),
        (lambda: sys.exit(3), r"Rank \d failed: it ended with exit code 3"),
    ],
)
def test_how_a_process_ended_without_an_error_of_the_function_is_reported(work, message):
    with pytest.raises(WorkerFailedError, match=message):
        launch(work, config=TWO)


def test_a_traceback_has_the_frames_of_the_script_only(tmp_path):
    (tmp_path / "train.py").write_text("def f():\n    raise ValueError('boom')\nf()\n")
    with pytest.raises(WorkerFailedError) as caught:
        launch(tmp_path / "train.py", config=TWO)
    assert str(caught.value).count("File ") == 2 * len(caught.value.ranks)


def test_nothing_of_torchs_launcher_stays(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(WorkerFailedError):
        launch(lambda: 1 / 0, config=TWO)
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
        launch(work, ("saved",), config=TWO)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "saved0", "saved1"}


@pytest.mark.parametrize(
    ("given", "args", "config", "message"),
    [
        (5, (), TWO, r"launch\(5\): expected a function, or the path"),
        ("nowhere.py", (), TWO, r"launch\('nowhere.py'\): there is no such script"),
        (print, 5, TWO, "args=5: expected all that the function is called with"),
        (print, "ab", TWO, "args='ab': expected"),
        (print, (), "run.yaml", r"launch\(config='run.yaml'\): .*yaml.safe_load"),
        (print, (), 2, r"launch\(config=2\): expected accel.settings.Settings"),
        (print, (), {"num_procs": 2}, "num_procs"),
        (print, (), {"mpirun_config": {"mpirun_hostfile": "hosts"}}, "mpi.hostfile is carried out by"),
        (
            print,
            (),
            {"num_processes": 2, "distributed_type": "MULTI_NPU"},
            "this machine shows no such device",
        ),
    ],
)
def test_what_cannot_be_launched_is_said_before_anything_starts(given, args, config, message):
    with pytest.raises(SettingsError, match=message):
        launch(given, args, config=config)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (LaunchSettings(num_processes=3, num_machines=2), "cannot be divided by 2 machines"),
        (LaunchSettings(num_processes=2, num_machines=2), "launch.main_process_ip"),
    ],
)
def test_settings_that_do_not_fit_are_refused(chosen, message):
    with pytest.raises(SettingsError, match=message):
        launch(print, config=Settings(process=ProcessSettings(use_cpu=True), launch=chosen))
