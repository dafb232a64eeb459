"""`accel check`: try a script as some of many ranks, and tell what would go wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_cli.commands.check.record import Order, Record, differences, ranks_to_try
from accel_cli.commands.estimate.memory import Estimate, Job, estimate
from accel_cli.commands.estimate.suggest import fits
from accel_cli.config_file import given_by_config
from accel_cli.output import Table, show
from accel_cli.secrets_kept import without_secrets
from accel_ops.weights.sizes import convert_bytes, convert_file_size_to_int
from accel_state.environ import read
from accel_state.errors import SettingsError
from accel_state.settings import combine, given_by_environ, worker_environ

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence

    from accel_cli.commands.estimate.memory import Sizes
    from accel_state.settings import Merged

PLAYER = "accel_cli.commands.check.player"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What was found.

    Args:
        records: What each rank did.
        estimates: The memory of each rank, where that is known.
        problems: A sentence for each thing that is wrong.
    """

    records: tuple[Record, ...]
    estimates: Mapping[int, Estimate]
    problems: tuple[str, ...]


def run(options: Namespace) -> int:
    """Try a script, and show what was found.

    Args:
        options: What `accel_cli.commands.arguments.check` reads.

    Returns:
        0 if nothing is wrong, 1 otherwise.

    Raises:
        SettingsError: The script, the config or an argument cannot be used.
    """
    if not Path(options.script).is_file():
        raise SettingsError(f"script {options.script!r}: there is no such file.")
    memory = None if options.memory is None else _memory(options.memory)
    variables = read()
    merged = combine(given_by_environ(variables), given_by_config(options.config_file, variables))
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:  # each computes on about two cores
        records = [*pool.map(lambda rank: _play(options, rank, merged, variables), _ranks(options))]
    found = look(records, merged, options.world, memory)
    if options.json:
        show(_as_json(found, merged))
    else:
        _tell(found, merged, options, memory)
    return int(bool(found.problems))


def look(records: Sequence[Record], merged: Merged, world: int, memory: int | None) -> Findings:
    """Draw conclusions.

    Args:
        records: What each rank did.
        merged: The settings, and where they come from.
        world: How many ranks there would be.
        memory: Bytes of a device; None if nobody said.
    """
    estimates = {
        record.rank: estimate(_strategy_of(record, merged), _job(record, record.sizes, world))
        for record in records
        if record.sizes is not None
    }
    problems = [f"rank {record.rank}: {record.stopped}" for record in records if record.stopped]
    problems += [str(one) for one in differences(records)]
    if memory is not None:
        problems += [
            f"rank {rank} needs {convert_bytes(one.device)} of {convert_bytes(memory)}:"
            " `accel estimate-memory` suggests what fits."
            for rank, one in estimates.items()
            if not fits(one, memory)
        ]
    asked = merged.settings.launch.num_processes
    if asked not in {None, world}:
        origin = merged.who("launch.num_processes").origin
        problems.append(f"{origin} is {asked}, but --world is {world}.")
    return Findings(records=tuple(records), estimates=estimates, problems=tuple(problems))


def _memory(text: str) -> int:
    try:
        return convert_file_size_to_int(text)
    except SettingsError as error:
        raise SettingsError(f"argument --memory: {error}") from None


def _ranks(options: Namespace) -> tuple[int, ...]:
    if options.ranks is None:
        return ranks_to_try(options.world, options.devices_per_machine)
    try:
        ranks = tuple(sorted({int(word) for word in options.ranks.split(",")}))
    except ValueError:
        ranks = (-1,)
    if not all(0 <= rank < options.world for rank in ranks):
        raise SettingsError(
            f"argument --ranks is {options.ranks!r}: expected ranks from 0 to {options.world - 1}, as 0,1."
        )
    return ranks


