from __future__ import annotations

from types import SimpleNamespace

import pytest

from accel_cli.launch import elastic


def failure(exitcode, error=None):
    """A failed worker, as torch notes it."""
    told = {"message": {"message": error, "extraInfo": {"py_callstack": f"Traceback\n{error}\n"}}}
    return SimpleNamespace(exitcode=exitcode, error_file_data=told if error else {"message": ""})


class ChildFailedError(Exception):
    def __init__(self, failures, first=1):
        super().__init__("the summary")
        self.failures = failures
        self.first = first

    def get_first_failure(self):
        return self.first, self.failures[self.first]


class SignalException(Exception):  # noqa: N818 - the name in torch
    sigval = 15


def run(arguments, outcome=None):
    seen = []

    def main(received):
        seen.append(received)
        if outcome:
            raise outcome

    modules = {
        "torch.distributed.run": SimpleNamespace(main=main),
        "torch.distributed.elastic.multiprocessing": SimpleNamespace(
            errors=SimpleNamespace(ChildFailedError=ChildFailedError)
        ),
        "torch.distributed.elastic.multiprocessing.api": SimpleNamespace(SignalException=SignalException),
    }
    return elastic.main(arguments, modules.__getitem__), seen


def test_workers_that_finish_end_with_success():
    assert run(["--nnodes=1", "train.py"]) == (0, [["--nnodes=1", "train.py"]])


@pytest.mark.parametrize(("code", "expected"), [(3, 3), (-9, 137)])
def test_the_exit_code_is_that_of_the_worker_that_failed_first(code, expected, capsys):
    assert run(["train.py"], ChildFailedError({1: failure(code)}))[0] == expected
    how = "ended with exit code 3" if code == 3 else "was ended by SIGKILL"
    assert capsys.readouterr().err == f"accel launch: rank 1 {how}\n"


def test_the_traceback_of_the_first_failure_comes_last_and_once(capsys):
    failures = {0: failure(-15), 1: failure(1, "ValueError: boom"), 2: failure(1, "ValueError: two\nlines")}
    run(["train.py"], ChildFailedError(failures))
    assert capsys.readouterr().err == (
        "accel launch: rank 0 was ended by SIGTERM\n"
        "accel launch: rank 2 failed with ValueError: two\n"
        "accel launch: rank 1 failed with ValueError: boom\n"
        "Traceback\nValueError: boom\n"
    )


def test_quiet_leaves_out_the_summary_and_is_not_passed_on(capsys):
    assert run(["--quiet", "train.py"], ChildFailedError({1: failure(3)})) == (3, [["train.py"]])
    assert capsys.readouterr().err == ""


def test_a_signal_to_the_launcher_gives_its_exit_code():
    assert run(["train.py"], SignalException())[0] == 143
