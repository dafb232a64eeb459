"""The helpers of other libraries' tests."""

from __future__ import annotations

import sys

import pytest

from accel_train import testing


def test_a_command_is_run_and_its_output_returned():
    assert testing.run_command([sys.executable, "-c", "print(1)"], return_stdout=True) == "1\n"
    assert testing.run_command([sys.executable, "-c", "print(1)"]) is None
    failing = [sys.executable, "-c", "import sys; print(3); sys.stdout.flush(); sys.exit('out')"]
    with pytest.raises(testing.SubprocessCallException, match=r"failed with the following error:\n\n3\nout"):
        testing.run_command(failing)


def test_output_of_a_program_is_repeated_and_collected(capsys):
    program = "import sys; print(1); print(2); sys.stderr.write('e\\n')"
    result = testing.execute_subprocess_async([sys.executable, "-c", program])
    assert (result.returncode, result.stdout, result.stderr) == (0, ["1", "2"], ["e"])
    shown = capsys.readouterr()
    assert f"Running:  {sys.executable} -c" in shown.out
    assert "stdout: 1\nstdout: 2\n" in shown.out
    assert shown.err == "stderr: e\n"


def test_a_program_that_fails_raises_what_it_wrote():
    program = "import sys; sys.stderr.write('e\\nf\\n'); sys.exit(2)"
    with pytest.raises(RuntimeError, match=r"failed with returncode 2\n\nThe combined .* follows:\ne\nf"):
        testing.execute_subprocess_async([sys.executable, "-c", program], quiet=True, echo=False)


def test_ports_differ_between_workers(monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    assert testing.get_torch_dist_unique_port() == 29503
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert testing.get_torch_dist_unique_port() == 29500
