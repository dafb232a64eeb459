"""The workflows on GitHub run steps that exist, on every supported Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import check

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
UV = os.environ.get("UV") or shutil.which("uv") or "uv"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def commands(path: Path) -> list[str]:
    return [step["run"] for job in read(path)["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_steps_and_files_that_exist(path: Path) -> None:
    lines = commands(path)
    assert lines
    steps = {step.name for step in check.STEPS}
    for line in lines:
        assert set(re.findall(r"--only (\S+)", line)) <= steps, line
        files = re.findall(r"tools/\w+\.py|\.ci/run", line)
        assert all((ROOT / file).is_file() for file in files), line


def test_the_unit_tests_run_on_every_supported_python() -> None:
    jobs = read(ROOT / ".github" / "workflows" / "check.yml")["jobs"]
    assert tuple(jobs["pythons"]["strategy"]["matrix"]["python"]) == PYTHONS
    for path in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        assert project["requires-python"] == f">={PYTHONS[0]}", path
        minors = [line.rpartition(" ")[2] for line in project["classifiers"] if ":: Python :: 3." in line]
        assert set(minors) <= set(PYTHONS), path


def test_the_workflows_run_the_test_command_the_floor_and_the_wheels() -> None:
    lines = commands(ROOT / ".github" / "workflows" / "check.yml")
    assert ".ci/run" in lines
    run = {name for line in lines for name in re.findall(r"--only (\S+)", line)}
    assert {"unit", "floor", "isolation", "site"} <= run
    assert any(line.endswith("tools/check.py --all") for line in lines)


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.stem)
def test_every_form_and_workflow_is_valid_yaml_with_a_name(path: Path) -> None:
    content = read(path)
    assert "name" in content or path.stem in {"config", "dependabot"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_only_actions_pinned_by_digest_with_their_version_beside(path: Path) -> None:
    for line in path.read_text().splitlines():
        if "uses:" in line:
            assert re.search(r"uses: [\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+$", line), line


def test_only_the_job_that_publishes_has_rights_and_it_runs_no_code_of_the_repository() -> None:
    workflow = read(ROOT / ".github" / "workflows" / "release.yml")
    assert workflow["permissions"] == {"contents": "read"}
    assert [name for name, job in workflow["jobs"].items() if "permissions" in job] == ["publish"]
    assert all("run" not in step for step in workflow["jobs"]["publish"]["steps"])


def test_two_builds_of_a_wheel_are_equal_bytes(tmp_path: Path) -> None:
    wheels: list[bytes] = []
    for number in (1, 2):
        source = tmp_path / f"source{number}" / "accel-trackers"
        shutil.copytree(
            ROOT / "packages/accel-trackers", source, copy_function=shutil.copyfile
        )  # other times
        target = tmp_path / f"wheel{number}"
        command = [UV, "build", "--quiet", "--wheel", "--out-dir", str(target), str(source)]
        subprocess.run(command, check=True)
        (wheel,) = target.glob("*.whl")
        wheels.append(wheel.read_bytes())
    assert wheels[0] == wheels[1]
