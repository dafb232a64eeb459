"""`accel doctor`: run a script on ranks and on one process, compare the records, and report."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace

from accel_cli.output import show, working
from accel_inspect.doctor.causes import Diagnosis
from accel_inspect.doctor.compare import compare
from accel_inspect.doctor.record import ONE, PLAIN, RANKS, RESUMED, Records, RunRecord
from accel_inspect.trial import RankTask, environ_on_cpu, run_ranks, settings_of
from accel_state.settings import worker_environ
from accel_state.topology import free_port

_GRACE_SECONDS = 20
"""How long the other ranks may wait for one that has failed."""


def run(options: Namespace) -> int:
    """Run the script, compare the runs, and show the diagnoses; return 1 if one differs."""
    merged, variables = settings_of(options)
    world = merged.settings.launch.num_processes or 2
    if options.on_device:
        variables = worker_environ(merged.settings, variables)
    else:
        variables = environ_on_cpu(merged, variables)
    with (
        tempfile.TemporaryDirectory(prefix="accel-doctor-") as folder,
        working(f"running {options.script!r} on {world} ranks and on one process"),
    ):
        records = run_all(options, world, folder, variables)
    diagnoses = compare(records)
    if options.json:
        show(as_json(records, diagnoses))
    else:
        show(*(str(diagnosis) for diagnosis in diagnoses if diagnosis.differs or not options.quiet))
    return int(any(diagnosis.differs for diagnosis in diagnoses))


def run_all(options: Namespace, world: int, folder: str, variables: Mapping[str, str]) -> Records:
    """Run the script once for each comparison, and return the records by run and rank."""
    runs = {RANKS: world, ONE: 1, PLAIN: 1} | ({} if options.no_resume else {RESUMED: world})
    task = RankTask(
        script=options.script,
        arguments=tuple(options.script_arguments),
        rank=0,
        world=world,
        local_world=world,
        folder=folder,
        port=free_port(),
        steps=options.steps,
        blocks=options.blocks or 0,
    )
    late = f"it has not ended: it was stopped after {options.timeout} s (--timeout), or after another rank"
    records: dict[str, list[RunRecord]] = {}
    for run, size in runs.items():
        of_run = replace(task, run=run, world=size, local_world=size, saves=run == RANKS and RESUMED in runs)
        left = run_ranks(
            [replace(of_run, rank=rank) for rank in range(size)],
            "accel_inspect.doctor.rank_worker",
            variables,
            timeout=options.timeout,
            late=late,
            at_once=size,
            grace=_GRACE_SECONDS,
        )
        records[run] = [
            RunRecord(run=run, rank=rank, stopped=record) if isinstance(record, str) else record
            for rank, record in enumerate(left)
        ]
        task = replace(
            task,
            shards=max(record.shards for record in records[RANKS]),
            loaders_at_save=max(record.loaders_at_save for record in records[RANKS]),
            saves_within_epoch=any(record.saves_within_epoch for record in records[RANKS]),
        )
    return records


def as_json(records: Records, diagnoses: Sequence[Diagnosis]) -> str:
    """Return the report for programs."""
    facts = {
        "diagnoses": [
            {**made._asdict(), "name": made.name or "equal", "differs": made.differs} for made in diagnoses
        ],
        "runs": {
            name: [
                {
                    "rank": record.rank,
                    "strategy": record.strategy,
                    "steps": len(record.steps),
                    "losses": [backward.loss for backward in record.backwards],
                    "learning rates": [step.rates for step in record.steps],
                    "stopped": record.stopped,
                }
                for record in of_run
            ]
            for name, of_run in records.items()
        },
    }
    return json.dumps(facts, indent=2)
