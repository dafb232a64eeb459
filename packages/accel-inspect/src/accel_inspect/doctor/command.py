"""`accel doctor`: run a script on ranks and on one process, compare the records, and report."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from accel_cli.output import show, working
from accel_inspect.check.command import settings_of, worker_environ_of_check
from accel_inspect.check.record import CAN_FORK, run_ranks
from accel_inspect.doctor.causes import Diagnosis
from accel_inspect.doctor.compare import compare
from accel_inspect.doctor.record import (
    ONE,
    PLAIN,
    RANKS,
    RESCALED,
    RESUMED,
    DoctorTask,
    Records,
    RunRecord,
)
from accel_state.settings import worker_environ
from accel_state.topology import free_port

WORKER = "accel_inspect.doctor.rank_worker"


def run(options: Namespace) -> int:
    """Run the script, compare the runs, and show the diagnoses; return 1 if one differs."""
    merged, variables = settings_of(options)
    world = merged.settings.launch.num_processes or 2
    environ = (
        worker_environ(merged.settings, variables)
        if options.on_device
        else worker_environ_of_check(merged, variables)
    )
    with tempfile.TemporaryDirectory(prefix="accel-doctor-") as folder:
        tasks = make_tasks(options, world, folder)
        with working(f"running {options.script!r} on {world} ranks and on one process"):
            records = run_tasks(tasks, environ, timeout=options.timeout)
    diagnoses = compare(records)
    if options.json:
        show(as_json(records, diagnoses))
    else:
        shown = [diagnosis for diagnosis in diagnoses if diagnosis.differs or not options.quiet]
        show(*map(str, shown), *([] if options.quiet else [durations(records, options)]))
    return int(any(diagnosis.differs for diagnosis in diagnoses))


def make_tasks(options: Namespace, world: int, folder: str) -> list[DoctorTask]:
    """Return the tasks of all processes, run by run."""
    port = free_port()
    runs = {RANKS: world, ONE: 1, PLAIN: 1}
    if not options.no_resume:
        runs |= {RESUMED: world, RESCALED: 1}
    return [
        DoctorTask(
            script=options.script,
            arguments=tuple(options.script_arguments),
            rank=rank,
            world=size,
            local_world=size,
            batches=0,
            port=port,
            run=name,
            steps=options.steps,
            folder=folder,
            saves=name == RANKS and not options.no_resume,
            blocks=options.blocks or 0,
        )
        for name, size in runs.items()
        for rank in range(size)
    ]


def run_tasks(tasks: Sequence[DoctorTask], variables: Mapping[str, str], *, timeout: int) -> Records:
    """Run the tasks, and return the records by run and rank."""
    groups = [[*tasks]] if CAN_FORK else [[*run] for _, run in groupby(tasks, key=lambda task: task.run)]
    records: dict[str, list[RunRecord]] = {}
    for group in groups:
        results = run_ranks(group, variables, timeout=timeout, worker=WORKER, at_once=len(group))
        for task, left in zip(group, results, strict=True):
            if isinstance(left, RunRecord):
                record = left
            else:  # the process has left none
                record = RunRecord(run=task.run, rank=task.rank, world=task.world, stopped=left.stopped)
            records.setdefault(task.run, []).append(record)
    return records


def durations(records: Records, options: Namespace) -> str:
    """Describe what was run and how long it took."""
    seconds = {name: max(record.seconds for record in of_run) for name, of_run in records.items()}
    cut = f", its lists of layers cut to {options.blocks}" if options.blocks else ""
    return (
        f"{len(records[RANKS])} ranks of {records[RANKS][0].strategy or 'no strategy'}{cut}:"
        f" {seconds[RANKS]:.1f} s; on one process with the same batches {seconds[ONE]:.1f} s, as it is"
        f" {seconds[PLAIN]:.1f} s. Dropout was off; generators were seeded before the script."
    )


def as_json(records: Records, diagnoses: Sequence[Diagnosis]) -> str:
    """Return the report for programs."""
    facts: dict[str, Any] = {
        "diagnoses": [
            {
                "check": diagnosis.check,
                "name": diagnosis.name or "equal",
                "differs": diagnosis.differs,
                "where": diagnosis.where,
                "text": diagnosis.text,
            }
            for diagnosis in diagnoses
        ],
        "runs": {
            name: [
                {
                    "rank": record.rank,
                    "strategy": record.strategy,
                    "steps": len(record.steps),
                    "losses": [backward.loss for backward in record.backwards],
                    "learning rates": [step.rates for step in record.steps],
                    "seconds": round(record.seconds, 3),
                    "stopped": record.stopped,
                }
                for record in of_run
            ]
            for name, of_run in records.items()
        },
    }
    return json.dumps(facts, indent=2)
