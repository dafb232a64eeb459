"""What a change can touch, asked about this workspace."""

from __future__ import annotations

import pytest

from affected import ROOT, affected_by, changed_since, dependents
from check import STEPS, narrowed


def commands(*changed):
    return {step.name: step.command for step in narrowed([*STEPS], affected_by(changed))}


def source_of(package):
    module = next((ROOT / "packages" / package / "src").glob("*/__init__.py"))
    return module.relative_to(ROOT).as_posix()


def test_a_package_reaches_those_above_it_and_none_below():
    found = affected_by([source_of("accel-ops")])
    assert {"accel-ops", "accel-bigmodel", "accel-plugins", "accel-train", "accel-suite"} <= {*found.packages}
    assert "accel-state" not in found.packages
    assert "tests-integration/training/test_stepping.py" in found.integration
    assert found.sources
    assert not found.everything
    assert {*dependents()["accel-state"]} == {*dependents()} - {"accel-state"}


def test_the_top_package_reaches_itself_alone():
    found = affected_by([source_of("accel-compat")])
    assert found.packages == ("accel-compat",)
    assert "tests-integration/training/test_stepping.py" not in found.integration


def test_tests_of_a_package_reach_that_package_and_no_integration_test():
    found = affected_by(["packages/accel-state/tests/test_settings.py"])
    assert (found.packages, found.integration, found.sources) == (("accel-state",), (), False)


def test_an_integration_test_reaches_its_folder():
    found = affected_by(["tests-integration/bigmodel/test_broadcast.py"])
    assert {test.split("/")[1] for test in found.integration} == {"bigmodel"}
    assert found.packages == ()


def test_a_page_runs_the_examples_and_what_reads_all_sources():
    found = commands("packages/accel-suite/docs/guides/fsdp.md")
    assert {"format", "lint", "types", "layers", "house", "surface", "examples"} <= {*found}
    assert not {"integration", "fuzz", "isolation"} & {*found}


def test_nothing_at_all_runs_what_reads_all_sources():
    found = commands()
    assert {"format", "lint", "types", "layers", "house", "dependencies", "exports", "settings"} <= {*found}
    assert not {"unit", "integration", "examples", "fuzz", "isolation"} & {*found}


@pytest.mark.parametrize(
    "file", ["uv.lock", "tests-integration/harness/pool.py", "tools/shared_test_rules.py"]
)
def test_what_all_tests_stand_on_runs_everything(file):
    assert [*commands(file)] == [step.name for step in STEPS]


def test_paths_take_the_place_of_whole_folders_in_commands():
    unit = commands("packages/accel-state/tests/test_settings.py")["unit"]
    assert unit[-1] == "packages/accel-state"
    assert "packages" not in unit


def test_a_commit_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="no-such-commit"):
        changed_since("no-such-commit")