def _play(options: Namespace, rank: int, merged: Merged, variables: Mapping[str, str]) -> Record:
    """Run the script as one rank, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="accel-check-") as folder:
        output, order = Path(folder) / "record.json", Path(folder) / "order.json"
        told = Order(
            script=options.script,
            arguments=tuple(options.script_arguments),
            rank=rank,
            world=options.world,
            local_world=min(options.devices_per_machine, options.world),
            batches=options.batches,
            output=str(output),
        )
        order.write_text(told.to_text(), encoding="utf-8")
        line = [sys.executable, "-m", PLAYER, str(order)]
        try:
            done = subprocess.run(
                line,
                env=player_environ(told, merged, variables),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=options.timeout,
            )
        except subprocess.TimeoutExpired:
            return Record(rank=rank, stopped=f"it has not ended after {options.timeout} s (--timeout)")
        if not output.is_file():
            lines = done.stderr.strip().splitlines() or ["nothing was said"]
            return Record(rank=rank, stopped=f"it ended with exit code {done.returncode}: {lines[-1]}")
        return Record.from_text(output.read_text(encoding="utf-8"))


def player_environ(order: Order, merged: Merged, variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that plays a rank: that of a worker, on the CPU.

    Args:
        order: What it is told.
        merged: The settings.
        variables: This process's environment.
    """
    settings = replace(
        merged.settings, process=replace(merged.settings.process, use_cpu=True, torch_device=None)
    )
    place = {
        "RANK": order.rank,
        "WORLD_SIZE": order.world,
        "LOCAL_RANK": order.rank % order.local_world,
        "LOCAL_WORLD_SIZE": order.local_world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }
    return {
        **worker_environ(settings, variables),
        **{name: str(value) for name, value in place.items()},
        "ACCELERATE_DYNAMO_BACKEND": "NO",
    }


def _job(record: Record, sizes: Sizes, world: int) -> Job:
    width = 4 if record.precision == "no" else 2
    return Job(sizes=sizes, devices=world, width=width, moments=record.moments)


def _strategy_of(record: Record, merged: Merged) -> str:
    """The name that estimates have for what would train."""
    fsdp, deepspeed = merged.settings.fsdp, merged.settings.deepspeed
    if record.strategy.startswith("fsdp"):
        if fsdp is not None and fsdp.cpu_offload:
            return "FSDP2, offloaded"
        return "FSDP2, gathered once" if fsdp is not None and fsdp.reshard_after_forward is False else "FSDP2"
    if record.strategy == "deepspeed":
        stage = 2 if deepspeed is None or deepspeed.zero_stage is None else deepspeed.zero_stage
        away = deepspeed is not None and deepspeed.offload_optimizer_device not in {None, "none"}
        return f"ZeRO-{stage}{', offloaded' if away and stage > 1 else ''}" if stage else "DDP"
    return "one device" if record.strategy == "single" else "DDP"


def _tell(found: Findings, merged: Merged, options: Namespace, memory: int | None) -> None:
    if not options.quiet:
        given = [
            f"  {path}: {without_secrets(path, str(one.value))} ({one.origin})"
            for path, one in sorted(merged.given.items())
        ]
        show("settings that differ from the defaults:", *(given or ["  none"]), "")
        show(_ranks_table(found, memory))
        files = _files_table(found)
        if files is not None:
            show("", files)
        show("")
    for problem in found.problems:
        show(f"problem: {problem}")
    if not options.quiet and not found.problems:
        show("Nothing is wrong with what was tried. Values were made up, so branches on them were, too.")


def _ranks_table(found: Findings, memory: int | None) -> Table:
    def row(record: Record) -> tuple[str, ...]:
        one = found.estimates.get(record.rank)
        taken = "-" if one is None else convert_bytes(one.device)
        verdict = "-" if one is None or memory is None else ("fits" if fits(one, memory) else "too large")
        result = "failed" if record.stopped else "passed"
        strategy = "-" if one is None else one.strategy
        return (str(record.rank), result, strategy, str(len(record.events)), taken, verdict)

    head = ("rank", "result", "strategy", "collectives", "memory", "verdict")
    return Table(head=head, rows=tuple(map(row, found.records)))


def _files_table(found: Findings) -> Table | None:
    rows: dict[tuple[str, str], list[int]] = {}
    sizes: dict[tuple[str, str], int] = {}
    for record in found.records:
        for file in record.files:
            key = (file.name, file.where)
            rows.setdefault(key, []).append(record.rank)
            sizes[key] = file.nbytes
    if not rows:
        return None
    return Table(
        title="what would be written",
        head=("file", "size", "by rank", "where"),
        rows=tuple(
            (name, convert_bytes(sizes[name, where]), ", ".join(map(str, sorted(set(ranks)))), where)
            for (name, where), ranks in rows.items()
        ),
    )


def _as_json(found: Findings, merged: Merged) -> str:
    facts: dict[str, Any] = {
        "settings": {
            path: {"value": without_secrets(path, str(one.value)), "origin": one.origin}
            for path, one in sorted(merged.given.items())
        },
        "ranks": {
            record.rank: {
                "stopped": record.stopped,
                "collectives": [f"{event.kind} at {event.where}" for event in record.events],
                "files": {file.name: file.nbytes for file in record.files},
                "memory": found.estimates[record.rank].device if record.rank in found.estimates else None,
            }
            for record in found.records
        },
        "problems": list(found.problems),
    }
    return json.dumps(facts, indent=2)
