from __future__ import annotations

import pytest

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


def test_a_script_gives_what_it_calls_its_result(tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys\nfrom accel_state import PartialState\n"
        "if __name__ == '__main__':\n    result = (PartialState().process_index, sys.argv[1:])\n"
    )
    assert launch(tmp_path / "train.py", ("--lr", 1), config=TWO) == {
        rank: (rank, ["--lr", "1"]) for rank in range(2)
    }


def test_a_rank_that_fails_is_told_with_its_traceback():
    def fail():
        if detect(read()).rank == 1:
            raise ValueError("boom")

    with pytest.raises(WorkerFailedError, match=r"(?s)Rank 1 failed: ValueError: boom\nTraceback.*boom"):
        launch(fail, config=TWO)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (LaunchSettings(num_processes=3, num_machines=2), "cannot be divided evenly among 2 machines"),
        (LaunchSettings(num_processes=2, num_machines=2), "launch.main_process_ip"),
    ],
)
def test_settings_that_do_not_fit_are_refused(chosen, message):
    with pytest.raises(SettingsError, match=message):
        launch(print, config=Settings(process=ProcessSettings(use_cpu=True), launch=chosen))
