"""Run the user's script as one rank of `accel check`, on fake tensors."""

from __future__ import annotations

import contextlib
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch.distributed as dist

from accel_cli.commands.check.patches import install
from accel_cli.commands.check.record import RankRecord, RankTask, exit_reason, timeout_reason
from accel_cli.commands.check.recorder import CollectiveRecorder
from accel_cli.commands.estimate.memory import ModelSizes
from accel_cli.commands.estimate.meta_model import sizes_of
from accel_state import environ
from accel_state.torch_private import FakeStore, import_compiler

_PAUSE = 0.05


def main(order: RankTask) -> None:
    """Run as a rank, and write its record."""
    dist.init_process_group("fake", rank=order.rank, world_size=order.world, store=FakeStore())
    recorder = CollectiveRecorder()
    install(recorder, order)
    stopped = _run(recorder, order)
    record = RankRecord(
        rank=order.rank,
        strategy=recorder.strategy,
        fp8=recorder.fp8,
        buckets=recorder.buckets,
        on_rank=recorder.on_rank,
        sizes=_sizes(recorder),
        moments=() if recorder.ledger is None else recorder.ledger.moments,
        parts={} if recorder.meter is None else recorder.meter.parts,
        host=recorder.host,
        events=tuple(recorder.events),
        files=tuple(recorder.files),
        loaders=tuple(recorder.loaders.values()),
        stopped=stopped,
    )
    _write(order, record)


def _run(recorder: CollectiveRecorder, order: RankTask) -> str:
    """Run the script; return the reason if it stopped early."""
    sys.argv = [order.script, *order.arguments]
    sys.path.insert(0, str(Path(order.script).resolve().parent))
    try:
        with recorder.watching():
            runpy.run_path(order.script, run_name="__main__")
    except SystemExit as leaving:
        return "" if leaving.code in {None, 0} else f"it exits with {leaving.code!r}"
    except Exception as error:  # noqa: BLE001 - whatever the script raises is what was found
        traceback.print_exc()
        where = next(
            (
                f" at {Path(frame.filename).name}:{frame.lineno}"
                for frame in reversed(traceback.extract_tb(error.__traceback__))
                if Path(frame.filename).resolve() == Path(order.script).resolve()
            ),
            "",
        )
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}{where}: {lines[0]}"
    return ""


def _sizes(recorder: CollectiveRecorder) -> ModelSizes | None:
    if not recorder.models:
        return None
    each = [sizes_of(model) for model in recorder.models]
    return ModelSizes(
        parameters=sum(one.parameters for one in each),
        trainable=sum(one.trainable for one in each),
        blocks=tuple(block for one in each for block in one.blocks),
        largest=max(one.largest for one in each),
        buffers=sum(one.buffers for one in each),
    )


def fork_ranks(orders: Sequence[RankTask], *, timeout: int, at_once: int) -> None:
    """Fork one process for each rank, with the modules that this one has imported."""
    waiting, running = [*reversed(orders)], dict[int, tuple[RankTask, float]]()
    while waiting or running:
        while waiting and len(running) < at_once:
            order = waiting.pop()
            running[_fork(order)] = (order, time.monotonic() + timeout)
        for pid, (order, until) in list(running.items()):
            is_late = time.monotonic() > until
            if is_late:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, 0 if is_late else os.WNOHANG)
            if not done:
                continue
            del running[pid]
            code = os.waitstatus_to_exitcode(status)
            if is_late or not Path(order.output).is_file():
                why = (
                    timeout_reason(timeout)
                    if is_late
                    else exit_reason(code, _log(order).read_text("utf-8", "replace"))
                )
                _write(order, RankRecord(rank=order.rank, stopped=why))
        time.sleep(_PAUSE)


def import_often_needed(script: Path) -> None:
    """Import slow modules that all ranks need."""
    import_compiler()  # fake tensors need little of it
    if "transformers" in script.read_text("utf-8", "replace"):
        with contextlib.suppress(ImportError):
            import_module("transformers.modeling_utils")


def _fork(order: RankTask) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with _log(order).open("wb") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        environ.publish(order.environment)
        main(order)
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _log(order: RankTask) -> Path:
    return Path(order.output).with_suffix(".log")


def _write(order: RankTask, record: RankRecord) -> None:
    Path(order.output).write_bytes(pickle.dumps(record))


def _wait_for_start(path: Path) -> None:
    orders, timeout, at_once = pickle.loads(path.read_bytes())  # noqa: S301 - `rank_runner` wrote it
    import_often_needed(Path(orders[0].script))
    if len(orders) == 1:
        main(orders[0])
    else:
        fork_ranks(orders, timeout=timeout, at_once=at_once)
    # The records are written; to clear every module of torch would take a fifth of a short check.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _wait_for_start(Path(sys.argv[1]))
