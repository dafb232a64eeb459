"""`accel check`: run a script as selected ranks of a job, and report problems."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_cli.launch.checks import find_fp8_problem
from accel_cli.launch.hosts import HostDevices, probe_devices
from accel_cli.launch.plan import LaunchPlan, uses_cpu
from accel_cli.output import Table, redact, show, working, write_html
from accel_inspect.check.record import (
    RankRecord,
    data_problems,
    differences,
    ranks_to_check,
    transfer_problems,
)
from accel_inspect.estimate.memory import fits
from accel_inspect.trial import RankTask, environ_on_cpu, run_ranks, settings_of
from accel_ops.weights.layout import convert_bytes
from accel_state.errors import SettingsError
from accel_state.settings import Merged


def run(options: Namespace) -> int:
    """Check a script, and show the findings."""
    merged, variables = settings_of(options)
    world = options.world or merged.settings.launch.num_processes or 2
    ranks = _ranks(options, world)
    with (
        tempfile.TemporaryDirectory(prefix="accel-check-") as folder,
        working(f"running {options.script!r} as rank {', '.join(map(str, ranks))} of {world}"),
    ):
        tasks = [
            RankTask(
                script=options.script,
                arguments=tuple(options.script_arguments),
                rank=rank,
                world=world,
                local_world=min(options.devices_per_machine, world),
                folder=folder,
                batches=options.batches,
            )
            for rank in ranks
        ]
        left = run_ranks(
            tasks,
            "accel_inspect.check.rank_worker",
            environ_on_cpu(merged, variables),
            timeout=options.timeout,
            late=f"it did not end within {options.timeout} s (--timeout). Values are made up, so a loop that "
            "waits for a certain value may never end",
        )
    records = [
        RankRecord(rank=rank, stopped=record) if isinstance(record, str) else record
        for rank, record in zip(ranks, left, strict=True)
    ]
    problems = find_problems(records, merged, world, options.memory)
    if merged.settings.precision.mixed_precision == "fp8":
        problems = [*fp8_refusals(merged, probe_devices(variables, ask_torch=False)), *problems]
    if options.html is not None:
        title = f"accel check {Path(options.script).name}"
        write_html(options.html, title, _report(records, problems, merged, options.memory, quiet=False))
    if options.json:
        show(_as_json(records, problems, merged))
    else:
        show(*_report(records, problems, merged, options.memory, quiet=options.quiet))
    return int(bool(problems))


def find_problems(records: Sequence[RankRecord], merged: Merged, world: int, memory: int | None) -> list[str]:
    """Find the problems in the records of ranks; one sentence each."""
    problems = [f"rank {record.rank}: {record.stopped}" for record in records if record.stopped]
    problems += [*differences(records), *transfer_problems(records), *data_problems(records)]
    problems += [
        f"rank {record.rank} needs {convert_bytes(record.memory.device)} of {convert_bytes(memory)}:"
        " `accel estimate-memory` suggests what fits."
        for record in records
        if memory is not None and record.memory is not None and not fits(record.memory, memory)
    ]
    num_processes = merged.settings.launch.num_processes
    if num_processes not in {None, world}:
        origin = merged.source_of("launch.num_processes").origin
        problems.append(f"{origin} is {num_processes}, but --world is {world}.")
    return problems


def fp8_refusals(merged: Merged, machine: HostDevices) -> tuple[str, ...]:
    """Explain why `accel launch` would refuse the requested FP8, if the devices of the job are known.

    The job's devices are those of this machine, unless it has no GPU and the job does not run on a CPU.
    """
    facts = LaunchPlan(merged=merged, machine=machine, environ={})
    is_known = uses_cpu(merged) or (facts.is_local and machine.gpus > 0)
    problem = find_fp8_problem(merged, machine) if is_known else None
    return () if problem is None else (problem,)


def _ranks(options: Namespace, world: int) -> tuple[int, ...]:
    if options.ranks is None:
        return ranks_to_check(world, options.devices_per_machine)
    try:
        ranks = tuple(sorted({int(word) for word in options.ranks.split(",")}))
    except ValueError:
        ranks = (-1,)
    if not all(0 <= rank < world for rank in ranks):
        raise SettingsError(
            f"argument --ranks is {options.ranks!r}: expected ranks from 0 to {world - 1}, such as 0,1."
        )
    return ranks


_FP8 = "FP8 with {}: matrices are multiplied in 8 bits. Stored tensors take the same memory as with bf16."


def _report(
    records: Sequence[RankRecord],
    problems: Sequence[str],
    merged: Merged,
    memory: int | None,
    *,
    quiet: bool,
) -> list[Table | str]:
    shown = [f"problem: {problem}" for problem in problems]
    if quiet:
        return [*shown]
    changed = [
        f"  {path}: {redact(path, setting.value)} ({setting.origin})"
        for path, setting in sorted(merged.sourced.items())
    ]
    items: list[Table | str] = ["settings that differ from the defaults:", *(changed or ["  none"]), ""]
    items.append(_ranks_table(records, memory))
    if any(record.files for record in records):
        items += ["", _files_table(records)]
    titles = sorted({record.fp8 for record in records} - {""})
    items += ["", *map(_FP8.format, titles), *shown]
    if not problems:
        items.append(
            "No problem was found. Values were made up (numbers are one, masks select all), so branches "
            "that depend on values may differ in a real run."
        )
    return items


_LARGE_BYTES = 1_000_000_000
"""Host memory from which on it has a column."""


def _ranks_table(records: Sequence[RankRecord], memory: int | None) -> Table:
    is_host_shown = any(record.memory and record.memory.host >= _LARGE_BYTES for record in records)

    def row(record: RankRecord) -> tuple[str, ...]:
        strategy, device, host, fit = "-", "-", "-", "-"
        if (needed := record.memory) is not None:
            strategy, device, host = needed.strategy, *map(convert_bytes, (needed.device, needed.host))
            if memory is not None:
                fit = "fits" if fits(needed, memory) else "too large"
        result = "failed" if record.stopped else "passed"
        shown_host = (host,) if is_host_shown else ()
        return (str(record.rank), result, strategy, str(len(record.events)), device, *shown_host, fit)

    host = ("main memory",) if is_host_shown else ()
    head = ("rank", "result", "strategy", "collectives", "memory", *host, "verdict")
    return Table(head=head, rows=tuple(map(row, records)))


def _files_table(records: Sequence[RankRecord]) -> Table:
    files: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for record in records:
        for file in record.files:
            files.setdefault((file.name, file.where), []).append((record.rank, file.nbytes))
    rows: list[tuple[str, ...]] = []
    for (name, where), written in files.items():
        nbytes, ranks = written[-1][1], sorted({rank for rank, _ in written})
        size = convert_bytes(nbytes) if nbytes else "small"
        rows.append((name, size, ", ".join(map(str, ranks)), where))
    head = ("file", "size", "by rank", "where")
    return Table(title="checkpoint files of the checked ranks", head=head, rows=tuple(rows))


def _as_json(records: Sequence[RankRecord], problems: Sequence[str], merged: Merged) -> str:
    ranks: dict[int, dict[str, Any]] = {}
    for record in records:
        ranks[record.rank] = {
            "stopped": record.stopped,
            **({"fp8": record.fp8} if record.fp8 else {}),
            "collectives": [*map(str, record.events)],
            "files": {file.name: file.nbytes for file in record.files},
            "memory": None,
        }
        if (needed := record.memory) is not None:
            about = {"strategy": needed.strategy, "memory": needed.device, "parts": dict(needed.parts)}
            ranks[record.rank] |= {**about, "host memory": needed.host}
    settings = {
        path: {"value": str(redact(path, setting.value)), "origin": setting.origin}
        for path, setting in sorted(merged.sourced.items())
    }
    return json.dumps({"settings": settings, "ranks": ranks, "problems": [*problems]}, indent=2)
