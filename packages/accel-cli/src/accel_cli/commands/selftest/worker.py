"""Run the checks of `accel test` one after the other, and update this rank's report."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch

from accel_cli.commands.selftest.checks import CHECKS, DiffersError, Session
from accel_cli.commands.selftest.results import FAILED, PASSED, RUNNING, SKIPPED, Outcome, Report
from accel_cli.commands.selftest.speed import speeds
from accel_plugins.kwargs.run import InitProcessGroupKwargs
from accel_state.partial_state import PartialState
from accel_train.accelerator import Accelerator


def main(folder: Path, timeout: timedelta) -> int:
    """Run all checks; write `rank<rank>.json` to a folder that all ranks of a node share.

    Args:
        folder: The folder.
        timeout: How long ranks wait for each other.
    """
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)])
    session = Session(accelerator=accelerator, precision=str(accelerator.mixed_precision), folder=folder)
    report = Report(
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        facts={
            "device": str(accelerator.device),
            "device type": accelerator.device.type,
            "accelerators": _accelerators(),
            "threads": torch.get_num_threads(),
            "strategy": str(accelerator.distributed_type.value),
            "mixed precision": session.precision,
        },
    )
    for name in CHECKS:
        _write(folder, _with(report, Outcome(name=name, state=RUNNING)))
        outcome, in_step = _outcome(name, session)
        report = _with(report, outcome)
        _write(folder, report)
        if not in_step:  # others may wait for this process: its end is what tells them
            return 1
    failed = any(outcome.state == FAILED for outcome in report.outcomes)
    if not failed:
        _write(folder, replace(report, speeds=speeds()))
    PartialState().destroy_process_group()
    return int(failed)


def _outcome(name: str, session: Session) -> tuple[Outcome, bool]:
    """Run a check; return its outcome and whether this rank is in step with the others."""
    start = time.perf_counter()
    try:
        detail, state, in_step = CHECKS[name](session), PASSED, True
    except DiffersError as error:
        detail, state, in_step = str(error), FAILED, True
    except Exception as error:
        logging.getLogger(__name__).exception("%s", name)
        lines = str(error).strip().splitlines() or [""]
        detail, state, in_step = f"{type(error).__name__}: {lines[0]}", FAILED, False
    if not detail:
        detail, state = "the config does not ask for it", SKIPPED
    seconds = time.perf_counter() - start
    return Outcome(name=name, state=state, detail=detail, seconds=seconds), in_step


def _with(report: Report, outcome: Outcome) -> Report:
    others = tuple(one for one in report.outcomes if one.name != outcome.name)
    return replace(report, outcomes=(*others, outcome))


def _accelerators() -> str:
    """Return the accelerators of this host, used or not; empty if there are none."""
    if not torch.accelerator.is_available():
        return ""
    return f"{torch.accelerator.device_count()} x {torch.accelerator.current_accelerator()}"


def _write(folder: Path, report: Report) -> None:
    path = folder / f"rank{report.rank}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(report)), encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), timedelta(seconds=float(sys.argv[2]))))
