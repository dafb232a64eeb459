"""`accel test`: launch the checks like a script, wait, and report the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_cli.commands.selftest.results import CHECK_NAMES, FAILED, Outcome, Report, advice, combine
from accel_cli.output import Table, show, working
from accel_state.available import require
from accel_state.regular_file import read_json

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

WORKER = "accel_cli.commands.selftest.worker"


def run(options: Namespace) -> int:
    """Run the checks and show the results.

    Returns:
        0 if all passed, 1 if one failed, 2 if nothing could be started.
    """
    if options.html is not None:
        require("plotly", "--html", install="accel-cli[plot]")
    with tempfile.TemporaryDirectory(prefix="accel-test-") as name:
        folder = Path(name)
        started = time.monotonic()
        with working("running the checks on every device"):
            code, output = launch(launch_line(options, folder), options.timeout)
        reports = read_reports(folder)
        seconds = time.monotonic() - started
    if not reports:
        sys.stderr.write(output)
        return code if code == 2 else 1
    outcomes = combine(reports, CHECK_NAMES)
    failed = [one for one in outcomes if one.state == FAILED]
    lines = advice(outcomes, reports, cores=os.cpu_count() or 1)
    if options.html is not None:
        write_html(Path(options.html), outcomes, reports, lines)
    if options.json:
        show(_as_json(outcomes, reports, lines, seconds))
    else:
        _print_report(failed if options.quiet else outcomes, reports, lines, seconds, quiet=options.quiet)
    if failed or code:
        sys.stderr.write(output)
    return 1 if failed or code else 0


def write_html(path: Path, outcomes: Sequence[Outcome], reports: list[Report], lines: list[str]) -> None:
    """Write the report of a test."""
    html = import_module("accel_cli.html_report")
    speeds = reports[0].speeds
    facts = tuple((name, str(value)) for name, value in reports[0].facts.items())
    items = [
        html.seconds_by_check(outcomes),
        *([html.speed_bars(speeds)] if speeds else []),
        Table(
            head=("check", "result", "what"),
            rows=tuple((one.name, one.state, one.detail) for one in outcomes),
        ),
        Table(head=("rank 0", ""), rows=facts),
        *(f"Advice: {line}" for line in lines),
    ]
    failed = [f"{one.name}: {one.detail}" for one in outcomes if one.state == FAILED]
    title = f"accel test on {reports[0].world_size} process(es)"
    html.write_report(path, title, items, failed)


def launch_line(options: Namespace, folder: Path) -> list[str]:
    """Return the command line that runs the checks: `accel launch`, with the same flags."""
    flags: list[str] = ["--quiet"]
    for name in ("config_file", "num_processes", "mixed_precision"):
        value = getattr(options, name)
        if value is not None:
            flags += [f"--{name}", str(value)]
    if options.cpu:
        flags.append("--cpu")
    worker = [WORKER, str(folder), str(options.timeout / 3)]
    return [sys.executable, "-m", "accel_cli", "launch", *flags, "-m", *worker]


def launch(line: Sequence[str], limit: float) -> tuple[int, str]:
    """Run a command line for at most `limit` seconds; return its exit code, and what it wrote."""
    with tempfile.TemporaryFile() as output:
        with subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ) as process:
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                process.terminate()  # the launcher hands it on to the processes
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
        output.seek(0)
        return process.returncode, output.read().decode(errors="replace")


def read_reports(folder: Path) -> list[Report]:
    """Read the reports of the processes, by rank."""
    found: list[dict[str, Any]] = [read_json(path) for path in folder.glob("rank*.json")]
    for one in found:
        one["outcomes"] = tuple(Outcome(**outcome) for outcome in one["outcomes"])
    return sorted((Report(**one) for one in found), key=lambda report: report.rank)


def _print_report(
    outcomes: Sequence[Outcome], reports: list[Report], lines: list[str], seconds: float, *, quiet: bool
) -> None:
    facts, size = reports[0].facts, reports[0].world_size
    if not quiet:
        show(
            f"{size} process(es), {facts['strategy']}, on {facts['device type']}, mixed precision "
            f"{facts['mixed precision']}"
        )
    rows = tuple((one.name, one.state, f"{one.seconds:.1f} s", one.detail) for one in outcomes)
    if rows:
        show(Table(head=("check", "result", "time", "what"), rows=rows))
    if not quiet and reports[0].speeds:
        speeds = tuple((name, f"{speed / 1e9:.2f} GB/s") for name, speed in reports[0].speeds.items())
        show("", Table(head=("moved", "speed"), rows=speeds))
    for line in lines:
        show(f"advice: {line}")
    if not quiet:
        bad = sum(one.state == FAILED for one in outcomes)
        summary = "This machine trains correctly." if not bad else f"{bad} check(s) failed."
        show(f"{summary} ({seconds:.0f} s)")


def _as_json(outcomes: Sequence[Outcome], reports: list[Report], lines: list[str], seconds: float) -> str:
    facts: dict[str, Any] = {
        "processes": [dict(report.facts) for report in reports],
        "checks": {
            one.name: {"result": one.state, "what": one.detail, "seconds": one.seconds} for one in outcomes
        },
        "bytes per second": dict(reports[0].speeds),
        "advice": lines,
        "seconds": seconds,
    }
    return json.dumps(facts, indent=2)
