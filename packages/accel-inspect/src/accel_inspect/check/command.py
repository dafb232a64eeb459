"""`accel check`: run a script as selected ranks of a job, and report problems."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_cli.launch.checks import find_fp8_problem
from accel_cli.launch.hosts import HostDevices, probe_devices
from accel_cli.launch.plan import LaunchPlan, uses_cpu
from accel_cli.output import Table, redact, show, working, write_html
from accel_inspect.check.record import (
    File,
    RankRecord,
    data_problems,
    differences,
    ranks_to_check,
    transfer_problems,
)
from accel_inspect.estimate.memory import Estimate, TrainingSetup, estimate, fits
from accel_inspect.trial import RankTask, environ_on_cpu, run_ranks, settings_of
from accel_ops.weights.layout import convert_bytes
from accel_state.errors import SettingsError
from accel_state.frozen import frozen
from accel_state.settings import Merged


@frozen
class Findings:
    """The findings of a check.

    Args:
        estimates: The memory of each rank, if known.
        problems: One sentence per problem.
    """

    records: tuple[RankRecord, ...]
    estimates: Mapping[int, Estimate]
    problems: tuple[str, ...]


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
    findings = find_problems(records, merged, world, options.memory)
    if merged.settings.precision.mixed_precision == "fp8":
        findings = replace(
            findings,
            problems=(*fp8_refusals(merged, probe_devices(variables, ask_torch=False)), *findings.problems),
        )
    if options.html is not None:
        title = f"accel check {Path(options.script).name}"
        write_html(options.html, title, _report(findings, merged, options.memory, quiet=False))
    if options.json:
        show(_as_json(findings, merged))
    else:
        show(*_report(findings, merged, options.memory, quiet=options.quiet))
    return int(bool(findings.problems))


def find_problems(records: Sequence[RankRecord], merged: Merged, world: int, memory: int | None) -> Findings:
    """Find the problems in the records of ranks."""
    estimates = {
        record.rank: estimate_of(record, world)
        for record in records
        if record.parts or record.sizes is not None
    }
    problems = [f"rank {record.rank}: {record.stopped}" for record in records if record.stopped]
    problems += [*differences(records), *transfer_problems(records), *data_problems(records)]
    if memory is not None:
        problems += [
            f"rank {rank} needs {convert_bytes(needed.device)} of {convert_bytes(memory)}:"
            " `accel estimate-memory` suggests what fits."
            for rank, needed in estimates.items()
            if not fits(needed, memory)
        ]
    num_processes = merged.settings.launch.num_processes
    if num_processes not in {None, world}:
        origin = merged.source_of("launch.num_processes").origin
        problems.append(f"{origin} is {num_processes}, but --world is {world}.")
    return Findings(records=tuple(records), estimates=estimates, problems=tuple(problems))


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


def estimate_of(record: RankRecord, world: int) -> Estimate:
    """Return the memory of a rank: as tracked, or an estimate if its strategy's code did not run."""
    selected = record.strategy
    if record.parts:
        axes = " x ".join(f"{name} {size}" for name, size in selected.axes.items() if size > 1)
        title = f"{selected.name}: {axes}" if axes else selected.name
        shown = {"working": record.parts["working"]} if selected.offloaded else record.parts
        host = sum(record.parts.values()) - sum(shown.values())
        return Estimate(strategy=title, parts=shown, host=host + record.host)
    assert record.sizes is not None  # noqa: S101 - the caller checks
    width = 4 if selected.precision == "no" else 2
    setup = TrainingSetup(
        sizes=record.sizes,
        devices=world,
        width=width,
        moments=record.moments,
        buckets=record.buckets,
        tensor=selected.axes.get("tp", 1),
        pipeline=selected.axes.get("pp", 1),
        context=selected.axes.get("cp", 1),
        on_rank=record.on_rank,
    )
    estimated = estimate(selected.counted_as or "DDP", setup)
    return replace(estimated, host=estimated.host + record.host)


_FP8 = "FP8 with {}: matrices are multiplied in 8 bits. Stored tensors take the same memory as with bf16."


def _report(findings: Findings, merged: Merged, memory: int | None, *, quiet: bool) -> list[Table | str]:
    items: list[Table | str] = []
    if not quiet:
        changed = [
            f"  {path}: {redact(path, setting.value)} ({setting.origin})"
            for path, setting in sorted(merged.sourced.items())
        ]
        items += ["settings that differ from the defaults:", *(changed or ["  none"]), ""]
        items.append(_ranks_table(findings, memory))
        files = _files_table(findings)
        if files is not None:
            items += ["", files, *_checkpoints(findings)]
        items += [
            "",
            *(_FP8.format(title) for title in sorted({record.fp8 for record in findings.records} - {""})),
        ]
    items += [f"problem: {problem}" for problem in findings.problems]
    if not quiet and not findings.problems:
        items.append(
            "No problem was found. Values were made up (numbers are one, masks select all), so branches "
            "that depend on values may differ in a real run."
        )
    return items


