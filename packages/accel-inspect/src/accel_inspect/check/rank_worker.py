"""Run the user's script as a rank of `accel check`, on fake tensors; fork a process for each of several."""

from __future__ import annotations

import contextlib
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accel_inspect.check.outputs import keep_outputs
from accel_inspect.check.patches import install
from accel_inspect.check.record import RankRecord, RankTask, exit_reason
from accel_inspect.check.recorder import CollectiveRecorder
from accel_inspect.estimate.memory import ModelSizes
from accel_inspect.estimate.meta_model import sizes_of
from accel_state import environ
from accel_state.torch_private import FakeStore


def main(task: RankTask) -> None:
    """Run as a rank, and write its record."""
    dist.init_process_group("fake", rank=task.rank, world_size=task.world, store=FakeStore())
    recorder = CollectiveRecorder()
    install(recorder, task)
    keep_outputs(task)
    with recorder.on_fake_tensors():
        stopped = run_script(task)
    tracker = recorder.tracker
    record = RankRecord(
        rank=task.rank,
        strategy=recorder.strategy,
        fp8=recorder.fp8,
        buckets=recorder.buckets,
        on_rank=recorder.on_rank,
        sizes=_sizes(recorder),
        moments=() if tracker is None else tracker.moments,
        parts={} if tracker is None or not recorder.is_sharded else tracker.parts,
        host=recorder.host,
        events=tuple(recorder.events),
        files=tuple(recorder.files),
        loaders=tuple(recorder.loaders.values()),
        stopped=stopped,
    )
    write_record(task, record)


def run_script(task: RankTask) -> str:
    """Run the script; return the reason if it stopped early."""
    sys.argv = [task.script, *task.arguments]
    sys.path.insert(0, str(Path(task.script).resolve().parent))
    try:
        runpy.run_path(str(Path(task.script).absolute()), run_name="__main__")
    except SystemExit as exit_request:
        code = exit_request.code
        return "" if code in {None, 0} else f"it exits with {code!r}"
    except Exception as error:  # noqa: BLE001 - whatever the script raises is reported
        traceback.print_exc()
        where = next(
            (
                f" at {Path(frame.filename).name}:{frame.lineno}"
                for frame in reversed(traceback.extract_tb(error.__traceback__))
                if Path(frame.filename).resolve() == Path(task.script).resolve()
            ),
            "",
        )
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}{where}: {lines[0]}"
    return ""


def _sizes(recorder: CollectiveRecorder) -> ModelSizes | None:
    if not recorder.models:
        return None
    models = [sizes_of(model) for model in recorder.models]
    return ModelSizes(
        parameters=sum(sizes.parameters for sizes in models),
        trainable=sum(sizes.trainable for sizes in models),
        blocks=tuple(block for sizes in models for block in sizes.blocks),
        largest=max(sizes.largest for sizes in models),
        buffers=sum(sizes.buffers for sizes in models),
    )


_POLL_SECONDS = 0.05


def fork_ranks(
    tasks: Sequence[RankTask],
    run: Callable[[Any], None] = main,
    *,
    timeout: int,
    at_once: int,
    grace: int | None = None,
) -> None:
    """Fork one process for each rank, with the modules that this one has imported.

    Args:
        tasks: The tasks.
        run: Runs a task, and writes its record.
        timeout: Seconds that each may take.
        at_once: The number of processes at a time.
        grace: Seconds that ranks which wait for each other are left when one has failed; `timeout` if None.
    """
    waiting, running = [*reversed(tasks)], dict[int, tuple[RankTask, float]]()
    while waiting or running:
        while waiting and len(running) < at_once:
            task = waiting.pop()
            running[_fork(task, run)] = (task, time.monotonic() + timeout)
        for pid, (task, until) in list(running.items()):
            is_late = time.monotonic() > until
            if is_late:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, 0 if is_late else os.WNOHANG)
            if not done:
                continue
            del running[pid]
            code = os.waitstatus_to_exitcode(status)
            if is_late or not Path(task.output).is_file():
                why = (
                    task.timeout_reason(timeout)
                    if is_late
                    else exit_reason(code, _log(task).read_text("utf-8", "replace"))
                )
                write_record(task, RankRecord(rank=task.rank, stopped=why))
                if grace is not None:
                    end = time.monotonic() + grace
                    running = {pid: (other, min(until, end)) for pid, (other, until) in running.items()}
        time.sleep(_POLL_SECONDS)


def import_often_needed(script: Path) -> None:
    """Import slow modules that all ranks need."""
    import_module("torch._dynamo")  # Fake tensors need little of it.
    if "transformers" in script.read_text("utf-8", "replace"):
        with contextlib.suppress(ImportError):
            import_module("transformers.modeling_utils")


def _fork(task: RankTask, run: Callable[[Any], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with _log(task).open("wb") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        environ.publish(task.environment)
        run(task)
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _log(task: RankTask) -> Path:
    return Path(task.output).with_suffix(".log")


def write_record(task: RankTask, record: object) -> None:
    """Write the record of a task."""
    Path(task.output).write_bytes(pickle.dumps(record))


def run_tasks(tasks: Sequence[RankTask], *, timeout: int, at_once: int) -> None:
    """Run all tasks."""
    import_often_needed(Path(tasks[0].script))
    if len(tasks) == 1:
        main(tasks[0])
    else:
        fork_ranks(tasks, timeout=timeout, at_once=at_once)


def run_file(path: Path, run: Callable[..., None]) -> None:
    """Run the tasks in a file of `record.run_ranks`, and end the process."""
    tasks, timeout, at_once = pickle.loads(path.read_bytes())  # noqa: S301 - `record` wrote it
    run(tasks, timeout=timeout, at_once=at_once)
    # The records are written; clearing every module of torch would take a fifth of a short check.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    run_file(Path(sys.argv[1]), run_tasks)
