"""`accel test`: launch the checks on every device, and report their outcomes; torch-free."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from accel_cli.output import Table, show, working, write_html
from accel_state.files import read_json
from accel_state.frozen import frozen

PASSED, FAILED, SKIPPED, RUNNING = "passed", "failed", "skipped", "running"


@frozen
class Outcome:
    """Outcome of a check, on one rank or on all ranks."""

    name: str
    state: str
    detail: str = ""
    seconds: float = 0.0


@frozen
class RankReport:
    """Report of one rank.

    Args:
        facts: Its device and host.
        speeds: Bytes per second, by type of transfer.
    """

    rank: int
    world_size: int
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    outcomes: tuple[Outcome, ...] = ()
    speeds: Mapping[str, float] = field(default_factory=dict[str, float])


def combine(reports: Sequence[RankReport]) -> tuple[Outcome, ...]:
    """Combine the outcomes over all ranks. A check fails if it fails, or did not end, on any rank."""

    def ranks_text(ranks: Sequence[int]) -> str:
        if len(ranks) == reports[0].world_size:
            return "every rank" if len(ranks) > 1 else "here"
        return f"rank {', '.join(map(str, sorted(ranks)))}"

    combined: list[Outcome] = []
    for name in (outcome.name for outcome in reports[0].outcomes):
        outcomes = {
            report.rank: outcome for report in reports for outcome in report.outcomes if outcome.name == name
        }
        first = outcomes[min(outcomes)]
        state, detail = first.state, first.detail
        failed = [rank for rank, outcome in outcomes.items() if outcome.state == FAILED]
        unfinished = [rank for rank, outcome in outcomes.items() if outcome.state == RUNNING]
        if failed:
            state, detail = FAILED, f"{ranks_text(failed)}: {outcomes[min(failed)].detail}"
        elif unfinished:
            state, detail = FAILED, f"{ranks_text(unfinished)} did not finish"
        seconds = max(outcome.seconds for outcome in outcomes.values())
        combined.append(Outcome(name=name, state=state, detail=detail, seconds=seconds))
    return tuple(combined)


ABOUT: Mapping[str, str] = {
    "processes": (
        "The processes cannot reach each other, or share a device. Check num_processes, gpu_ids and, on "
        "several machines, main_process_ip, main_process_port and the firewall. `accel launch "
        "--explain` shows the source of each value."
    ),
    "collectives": (
        "Data is damaged or lost in transfer. Run with NCCL_DEBUG=INFO for details. Set "
        "NCCL_P2P_DISABLE=1 if the IOMMU or ACS blocks transfers between GPUs, or NCCL_SOCKET_IFNAME if "
        "there are several networks."
    ),
    "data loader": "Samples are lost or repeated. Please report this with the output of `accel env`.",
    "training": (
        "Training differs from training in one process. If collectives passed, please report this with "
        "the output of `accel env`."
    ),
    "mixed precision": (
        "The configured precision does not work on this device. Use bf16 on recent GPUs and CPUs, fp16 "
        "on older GPUs, or mixed_precision: no."
    ),
    "checkpoint": "A loaded state differs from the saved one. Check that the disk is not full and that "
    "the folder is shared.",
}
"""The advice for a check that failed, by its name."""

_SLOW_COPY = 3e9
"""Bytes per second of a PCIe 3.0 x4 link (pcisig.com)."""

_SLOW_REDUCE = 2e9
"""Bytes per second that GPUs of one machine exceed even through host memory."""


def advice(outcomes: Sequence[Outcome], reports: Sequence[RankReport], *, cores: int) -> list[str]:
    """Return advice, one sentence per problem.

    Example:
        >>> advice([Outcome(name="data loader", state="failed")], [], cores=2)
        ['Samples are lost or repeated. Please report this with the output of `accel env`.']
    """
    lines = [ABOUT[check.name] for check in outcomes if check.state == FAILED and check.name in ABOUT]
    if not reports:
        return lines
    first = reports[0]
    on_accelerator = first.facts.get("device type") not in {None, "cpu"}
    threads = sum(int(report.facts.get("threads", 0)) for report in reports)
    copy = first.speeds.get("host to device, pinned")
    reduce = first.speeds.get("all-reduce")
    if not on_accelerator and first.facts.get("accelerators"):
        lines.append(
            f"There is an accelerator ({first.facts['accelerators']}), but the config uses the CPU: "
            "check use_cpu and ACCELERATE_USE_CPU."
        )
    if threads > 2 * cores:
        lines.append(
            f"{threads} threads of all processes share {cores} cores: set num_cpu_threads_per_process, or"
            " OMP_NUM_THREADS."
        )
    if on_accelerator and copy is not None and copy < _SLOW_COPY:
        lines.append(
            f"Copies to the device reach {copy / 1e9:.1f} GB/s: check the width of its PCIe link"
            " (`nvidia-smi -q -d PERFORMANCE`, `lspci -vv`)."
        )
    if on_accelerator and reduce is not None and reduce < _SLOW_REDUCE:
        lines.append(
            f"All-reduce reaches {reduce / 1e9:.1f} GB/s: check how devices are connected (`nvidia-smi "
            "topo -m`), NCCL_P2P_DISABLE, and the network between machines."
        )
    return lines


WORKER = "accel_cli.commands.selftest_checks"


def run(options: Namespace) -> int:
    """Run the checks and show the results.

    Returns:
        0 if all checks passed, 1 if one failed, 2 if the launch failed.
    """
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
    outcomes = combine(reports)
    failed = [outcome for outcome in outcomes if outcome.state == FAILED]
    lines = advice(outcomes, reports, cores=os.cpu_count() or 1)
    if options.html is not None:
        title = f"accel test on {reports[0].world_size} process(es)"
        write_html(options.html, title, _report(outcomes, reports, lines, seconds, quiet=False))
    if options.json:
        facts = {
            "processes": [dict(report.facts) for report in reports],
            "checks": {
                outcome.name: {"result": outcome.state, "what": outcome.detail, "seconds": outcome.seconds}
                for outcome in outcomes
            },
            "bytes per second": dict(reports[0].speeds),
            "advice": lines,
            "seconds": seconds,
        }
        show(json.dumps(facts, indent=2))
    else:
        show(*_report(failed if options.quiet else outcomes, reports, lines, seconds, quiet=options.quiet))
    if failed or code:
        sys.stderr.write(output)
    return 1 if failed or code else 0


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
    """Run a command line for at most `limit` seconds; return its exit code and output."""
    with tempfile.TemporaryFile() as output:
        with subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ) as process:
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                process.terminate()  # The launcher forwards it to the processes.
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
        output.seek(0)
        return process.returncode, output.read().decode(errors="replace")


def read_reports(folder: Path) -> list[RankReport]:
    """Read the reports of the processes, by rank."""
    reports: list[RankReport] = []
    for path in folder.glob("rank*.json"):
        fields: dict[str, Any] = read_json(path)
        outcomes = tuple(Outcome(**outcome) for outcome in fields.pop("outcomes"))
        reports.append(RankReport(**fields, outcomes=outcomes))
    return sorted(reports, key=lambda report: report.rank)


def _report(
    outcomes: Sequence[Outcome], reports: list[RankReport], lines: list[str], seconds: float, *, quiet: bool
) -> list[Table | str]:
    facts, size, items = reports[0].facts, reports[0].world_size, list[Table | str]()
    if not quiet:
        items.append(
            f"{size} process(es), {facts['strategy']}, on {facts['device type']}, mixed precision "
            f"{facts['mixed precision']}"
        )
    rows = tuple(
        (outcome.name, outcome.state, f"{outcome.seconds:.1f} s", outcome.detail) for outcome in outcomes
    )
    if rows:
        items.append(Table(head=("check", "result", "time", "what"), rows=rows))
    if not quiet and reports[0].speeds:
        speeds = tuple((name, f"{speed / 1e9:.2f} GB/s") for name, speed in reports[0].speeds.items())
        items += ["", Table(head=("moved", "speed"), rows=speeds)]
    items += [f"advice: {line}" for line in lines]
    if not quiet:
        failed = sum(outcome.state == FAILED for outcome in outcomes)
        summary = f"{failed} check(s) failed." if failed else "This machine trains correctly."
        items.append(f"{summary} ({seconds:.0f} s)")
    return items