_LARGE_BYTES = 1_000_000_000
"""Host memory from which on it has a column."""


def _ranks_table(findings: Findings, memory: int | None) -> Table:
    is_host_shown = any(needed.host >= _LARGE_BYTES for needed in findings.estimates.values())

    def row(record: RankRecord) -> tuple[str, ...]:
        needed = findings.estimates.get(record.rank)
        result = "failed" if record.stopped else "passed"
        strategy, device, host, fit = "-", "-", "-", "-"
        if needed is not None:
            strategy, device = needed.strategy, convert_bytes(needed.device)
            host = convert_bytes(needed.host)
            if memory is not None:
                fit = "fits" if fits(needed, memory) else "too large"
        shown_host = (host,) if is_host_shown else ()
        return (str(record.rank), result, strategy, str(len(record.events)), device, *shown_host, fit)

    host = ("main memory",) if is_host_shown else ()
    head = ("rank", "result", "strategy", "collectives", "memory", *host, "verdict")
    return Table(head=head, rows=tuple(map(row, findings.records)))


def _files_table(findings: Findings) -> Table | None:
    files: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for record in findings.records:
        for file in record.files:
            files.setdefault((file.name, file.where), []).append((record.rank, file.nbytes))
    if not files:
        return None
    rows: list[tuple[str, ...]] = []
    for (name, where), written in files.items():
        nbytes, ranks = written[-1][1], sorted({rank for rank, _ in written})
        size = convert_bytes(nbytes) if nbytes else "small"
        rows.append((name, size, ", ".join(map(str, ranks)), where))
    head = ("file", "size", "by rank", "where")
    return Table(title="checkpoint files of the checked ranks", head=head, rows=tuple(rows))


_BY_FORM: Mapping[str, str] = {
    "whole": "one rank writes everything",
    "sharded": "every rank writes its shard, and any number of ranks can load them",
    "by rank": "every rank writes its shard in the strategy's own format",
}


def checkpoints(records: Sequence[RankRecord]) -> dict[str, dict[str, Any]]:
    """Summarise the checkpoints by file and line of the script, with form and size."""
    plans: dict[str, dict[str, Any]] = {}
    for record in records:
        files_by_line: dict[str, list[File]] = {}
        for file in record.files:
            if file.form:
                files_by_line.setdefault(file.where, []).append(file)
        for where, files in files_by_line.items():
            plan = plans.setdefault(where, {"form": files[0].form, "total": 0, "largest part": 0})
            plan["total"] = max(plan["total"], sum(file.full_nbytes for file in files))
            plan["largest part"] = max(plan["largest part"], sum(file.nbytes for file in files))
    return plans


def _checkpoints(findings: Findings) -> list[str]:
    lines: list[str] = []
    for where, plan in checkpoints(findings.records).items():
        full_nbytes, part = (convert_bytes(plan[key]) for key in ("total", "largest part"))
        size = f"about {full_nbytes}, at most {part} by a rank"
        if not plan["total"]:
            size = "the writing rank was not checked"
        lines.append(f"checkpoint at {where}: {plan['form']} ({_BY_FORM[plan['form']]}); {size}")
    return lines


def _as_json(findings: Findings, merged: Merged) -> str:
    def memory_of(needed: Estimate | None) -> dict[str, Any]:
        if needed is None:
            return {"memory": None}
        about = {"parts": dict(needed.parts), "host memory": needed.host}
        return {"strategy": needed.strategy, "memory": needed.device, **about}

    facts: dict[str, Any] = {
        "settings": {
            path: {"value": str(redact(path, setting.value)), "origin": setting.origin}
            for path, setting in sorted(merged.sourced.items())
        },
        "ranks": {
            record.rank: {
                "stopped": record.stopped,
                **({"fp8": record.fp8} if record.fp8 else {}),
                "collectives": [*map(str, record.events)],
                "files": {file.name: file.nbytes for file in record.files},
                **memory_of(findings.estimates.get(record.rank)),
            }
            for record in findings.records
        },
        "checkpoints": checkpoints(findings.records),
        "problems": list(findings.problems),
    }
    return json.dumps(facts, indent=2)
