"""The conformance suite for trackers: required behaviour of every tracker.

from accel_trackers.testing import Record, check_tracker

def test_my_tracker(tmp_path):
    check_tracker(lambda **more: MyTracker("project", tmp_path, **more), lambda: read(tmp_path))
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from accel_state.environ import patch_environment
from accel_state.errors import UnsupportedError
from accel_trackers.general import GeneralTracker, check_attributes
from accel_trackers.values import to_flat, to_plain

MEDIA = ("images", "tables", "histograms", "text", "artifacts")
"""Kinds of values that a tracker may log besides numbers."""


@dataclasses.dataclass(kw_only=True)
class Record:
    """What a library's own reader finds in a run.

    Args:
        config: Hyperparameters in one level, keys joined with dots.
        numbers: By name and step.
        media: Number of values of each kind in `MEDIA`.
    """

    config: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    numbers: dict[str, dict[int, float]] = dataclasses.field(default_factory=dict[str, "dict[int, float]"])
    media: dict[str, int] = dataclasses.field(default_factory=dict[str, int])


class _Schedule(enum.Enum):
    COSINE = "cosine"


@dataclasses.dataclass
class _Model:
    depth: int = 2
    widths: tuple[int, ...] = (8, 16)


_CONFIG = {
    "lr": 0.125,
    "seed": np.int64(7),
    "schedule": _Schedule.COSINE,
    "data": PurePosixPath("data/train"),
    "model": _Model(),
    "scale": torch.tensor(0.5),
}
_NUMBERS = {
    "loss": {1: 0.5, 3: 0.25, 10: 0.125},
    "split/accuracy": {1: 0.0, 3: 1.0, 10: 2.0},
    "half": {1: 1.5, 3: 4.5, 10: 15.0},
    "group.inner": {1: 2.0, 3: 6.0, 10: 20.0, 11: 0.0},
}
_RESUMED_STEP = 21


def check_tracker(
    make: Callable[..., GeneralTracker], read: Callable[[], Record], media: Collection[str] = ()
) -> None:
    """Check that a tracker keeps the contract of `GeneralTracker`. Call it where no accel state exists.

    Args:
        make: Constructs the tracker as `init_trackers` would; its keywords are `resume_arguments`.
        read: Reads what was written, when the run is finished, with the library's own reader.
        media: Which of `MEDIA` it has.

    Raises:
        AssertionError: A requirement is not met; the message lists all problems.
    """
    problems = [*_on_another_rank(make)]
    tracker = make()
    check_attributes(tracker)
    tracker.start()
    tracker.store_init_configuration(to_plain(_CONFIG))
    _log_numbers(tracker)
    problems += _log_media(tracker, media)
    tracker.flush()
    run_id = tracker.run_id
    tracker.finish()
    more = {} if run_id is None else type(tracker).resume_arguments(run_id)
    if more:
        again = make(**more)
        again.start()
        again.store_init_configuration(to_plain(_CONFIG))
        if again.run_id != run_id:
            problems.append(f"with {more!r} the run {again.run_id!r} was opened and not {run_id!r}")
        again.log({"loss": 0.0625}, step=_RESUMED_STEP)
        again.finish()
    problems += _compare(read(), media, resumed=bool(more))
    if problems:
        raise AssertionError("\n".join(problems))


def _media_calls(tracker: GeneralTracker, file: Path) -> dict[str, Callable[[], None]]:
    image = torch.linspace(0, 1, 3 * 8 * 8).reshape(3, 8, 8)
    return {
        "images": lambda: tracker.log_images({"picture": image}, step=12),
        "tables": lambda: tracker.log_table("table", columns=["a", "b"], data=[[1, 2], [3, 4]], step=13),
        "histograms": lambda: tracker.log_histograms(
            {"weights": torch.arange(9.0), "rows": [[1.0, 2.0], [3.0, 4.0]]}, step=14
        ),
        "text": lambda: tracker.log_text({"answer": "forty-two"}, step=15),
        "artifacts": lambda: tracker.log_artifact(file),
    }


def _on_another_rank(make: Callable[..., GeneralTracker]) -> list[str]:
    """Make every call on rank 1 of 2, where it must do nothing."""
    problems: list[str] = []
    with patch_environment(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2):
        try:
            tracker = make()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            return [f"on rank 1 it cannot be constructed: {error!r}"]
        if not tracker.main_process_only:
            return []
        calls: dict[str, Callable[[], Any]] = {
            "store_init_configuration": lambda: tracker.store_init_configuration({"a": 1}),
            "log": lambda: tracker.log({"loss": 1.0}, step=1),
            "flush": tracker.flush,
            "finish": tracker.finish,
            **_media_calls(tracker, Path(__file__)),
        }
        for name, call in calls.items():
            try:
                call()
            except Exception as error:  # noqa: BLE001 - as above
                problems.append(f"on rank 1 {name} raises {error!r}")
    return problems


def _log_numbers(tracker: GeneralTracker) -> None:
    for step in (1, 3, 10):
        values: dict[str, Any] = {name: by_step[step] for name, by_step in _NUMBERS.items()}
        values["half"] = torch.tensor(values["half"], requires_grad=True)
        values["split/accuracy"] = np.float32(values["split/accuracy"])
        values["group"] = {"inner": values.pop("group.inner")}
        tracker.log(values, step=step)
    tracker.log({"none": None, "vector": torch.arange(4.0), "group": {"none": None, "inner": 0.0}}, step=11)


def _log_media(tracker: GeneralTracker, media: Collection[str]) -> list[str]:
    problems: list[str] = []
    with TemporaryDirectory() as folder:
        file = Path(folder) / "artifact.txt"
        file.write_text("content")
        for kind, call in _media_calls(tracker, file).items():
            try:
                call()
            except UnsupportedError:
                if kind in media:
                    problems.append(f"it declares that it has no {kind}")
            else:
                if kind not in media:
                    problems.append(f"it accepts {kind} without declaring that it has none")
        tracker.flush()
    return problems


def _compare(record: Record, media: Collection[str], *, resumed: bool) -> list[str]:
    wanted = {name: dict(by_step) for name, by_step in _NUMBERS.items()}
    if resumed:
        wanted["loss"][_RESUMED_STEP] = 0.0625
    problems = [
        f"{name!r} was logged as {by_step}, and read as {record.numbers.get(name)}"
        for name, by_step in wanted.items()
        if record.numbers.get(name) != by_step
    ]
    config = {name: str(value) for name, value in record.config.items()}
    problems += [
        f"{name!r} of the configuration was {value!r}, and is read as {config.get(name)!r}"
        for name, value in to_flat(_CONFIG).items()
        if config.get(name) != str(value)
    ]
    problems += [f"it wrote no {kind}" for kind in media if not record.media.get(kind)]
    return problems
