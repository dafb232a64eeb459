from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing import api

from accel_cli.launch import elastic
from accel_train.worker_errors import stack_file, worker_error

NOBODY = 2**22 + 1  # more than there are process ids


def failure(exitcode, error=None, **details):
    """A failed worker, as torch notes it."""
    told = {"message": {"message": error, "extraInfo": {"py_callstack": f"Traceback\n{error}\n", **details}}}
    return SimpleNamespace(
        exitcode=exitcode, error_file_data=told if error else {"message": ""}, pid=NOBODY, timestamp=8
    )


class ChildFailedError(Exception):
    def __init__(self, failures):
        super().__init__("the summary")
        self.failures = failures


class DistNetworkError(Exception):
    pass


class SignalException(Exception):  # noqa: N818 - the name in torch
    sigval = 15


def run(arguments, outcome=None):
    seen = []

    def parse_args(words):
        folder, *rest = words
        seen.append(rest)
        return SimpleNamespace(
            folder=folder, training_script="train.py", training_script_args=[], master_port=29400
        )

    def start(args):
        if callable(outcome):
            outcome(Path(args.folder.removeprefix("--log_dir=")))
        if isinstance(outcome, Exception):
            raise outcome

    replaced = {
        "run": SimpleNamespace(parse_args=parse_args, run=start),
        "DistNetworkError": DistNetworkError,
        "ChildFailedError": ChildFailedError,
        "SignalException": SignalException,
    }
    # `main` replaces torch's handler, which the tests of other modules need.
    with (
        mock.patch.multiple(elastic, **replaced),
        mock.patch.object(api, "_terminate_process_handler", api._terminate_process_handler),
    ):
        return elastic.main(arguments), seen


def test_workers_that_finish_end_with_success():
    assert run(["--nnodes=1", "train.py"]) == (0, [["--nnodes=1", "train.py"]])


@pytest.mark.parametrize(
    ("code", "expected", "how"),
    [
        (3, 3, "ended with exit code 3"),
        (-9, 137, "was ended by SIGKILL"),
        (-40, 168, "was ended by signal 40"),  # a real-time signal, which has no name
    ],
)
def test_the_exit_code_is_that_of_the_worker_that_failed_first(code, expected, how, capsys):
    assert run(["train.py"], ChildFailedError({1: failure(code)}))[0] == expected
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


def test_of_failures_in_one_second_the_earlier_one_comes_last(capsys):
    failures = {0: failure(1, "RuntimeError: peer", time=8.7), 1: failure(3, "ValueError: boom", time=8.2)}
    assert run(["train.py"], ChildFailedError(failures))[0] == 3
    assert capsys.readouterr().err.endswith(
        "rank 1 failed with ValueError: boom\nTraceback\nValueError: boom\n"
    )


def test_a_rank_that_raised_decides_although_it_was_ended_before_it_could_exit(capsys):
    failures = {0: failure(-15, "ValueError: boom", time=8.1), 1: failure(1, "ValueError: boom", time=8.2)}
    assert run(["train.py"], ChildFailedError(failures))[0] == 1
    assert capsys.readouterr().err.endswith(
        "rank 0 failed with ValueError: boom\nTraceback\nValueError: boom\n"
    )
    failures[0] = failure(-15, "KeyboardInterrupt: ", time=8.1, kind="KeyboardInterrupt")
    assert run(["train.py"], ChildFailedError(failures))[0] == 130


def test_a_rank_that_torch_has_ended_never_decides(capsys):
    failures = {0: failure(-15), 1: failure(1, "ValueError: boom", time=9.5)}
    assert run(["train.py"], ChildFailedError(failures))[0] == 1
    assert run(["train.py"], ChildFailedError({0: failure(-15), 1: failure(-15)}))[0] == 143
    assert run(["train.py"], ChildFailedError({0: failure(-15), 1: failure(6)}))[0] == 6


