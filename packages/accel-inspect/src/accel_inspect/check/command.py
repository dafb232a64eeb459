"""`accel check`: run a script as selected ranks of a job, and report problems."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
        working(f"running {options.script!r} as rank {_list(ranks)} of {world}"),
    ):
        task = RankTask(
            script=options.script,
            arguments=tuple(options.script_arguments),
            rank=0,
            world=world,
            local_world=min(options.devices_per_machine, world),
            folder=folder,
            batches=options.batches,
        )
        left = run_ranks(
            [replace(task, rank=rank) for rank in ranks],
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
    shown = [f"problem: {problem}" for problem in problems]
    report = _report(records, shown, merged, options.memory)
    if options.html is not None:
        write_html(options.html, f"accel check {Path(options.script).name}", report)
    if options.json:
        show(_as_json(records, problems, merged))
    else:
        show(*(shown if options.quiet else report))
    return int(bool(problems))


def find_problems(records: Sequence[RankRecord], merged: Merged, world: int, memory: int | None) -> list[str]:
    """Find the problems in the records of ranks; one sentence each."""
    problems = [f"rank {record.rank}: {record.stopped}" for record in records if record.stopped]
    problems += [*differences(records), *transfer_problems(records), *data_problems(records)]
    problems += [
        f"rank {record.rank} needs {convert_bytes(record.memory.device)} of {convert_bytes(memory)}:"
        " `accel estimate-memory` shows what fits."
        for record in records
        if memory is not None and record.memory is not None and not fits(record.memory, memory)
    ]
    num_processes = merged.settings.launch.num_processes
    if num_processes not in {None, world}:
        origin = merged.source_of("launch.num_processes").origin
        problems.append(f"{origin} is {num_processes}, but --world is {world}.")
    return problems


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


def _report(
    records: Sequence[RankRecord], problems: Sequence[str], merged: Merged, memory: int | None
) -> list[Table | str]:
    settings = [f"  {path}: {value} ({origin})" for path, (value, origin) in _settings(merged).items()]
    files: dict[tuple[str, str], dict[int, int]] = {}
    for record in records:
        for file in record.files:
            files.setdefault((file.name, file.where), {})[record.rank] = file.nbytes
    written = tuple(
        (name, convert_bytes(size) if (size := [*sizes.values()][-1]) else "small", _list(sizes), where)
        for (name, where), sizes in files.items()
    )
    head, title = ("file", "size", "by rank", "where"), "checkpoint files of the checked ranks"
    return [
        "settings that differ from the defaults:",
        *(settings or ["  none"]),
        "",
        _ranks_table(records, memory),
        *(["", Table(title=title, head=head, rows=written)] if written else []),
        "",
        *([_NO_MEMORY] if any(record.memory is None for record in records) else []),
        *(problems or [_NO_PROBLEM]),
    ]


def _settings(merged: Merged) -> dict[str, tuple[str, str]]:
    """Return the settings that differ from the defaults, with their origins."""
    return {
        path: (str(redact(path, setting.value)), setting.origin)
        for path, setting in sorted(merged.sourced.items())
    }


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


_NO_MEMORY = "Memory is known once a model is prepared. That of Megatron is not estimated."
_NO_PROBLEM = (
    "No problem was found. Values were made up (numbers are one, masks select all), so branches "
    "that depend on values may differ in a real run."
)


def _ranks_table(records: Sequence[RankRecord], memory: int | None) -> Table:
    def row(record: RankRecord) -> tuple[str, ...]:
        strategy, device, host, fit = "-", "-", "-", "-"
        if (needed := record.memory) is not None:
            strategy, device, host = needed.strategy, *map(convert_bytes, (needed.device, needed.host))
            if memory is not None:
                fit = "fits" if fits(needed, memory) else "too large"
        result = "failed" if record.stopped else "passed"
        return (str(record.rank), result, strategy, str(len(record.events)), device, host, fit)

    head = ("rank", "result", "strategy", "collectives", "memory", "main memory", "verdict")
    return Table(head=head, rows=tuple(map(row, records)))


def _as_json(records: Sequence[RankRecord], problems: Sequence[str], merged: Merged) -> str:
    ranks: dict[int, dict[str, Any]] = {}
    for record in records:
        ranks[record.rank] = about = {
            "stopped": record.stopped,
            "collectives": [*map(str, record.events)],
            "files": {file.name: file.nbytes for file in record.files},
            "memory": None,
        }
        if (needed := record.memory) is not None:
            about |= {"strategy": needed.strategy, "memory": needed.device, "host memory": needed.host}
            about["parts"] = dict(needed.parts)
    settings = {
        path: {"value": value, "origin": origin} for path, (value, origin) in _settings(merged).items()
    }
    return json.dumps({"settings": settings, "ranks": ranks, "problems": [*problems]}, indent=2)
