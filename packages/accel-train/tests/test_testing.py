"""The helpers of tests: requirements, programs in other processes, a small problem, example scripts."""

from __future__ import annotations

import re
import sys
import unittest
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from accel_state.partial_state import PartialState
from accel_train.testing import processes, requirements
from accel_train.testing.examples import clean_lines, get_function_contents_by_name
from accel_train.testing.regression import RegressionDataset, RegressionModel


class Case(unittest.TestCase):
    """A test case to decorate."""


def reason_of(decorator):
    """Return why a decorator skips a test, None if it does not."""
    marked = decorator(type("Marked", (Case,), {}))
    return getattr(marked, "__unittest_skip_why__", None)


def test_requirements_follow_the_device():
    on_cpu = requirements.torch_device == "cpu"
    assert (reason_of(requirements.require_cpu) is None) == on_cpu
    assert (reason_of(requirements.require_non_cpu) is None) != on_cpu
    assert reason_of(requirements.require_npu) == "test require a NPU"
    assert reason_of(requirements.require_non_xpu) is None


def test_requirements_follow_the_libraries(monkeypatch):
    monkeypatch.setattr("accel_state.libraries.is_transformers_available", lambda: False)
    assert reason_of(requirements.require_huggingface_suite)
    monkeypatch.setattr("accel_state.libraries.is_datasets_available", lambda: True)
    assert reason_of(requirements.require_huggingface_suite)
    monkeypatch.setattr("accel_state.libraries.is_transformers_available", lambda: True)
    assert reason_of(requirements.require_huggingface_suite) is None
    assert reason_of(requirements.skip) == "Test was skipped"
    assert reason_of(requirements.slow) == "test is slow"


def test_requirements_follow_the_version_of_torch():
    assert reason_of(requirements.require_torch_min_version(version="2.0")) is None
    assert reason_of(requirements.require_torch_min_version(version="99.0")) == (
        "test requires torch version >= 99.0"
    )


def test_run_first_marks_a_test(monkeypatch):
    monkeypatch.setattr("pytest.mark._config", None)  # which knows no marker of pytest-order
    assert [mark.name for mark in requirements.run_first(type("Marked", (Case,), {})).pytestmark] == ["order"]


def test_a_command_is_run_and_its_output_returned():
    assert processes.run_command([sys.executable, "-c", "print(1)"], return_stdout=True) == "1\n"
    assert processes.run_command([sys.executable, "-c", "print(1)"]) is None
    failing = [sys.executable, "-c", "import sys; print(3); sys.stdout.flush(); sys.exit('out')"]
    with pytest.raises(
        processes.SubprocessCallException, match=r"failed with the following error:\n\n3\nout"
    ):
        processes.run_command(failing)


def test_output_of_a_program_is_repeated_and_collected(capsys):
    program = "import sys; print(1); print(2); sys.stderr.write('e\\n')"
    result = processes.execute_subprocess_async([sys.executable, "-c", program])
    assert (result.returncode, result.stdout, result.stderr) == (0, ["1", "2"], ["e"])
    shown = capsys.readouterr()
    assert f"Running:  {sys.executable} -c" in shown.out
    assert "stdout: 1\nstdout: 2\n" in shown.out
    assert shown.err == "stderr: e\n"


def test_a_program_that_fails_raises_what_it_wrote():
    program = "import sys; sys.stderr.write('e\\nf\\n'); sys.exit(2)"
    with pytest.raises(RuntimeError, match=r"failed with returncode 2\n\nThe combined .* follows:\ne\nf"):
        processes.execute_subprocess_async([sys.executable, "-c", program], quiet=True, echo=False)


def test_after_the_timeout_the_program_is_still_waited_for():
    program = "import time; time.sleep(1.5); print('late\\n' * 200_000)"  # more than a pipe holds
    line = [sys.executable, "-c", program]
    result = processes.execute_subprocess_async(line, timeout=0.1, quiet=True, echo=False)
    assert (result.returncode, result.stdout[0]) == (0, "late")


