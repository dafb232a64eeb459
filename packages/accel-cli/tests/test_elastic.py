from __future__ import annotations

from types import SimpleNamespace

import pytest

from accel_cli.launch import elastic


class ChildFailedError(Exception):
    def __init__(self, code):
        super().__init__("the summary")
        self.code = code

    def get_first_failure(self):
        return 1, SimpleNamespace(exitcode=self.code)


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
    assert run(["train.py"], ChildFailedError(code))[0] == expected
    assert "the summary" in capsys.readouterr().err


def test_quiet_leaves_out_the_summary_and_is_not_passed_on(capsys):
    assert run(["--quiet", "train.py"], ChildFailedError(3)) == (3, [["train.py"]])
    assert capsys.readouterr().err == ""


def test_a_signal_to_the_launcher_gives_its_exit_code():
    assert run(["train.py"], SignalException())[0] == 143
