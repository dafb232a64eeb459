"""`Accelerator` logs the same way on every rank, through exceptions and signals, and after a resume."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accel_state.errors import CheckpointError, SettingsError
from accel_trackers.registry import tracker_class
from accel_train import Accelerator
from accel_train.checkpoint import layout
from harness.programs import TORCHRUN, Program, run_programs

FOLDER = Path(__file__).resolve().parents[1]
COMMON = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import json, os, signal
from pathlib import Path
import torch
from accel_train import Accelerator
from accel_trackers.general import GeneralTracker, on_main_process

class Lines(GeneralTracker):
    name = "lines"
    requires_logging_directory = False

    @on_main_process
    def __init__(self):
        super().__init__()
        self.file = open(Path.cwd() / f"lines_{{os.environ['RANK']}}.jsonl", "w")

    @property
    def tracker(self):
        return self.file

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.file.write(json.dumps([step, values]) + "\\n")

    @on_main_process
    def log_images(self, values, step=None):
        self.file.write(json.dumps([step, sorted(values)]) + "\\n")

    @on_main_process
    def flush(self):
        self.file.flush()

    @on_main_process
    def finish(self):
        self.file.close()
"""
MAIN_RANK = (
    COMMON
    + """
accelerator = Accelerator(cpu=True, log_with=["tensorboard", Lines()], project_dir="project")
if accelerator.is_main_process:
    accelerator.init_trackers("run", {"lr": 0.1})
for step in range(3):
    accelerator.log({"loss": torch.tensor(0.5 * step)}, step=step)
accelerator.get_tracker("lines").log_images({"sample": 1}, step=7)
accelerator.get_tracker("tensorboard", unwrap=True).add_text("note", "direct")
accelerator.wait_for_everyone()
accelerator.end_training()
"""
)
ALL_RANKS = (
    COMMON
    + """
accelerator = Accelerator(cpu=True, log_with=["tensorboard", Lines()], project_dir="project")
accelerator.init_trackers("run", {"lr": 0.1})
for step in range(3):
    accelerator.log({"loss": torch.tensor(0.5 * step)}, step=step)
accelerator.get_tracker("lines").log_images({"sample": 1}, step=7)
accelerator.get_tracker("tensorboard").log_images({"sample": torch.zeros(3, 4, 4)}, step=7)
accelerator.get_tracker("tensorboard", unwrap=True).add_text("note", "direct")
assert [tracker.name for tracker in accelerator.trackers] == ["tensorboard", "lines"]
accelerator.wait_for_everyone()
accelerator.end_training()
"""
)
HUNG = (
    COMMON
    + """
import threading

class Hung(Lines):
    def log(self, values, step=None, **kwargs):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        threading.Event().wait()

accelerator = Accelerator(cpu=True, log_with=Hung())
accelerator.init_trackers("run")
accelerator.log({"loss": 0.5})
"""
)
FORKS = (
    COMMON
    + """
import multiprocessing, sys

def work(number):
    try:
        accelerator.log({"child": 1.0}, step=number)
    except RuntimeError as error:
        assert "forked from the one that started the trackers" in str(error)
    accelerator.get_tracker("lines", unwrap=True).write("child")
    accelerator.get_tracker("tensorboard").log_text({"child": "text"})
    return number ** 2

accelerator = Accelerator(cpu=True, log_with=["tensorboard", Lines()], project_dir="project")
accelerator.init_trackers("run", {"lr": 0.1})
for step in range(6):
    accelerator.log({"loss": torch.tensor(0.5 * step)}, step=step)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(work, range(4)) == [0, 1, 4, 9]
accelerator.get_tracker("lines", unwrap=True).flush()
if os.fork() == 0:
    sys.exit(0)  # with what runs at exit
os.wait()
accelerator.end_training()
"""
)
ALONE = {**TORCHRUN, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """All programs, run at the same time: how their ranks ended, and the folder of each."""
    base = tmp_path_factory.mktemp("run")
    sources = {"hung": HUNG, "forks": FORKS}
    programs = {"all_ranks": Program(ALL_RANKS), "main_rank": Program(MAIN_RANK)} | {
        name: Program(source, world_size=1, variables=ALONE) for name, source in sources.items()
    }
    imports = ("accel_train.accelerator", "torch._dynamo", "torch.utils.tensorboard")
    return run_programs(programs, base, imports), base


def lines(folder, rank=0):
    return [json.loads(line) for line in (folder / f"lines_{rank}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["all_ranks", "main_rank"])
def test_every_call_is_legal_on_every_rank_and_only_the_main_one_logs(ran, name):
    ends, base = ran
    assert [end.code for end in ends[name]] == [0, 0], [end.errors for end in ends[name]]
    folder = base / name
    assert lines(folder) == [[0, {"loss": 0.0}], [1, {"loss": 0.5}], [2, {"loss": 1.0}], [7, ["sample"]]]
    assert not (folder / "lines_1.jsonl").exists()
    assert len([*(folder / "project/run").glob("events*")]) == 1


def test_sigterm_ends_a_program_whose_tracker_hangs(ran):
    (end,) = ran[0]["hung"]
    assert end.code == -15, end.errors


def test_pools_end_and_forked_children_write_to_no_run(ran):
    ends, base = ran
    (end,) = ends["forks"]
    assert end.code == 0, end.errors
    folder = base / "forks"
    assert lines(folder) == [[step, {"loss": 0.5 * step}] for step in range(6)]
    (file,) = (folder / "project/run").glob("events*")
    events = EventAccumulator(str(file)).Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (step, 0.5 * step) for step in range(6)
    ]
    assert not [tag for tag in events.Tags()["tensors"] if "child" in tag]


def test_the_id_of_a_run_is_in_the_checkpoint(tmp_path):
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path / "project")
    accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.init_trackers("run")
    folder = Path(accelerator.save_state(tmp_path / "here", flush=False))
    assert json.loads((folder / layout.TRACKERS_NAME).read_text()) == {
        "tensorboard": str(tmp_path / "project/run")
    }
    accelerator.load_state(folder)
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()


@pytest.mark.parametrize("text", ["{", "[]", '{"wandb": 3}'])
def test_damaged_ids_are_named(tmp_path, text):
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    folder = Path(accelerator.save_state(tmp_path / "here", flush=False))
    (folder / layout.TRACKERS_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=r"trackers\.json"):
        accelerator.load_state(folder)


def test_an_accelerator_says_what_is_wrong_before_anything_starts():
    with pytest.raises(SettingsError, match="did you mean 'wandb'"):
        Accelerator(cpu=True, log_with="wandbb")
    with pytest.raises(SettingsError, match="project_dir"):
        Accelerator(cpu=True, log_with="tensorboard")
    with pytest.raises(SettingsError, match="on_tracker_error='skip'"):
        Accelerator(cpu=True, on_tracker_error="skip")


def test_a_tracker_of_an_installed_package_is_known_by_its_name(tmp_path, monkeypatch):
    package = tmp_path / "site"
    (package / "third_party-1.0.dist-info").mkdir(parents=True)
    (package / "third_party-1.0.dist-info/METADATA").write_text("Name: third-party\nVersion: 1.0\n")
    (package / "third_party-1.0.dist-info/entry_points.txt").write_text(
        "[accel.trackers]\nthird = third_party_tracker:Third\n"
    )
    (package / "third_party_tracker.py").write_text(THIRD)
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.chdir(tmp_path)
    try:
        tracker_class("third")
        sys.modules["third_party_tracker"].check()
        accelerator = Accelerator(cpu=True, log_with="third")
        accelerator.init_trackers("run", init_kwargs={"third": {"suffix": "x"}})
        accelerator.log({"loss": 0.5}, step=2)
        accelerator.end_training()
        assert json.loads((tmp_path / "run_x.jsonl").read_text()) == [2, {"loss": 0.5}]
    finally:
        sys.modules.pop("third_party_tracker", None)


THIRD = """
import json
from pathlib import Path
from accel_trackers.general import GeneralTracker, on_main_process
from accel_trackers.testing import Record, check_tracker
from accel_trackers.values import split, to_flat


class Third(GeneralTracker):
    name = "third"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name, suffix="", resume=False):
        super().__init__()
        self.path = Path(f"{run_name}_{suffix}.jsonl")
        self.file = self.path.open("a" if resume else "w")

    @property
    def tracker(self):
        return self.file

    @property
    def run_id(self):
        return str(self.path)

    @classmethod
    def resume_arguments(cls, run_id):
        return {"resume": True}

    @on_main_process
    def store_init_configuration(self, values):
        self.file.write(json.dumps(["config", to_flat(values)]) + "\\n")

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.file.write(json.dumps([step, split(self.name, values)[0]]) + "\\n")

    @on_main_process
    def finish(self):
        self.file.close()


def read():
    record = Record()
    for line in Path("checked_.jsonl").read_text().splitlines():
        step, values = json.loads(line)
        if step == "config":
            record.config = values
        else:
            for name, value in values.items():
                record.numbers.setdefault(name, {})[step] = value
    return record


def check():
    check_tracker(lambda **more: Third("checked", **more), read)
"""


def test_the_environment_is_left_alone(tmp_path):
    before = dict(os.environ)
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    accelerator.end_training()
    assert dict(os.environ) == before
