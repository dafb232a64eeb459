"""The file that `accel config` leaves is one for the reference's launcher, whatever was answered."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from accel_cli.commands.config import find_conflicts
from accel_cli.config_file import write
from accel_cli.interview import HostInfo, Question, interview
from accel_state.settings import OPTIONS, to_content

PROGRAM = Path(__file__).parent / "programs" / "read_configs.py"
HOSTS = (
    HostInfo(cores=8),
    HostInfo(gpus=8, cores=64, bf16=True, address="10.0.0.5"),
    HostInfo(gpus=1, nodes=2),
)
INTERVIEWS = 600

SAGEMAKER = {
    "compute_environment": "AMAZON_SAGEMAKER",
    "ec2_instance_type": "ml.g5.2xlarge",
    "iam_role_name": "role",
    "mixed_precision": "no",
}
"""The keys that every file for SageMaker has. The reference's launcher has an error for each of them."""


@pytest.fixture
def reference(request: pytest.FixtureRequest) -> str:
    """The interpreter of an environment with the reference; REFERENCE_PYTHON names another one."""
    return os.environ.get("REFERENCE_PYTHON") or str(request.getfixturevalue("python"))


def test_the_reference_reads_the_file_of_any_answers(
    reference: str, clients_environ: dict[str, str], tmp_path: Path
) -> None:
    # 1. Answer at random what is offered, until every choice of every question was.
    answers: dict[str, set[str]] = {}
    contents: dict[str, dict[str, object]] = {}
    for seed in range(INTERVIEWS):
        chance = random.Random(seed)
        host = chance.choice(HOSTS)

        def answer(question: Question, chance: random.Random = chance) -> str:
            # Several processes need two GPUs of a node there.
            texts = ("all", "0,1") if question.path == "launch.gpu_ids" else (question.default, "", "1", "2")
            choices = {
                "choice": [value for value, _ in question.choices],
                "yes or no": ["true", "false"],
                "text": [text for text in texts if question.find_problem(text) is None],
            }
            text = chance.choice(choices[question.kind])
            answers.setdefault(question.path, set()).add(text)
            return text

        settings = interview(answer, host)
        if not find_conflicts(settings, host):
            contents[f"{seed}.yaml"] = to_content(settings)
    assert {option.path for option in OPTIONS if option.question} == {*answers}
    for kind in ("NO", "DATA_PARALLEL", "MODEL_PARALLEL"):
        contents[f"{kind}.yaml"] = {**SAGEMAKER, "distributed_type": kind}
    # 2. Let the reference read all of them.
    for name, content in contents.items():
        write(tmp_path / name, content)
    done = subprocess.run(
        [reference, str(PROGRAM), str(tmp_path)],
        env={**clients_environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    of_machine = ("FP8 is not available on this machine", "Port `29500` is already in use")
    complaints: dict[str, list[str]] = {
        name: [text for text in texts if not any(part in text for part in of_machine)]
        for name, texts in json.loads(done.stdout).items()
    }
    # 3. It says of a file for SageMaker what it says of the barest one, of all others nothing.
    expected = {
        name: complaints[f"{content['distributed_type']}.yaml"]
        if content["compute_environment"] == "AMAZON_SAGEMAKER"
        else []
        for name, content in contents.items()
    }
    assert complaints == expected
    assert len(contents) > INTERVIEWS // 2
