"""The examples that log, resume and evaluate run on one process and on two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness import chosen_params
from harness.programs import TORCHRUN, Program, run_programs

EXAMPLES = Path(__file__).resolve().parents[3] / "packages/accel-suite/examples"
COMPLETE = {
    "complete/image_classification": "image-run/digits",
    "complete/text_classification": "text-run/prose-or-code",
}
# The text's was 0.885 to 0.949 with the seeds 0 to 5, each on one process and on two; half are prose.
LEAST_ACCURACY = {"complete/image_classification": 0.9, "complete/text_classification": 0.85}
# Ends after two epochs, as if it had been interrupted, then runs a second time to the end.
TWICE = """
import re
from pathlib import Path
file = Path({file!r})
source = file.read_text()
if "has_checkpoint" in source:
    shorter = source.replace('"epochs": 3', '"epochs": 2').replace("accelerator.end_training()", "")
    exec(compile(shorter, file, "exec"))
    accelerator.get_tracker("tensorboard").finish()
    from accel.state import AcceleratorState, GradientState
    AcceleratorState._reset_state()
    GradientState._reset_state()
exec(compile(source, file, "exec"))
"""


@pytest.fixture(scope="module")
def ran(request, tmp_path_factory):
    """How the programs of the chosen tests ended, all run at the same time, and the folder with theirs."""
    base = tmp_path_factory.mktemp("run")
    alone = {**TORCHRUN, "ACCELERATE_USE_CPU": "true"}
    programs = {
        f"{Path(params['name']).name}_{params['size']}": Program(
            TWICE.format(file=str(EXAMPLES / f"{params['name']}.py")),
            world_size=params["size"],
            variables=alone,
        )
        for params in chosen_params(request)
    }
    imports = ("accel", "torch._dynamo", "torch.utils.tensorboard", "sklearn.model_selection")
    return run_programs(programs, base, imports), base


def scalars(folder, tag):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", COMPLETE)
def test_a_complete_example_resumes_and_its_run_goes_on(ran, name, size):
    ends, base = ran
    key = f"{Path(name).name}_{size}"
    assert [end.code for end in ends[key]] == [0] * size, [end.errors for end in ends[key]]
    said = ends[key][0].output
    assert re.findall(r"^epoch (\d)|^resuming with epoch (\d)", said, re.MULTILINE) == [
        ("0", ""),
        ("1", ""),
        ("", "2"),
        ("2", ""),
    ]
    accuracy = scalars(base / key / COMPLETE[name], "test/accuracy")
    assert len(accuracy) == 3
    assert accuracy[-1][1] > LEAST_ACCURACY[name]
    steps = [step for step, _ in scalars(base / key / COMPLETE[name], "train/loss")]
    assert steps == [*range(1, len(steps) + 1)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["by_feature/tracking"])
def test_the_example_of_tracking_logs_every_step_once(ran, name, size):
    ends, base = ran
    key = f"{Path(name).name}_{size}"
    assert [end.code for end in ends[key]] == [0] * size, [end.errors for end in ends[key]]
    (count,) = re.findall(r"^logged (\d+) steps", ends[key][0].output)
    losses = scalars(base / key / "tracking-run/digits", "train/loss")
    assert [step for step, _ in losses] == [*range(1, int(count) + 1)]
    assert losses[-1][1] < losses[0][1]
