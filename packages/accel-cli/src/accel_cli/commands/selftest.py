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
from pathlib import Path
from typing import Any

from accel_cli.output import Table, show, working, write_html
from accel_state.files import read_json

PASSED, FAILED, SKIPPED, RUNNING = "passed", "failed", "skipped", "running"


Report = Mapping[str, Any]
"""What a rank reports: its rank and world size, facts, the result of each check, and bytes per second."""


def combine(reports: Sequence[Report]) -> dict[str, dict[str, Any]]:
    """Combine the checks of all ranks. A check fails if it fails, or did not end, on any rank."""

    def ranks_text(ranks: Sequence[int]) -> str:
        if len(ranks) == reports[0]["world_size"]:
            return "every rank" if len(ranks) > 1 else "here"
        return f"rank {', '.join(map(str, ranks))}"

    combined: dict[str, dict[str, Any]] = {}
    for name in reports[0]["checks"]:
        checks = {report["rank"]: report["checks"][name] for report in reports}
        failed = [rank for rank in sorted(checks) if checks[rank]["result"] == FAILED]
        unfinished = [rank for rank in sorted(checks) if checks[rank]["result"] == RUNNING]
        combined[name] = {
            **checks[min(checks)],
            "seconds": max(check["seconds"] for check in checks.values()),
        }
        if failed:
            what = f"{ranks_text(failed)}: {checks[failed[0]]['what']}"
            combined[name] |= {"result": FAILED, "what": what}
        elif unfinished:
            combined[name] |= {"result": FAILED, "what": f"{ranks_text(unfinished)} did not finish"}
    return combined


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


def advice(checks: Mapping[str, Mapping[str, Any]], reports: Sequence[Report], *, cores: int) -> list[str]:
    """Return advice, one sentence per problem."""
    lines = [ABOUT[name] for name, check in checks.items() if check["result"] == FAILED]
    if not reports:
        return lines
    facts, speeds = reports[0]["facts"], reports[0]["speeds"]
    on_accelerator = facts["device type"] != "cpu"
    threads = sum(report["facts"]["threads"] for report in reports)
    copy = speeds.get("host to device, pinned")
    reduce = speeds.get("all-reduce")
    if not on_accelerator and facts["accelerators"]:
        lines.append(
            f"There is an accelerator ({facts['accelerators']}), but the config uses the CPU: "
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
        reports = sorted(map(read_json, folder.glob("rank*.json")), key=lambda report: report["rank"])
        seconds = time.monotonic() - started
    if not reports:
        sys.stderr.write(output)
        return code if code == 2 else 1
    checks = combine(reports)
    failed = {name: check for name, check in checks.items() if check["result"] == FAILED}
    lines = advice(checks, reports, cores=os.cpu_count() or 1)
    if options.html is not None:
        title = f"accel test on {reports[0]['world_size']} process(es)"
        write_html(options.html, title, _report(checks, reports[0], lines, seconds, quiet=False))
    if options.json:
        facts = {
            "processes": [report["facts"] for report in reports],
            "checks": checks,
            "bytes per second": reports[0]["speeds"],
            "advice": lines,
            "seconds": seconds,
        }
        show(json.dumps(facts, indent=2))
    else:
        shown = failed if options.quiet else checks
        show(*_report(shown, reports[0], lines, seconds, quiet=options.quiet))
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


def _report(
    checks: Mapping[str, Mapping[str, Any]], first: Report, lines: list[str], seconds: float, *, quiet: bool
) -> list[Table | str]:
    facts, items = first["facts"], list[Table | str]()
    if not quiet:
        items.append(
            f"{first['world_size']} process(es), {facts['strategy']}, on {facts['device type']}, mixed "
            f"precision {facts['mixed precision']}"
        )
    rows = tuple(
        (name, check["result"], f"{check['seconds']:.1f} s", check["what"]) for name, check in checks.items()
    )
    if rows:
        items.append(Table(head=("check", "result", "time", "what"), rows=rows))
    if not quiet and first["speeds"]:
        speeds = tuple((name, f"{speed / 1e9:.2f} GB/s") for name, speed in first["speeds"].items())
        items += ["", Table(head=("moved", "speed"), rows=speeds)]
    items += [f"advice: {line}" for line in lines]
    if not quiet:
        failed = sum(check["result"] == FAILED for check in checks.values())
        summary = f"{failed} check(s) failed." if failed else "This machine trains correctly."
        items.append(f"{summary} ({seconds:.0f} s)")
    return items
