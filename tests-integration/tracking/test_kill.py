"""A process that SIGKILL ends between two flushes has lost nothing before the last; its run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.programs import TORCHRUN, Program, run_programs
from tracking.library_cases import CASES, OFFLINE

FOLDER = Path(__file__).resolve().parents[1]
PROGRAM = """
import json, os, signal, sys, time, traceback
sys.path.insert(0, {folder!r})
import accel_trackers.session
from accel_plugins.kwargs.project import ProjectConfiguration
from accel_train import Accelerator
from tracking.library_cases import CASES

NAME = {name!r}


def accelerator():
    project = ProjectConfiguration(project_dir=".", logging_dir="logs")
    return Accelerator(cpu=True, log_with=NAME, project_config=project)


def init(accelerator):
    accelerator.init_trackers("project", {{"lr": 0.1}}, {{NAME: CASES[NAME][2]}})


def tensorboard():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("logs/project").Reload()
    return {{event.step: event.value for event in events.Scalars("loss")}}


def trackio():
    from trackio.sqlite_storage import SQLiteStorage

    runs = SQLiteStorage.get_runs("project")
    return {{row["step"]: row["loss"] for run in runs for row in SQLiteStorage.get_logs("project", run)}}


def read():
    return {{"tensorboard": tensorboard, "trackio": trackio}}[NAME]()


def first():
    accel_trackers.session.FLUSH_SECONDS = 0.1  # instead of ten; the rest is as ever
    training = accelerator()
    init(training)
    training.save_state("here", flush=False)
    for step in range(1, 6):
        training.log({{"loss": 1.0 / (1 << step)}}, step=step)
    tracker = training.get_tracker(NAME)
    flushed, flush = [], tracker.flush
    tracker.flush = lambda: flushed.append(flush())
    training.log({{"loss": 0.0}}, step=6)
    while not flushed or len(read()) < 6:  # nothing but the interval writes it
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def second():
    losses = {{step: 1.0 / (1 << step) for step in range(1, 6)}} | {{6: 0.0}}
    assert read() == losses, read()
    training = accelerator()
    training.load_state("here")
    init(training)
    training.save_state("there", flush=False)
    training.log({{"loss": 7.0}}, step=7)
    training.end_training()
    assert read() == losses | {{7: 7.0}}, read()
    before, after = (json.load(open(f"{{one}}/trackers.json"))[NAME] for one in ("here", "there"))
    assert before == after


child = os.fork()
if child == 0:
    try:
        first()
    finally:
        traceback.print_exc()
        os._exit(1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, status
second()
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """How both programs ended; they run at the same time."""
    alone = {**TORCHRUN, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", **OFFLINE}
    programs = {
        name: Program(PROGRAM.format(folder=str(FOLDER), name=name), world_size=1, variables=alone)
        for name in ("tensorboard", "trackio")
    }
    return {name: ended[0] for name, ended in run_programs(programs, tmp_path_factory.mktemp("run")).items()}


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_what_was_flushed_survives_a_kill_and_the_run_goes_on_under_its_id(ends, name):
    assert name in CASES
    assert ends[name].code == 0, f"{ends[name].output}\n{ends[name].errors}"