def test_the_command_of_a_launch_has_the_flags_in_order():
    words = processes.get_launch_command(
        num_processes=2, use_cpu=True, flag=False, x=None, mixed_precision="fp16"
    )
    assert words[1:] == ["launch", "--num_processes=2", "--use_cpu", "--flag=False", "--mixed_precision=fp16"]


def test_ports_differ_between_workers(monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    assert (processes.pytest_xdist_worker_id(), processes.get_torch_dist_unique_port()) == (3, 29503)
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert (processes.pytest_xdist_worker_id(), processes.get_torch_dist_unique_port()) == (0, 29500)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TypeError("axb"), "Expected exception of type <class 'ValueError'> but got <class 'TypeError'>"),
        (ValueError("y"), "Expected message 'x' to be in exception but got 'y'"),
        (None, "Expected exception of type <class 'ValueError'> but ran without issue."),
    ],
)
def test_an_exception_that_is_not_the_expected_one_fails(error, message):
    def run():
        with processes.assert_exception(ValueError, "x"):
            if error is not None:
                raise error

    with pytest.raises(AssertionError, match=re.escape(message)):
        run()


def test_an_exception_that_ends_the_process_can_be_expected():
    with processes.assert_exception(SystemExit, "3"):
        sys.exit(3)
    with pytest.raises(KeyboardInterrupt), processes.assert_exception(ValueError):
        raise KeyboardInterrupt


def test_the_folder_is_emptied_before_each_test():
    class Folder(processes.TempDirTestCase):
        def test_a(self):
            self.check()

        def test_b(self):
            self.check()

        def check(self):
            assert not list(self.tmpdir.iterdir())
            (self.tmpdir / "inner").mkdir()
            (self.tmpdir / "file").write_text("")

    result = unittest.TextTestRunner(stream=mock.Mock()).run(
        unittest.defaultTestLoader.loadTestsFromTestCase(Folder)
    )
    assert result.wasSuccessful(), result.failures
    assert not Path(Folder.tmpdir).exists()


def test_states_are_reset_and_patches_stopped_after_a_test():
    class States(processes.AccelerateTestCase, processes.MockingTestCase):
        def test_state(self):
            self.add_mocks(mock.patch.object(Case, "name", "patched", create=True))
            PartialState(cpu=True)
            assert Case.name == "patched"

    result = unittest.TextTestRunner(stream=mock.Mock()).run(
        unittest.defaultTestLoader.loadTestsFromTestCase(States)
    )
    assert result.wasSuccessful(), result.failures
    assert not PartialState._shared_state
    assert not hasattr(Case, "name")


def test_the_problem_is_a_line_with_noise():
    dataset = RegressionDataset(length=3, seed=4)
    np.testing.assert_allclose(dataset.x, [-0.65179116, -0.17471729, 1.663724])  # of Accelerate 1.15.0
    np.testing.assert_allclose(
        dataset.y - 2 * dataset.x - 3, [0.06591463, -0.16413975, -0.00052023], atol=1e-6
    )
    assert dataset[0]["x"].dtype == dataset[0]["y"].dtype == np.float32
    model = RegressionModel(1, 2)
    assert [name for name, _ in model.named_parameters()] == ["a", "b"]
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 3.0))


def test_functions_of_a_script_are_found():
    lines = [
        "# c\n",
        "def training_function(a):\n",
        "    # b\n",
        "    a()\n",
        "\n",
        "def main():\n",
        "    f()\n",
    ]
    lines += ['if __name__ == "__main__":\n', "    main()\n"]
    assert clean_lines(lines[:4]) == [lines[1], lines[3]]
    assert get_function_contents_by_name(lines, "training_function") == [lines[1], lines[3]]
    assert get_function_contents_by_name(lines, "main") == lines[5:7]
    assert get_function_contents_by_name(lines[5:], "training_function") is None
    with pytest.raises(ValueError, match="Incorrect function name passed: f"):
        get_function_contents_by_name(lines, "f")