def test_a_rank_that_died_decides_before_those_that_missed_it_in_the_same_second(capsys):
    failures = {0: failure(1, "RuntimeError: peer", time=8.4), 1: failure(-9)}
    assert run(["train.py"], ChildFailedError(failures))[0] == 137


def test_a_port_that_another_process_takes_meanwhile_is_a_sentence(capsys):
    error = DistNetworkError("The server socket has failed to listen: port: 29400, EADDRINUSE")
    assert run(["train.py"], error)[0] == 2
    assert "took main_process_port 29400" in capsys.readouterr().err
    with pytest.raises(DistNetworkError):
        run(["train.py"], DistNetworkError("no route to host"))


def test_a_signal_to_the_launcher_gives_its_exit_code():
    assert run(["train.py"], SignalException())[0] == 143


def interrupted(folder):
    """What five workers of the last of two attempts leave when they are interrupted."""
    for attempt in (1, 9, 10):
        for rank, kind in enumerate(["KeyboardInterrupt", "OSError", "KeyboardInterrupt", None, None]):
            error = folder / f"none_x/attempt_{attempt}/{rank}/error.json"
            error.parent.mkdir(parents=True)
            if kind:
                trace = f"Traceback of attempt {attempt}\n"
                error.write_text(json.dumps(worker_error(kind, "", trace, rank, 0)))
            if rank < 4:
                stack = (
                    'Stack:\n  File "a.py", line 2 in f\n  File "a.py", line 3 in <module>\nStack:\n  File'
                )
                stack_file(str(error), rank).write_text(stack)
    raise SignalException


def test_interrupted_workers_tell_where_they_stood_in_one_piece(capsys):
    assert run(["train.py"], interrupted)[0] == 143
    assert capsys.readouterr().err == (
        "accel launch: ranks 0, 2 were interrupted\nTraceback of attempt 10\n"
        "accel launch: rank 1 failed with OSError: \nTraceback of attempt 10\n"
        "accel launch: rank 3 was interrupted, and did not end\n"
        'Stack (most recent call last):\n  File "a.py", line 3 in <module>\n  File "a.py", line 2 in f\n'
    )
    assert run(["--quiet", "train.py"], interrupted)[0] == 143
    assert capsys.readouterr().err == ""


def test_signals_that_nohup_or_a_shell_has_turned_off_stay_so(monkeypatch):
    monkeypatch.setattr(elastic, "children", list)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        forwarder = elastic.SignalForwarder(lambda message, number: OSError(message))
        with forwarder.install():
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(OSError, match="got SIGTERM"):
                signal.raise_signal(signal.SIGTERM)
            assert forwarder.first is signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_asks_for_no_end_is_passed_on_and_a_second_interrupt_kills(monkeypatch):
    source = "import signal; signal.sigwait([signal.SIGUSR1]); print('told', flush=True); signal.pause()"
    block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM]); "
    forwarder = elastic.SignalForwarder(lambda message, number: OSError(message), ctrl_c_seconds=0)
    with forwarder.install(), subprocess.Popen(
        [sys.executable, "-c", block + "print('here', flush=True); " + source],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as worker:  # fmt: skip
        monkeypatch.setattr(elastic, "children", lambda: [worker.pid])
        assert worker.stdout.readline() == "here\n"
        signal.raise_signal(signal.SIGUSR1)
        assert worker.stdout.readline() == "told\n"
        with pytest.raises(OSError, match="got SIGTERM"):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # of a supervisor that says it twice
        signal.raise_signal(signal.SIGTERM)
        assert worker.poll() is None
        signal.raise_signal(signal.SIGINT)
        assert worker.wait() == -signal.SIGKILL


def test_tee_without_a_folder_keeps_its_files(capsys):
    folders = []
    for words in (
        ["--tee=3", "--", "train.py"],
        ["--", "train.py", "--tee"],
        ["--tee=3", "--log_dir=mine", "--", "t"],
    ):
        assert run(words, folders.append)[0] == 0
    assert [folder.exists() for folder in folders] == [True, False, False]
    assert f"also written to {folders[0]}" in capsys.readouterr().err
    folders[0].rmdir()
