"""Combine the reports of all ranks of a test: which checks passed, which failed, and advice about these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHECK_NAMES = ("processes", "collectives", "data loader", "training", "mixed precision", "checkpoint")
"""The keys of `accel_cli.commands.selftest.checks.CHECKS`, in their order."""

PASSED, FAILED, SKIPPED, RUNNING = "passed", "failed", "skipped", "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a check, on one rank or on all."""

    name: str
    state: str
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Report of one rank.

    Args:
        facts: Its device and host.
        speeds: Bytes per second, by what was moved.
    """

    rank: int
    world_size: int
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    outcomes: tuple[Outcome, ...] = ()
    speeds: Mapping[str, float] = field(default_factory=dict[str, float])


def combine(reports: Sequence[Report], names: Sequence[str]) -> tuple[Outcome, ...]:
    """Combine the outcomes over all ranks. A check fails if it fails anywhere, or did not come to its end.

    Example:
        >>> one = Report(rank=0, world_size=1, outcomes=(Outcome(name="a", state="passed"),))
        >>> [outcome.state for outcome in combine([one], ["a", "b"])]
        ['passed', 'skipped']
    """
    return tuple(_combined(name, reports) for name in names)


def _combined(name: str, reports: Sequence[Report]) -> Outcome:
    found = {
        report.rank: outcome for report in reports for outcome in report.outcomes if outcome.name == name
    }
    seconds = max((outcome.seconds for outcome in found.values()), default=0.0)
    failed = {rank: outcome for rank, outcome in found.items() if outcome.state == FAILED}
    if failed:
        outcome = failed[min(failed)]
        where = _ranks(failed, max(report.world_size for report in reports))
        return Outcome(name=name, state=FAILED, detail=f"{where}: {outcome.detail}", seconds=seconds)
    waiting = {rank: outcome for rank, outcome in found.items() if outcome.state == RUNNING}
    if waiting:
        where = _ranks(waiting, max(report.world_size for report in reports))
        return Outcome(name=name, state=FAILED, detail=f"{where} did not come to its end", seconds=seconds)
    if not found:
        return Outcome(name=name, state=SKIPPED, detail="not reached")
    first = found[min(found)]
    return Outcome(name=name, state=first.state, detail=first.detail, seconds=seconds)


def _ranks(found: Mapping[int, object], world_size: int) -> str:
    if len(found) == world_size:
        return "every rank" if world_size > 1 else "here"
    return f"rank {', '.join(map(str, sorted(found)))}"


ABOUT: Mapping[str, str] = {
    "processes": (
        "The processes do not find each other, or share a device: look at num_processes, gpu_ids and, on"
        " several machines, main_process_ip, main_process_port and the firewall. `accel launch --explain`"
        " says where each value comes from."
    ),
    "collectives": (
        "Data arrives damaged or not at all: try NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 helps where the"
        " IOMMU or ACS stand between GPUs, NCCL_SOCKET_IFNAME where there are several networks."
    ),
    "data loader": "Samples are lost or repeated: please report this, with the output of `accel env`.",
    "training": (
        "Training differs from that of one process: if collectives passed, please report this, with the"
        " output of `accel env`."
    ),
    "mixed precision": (
        "The precision of the config does not work on this device: take bf16 on recent GPUs and CPUs, fp16 on"
        " older GPUs, or mixed_precision: no."
    ),
    "checkpoint": "Saving and loading does not give the same state: is the disk full, the folder not shared?",
}
"""By the name of a check that failed."""

_SLOW_COPY = 3e9  # bytes per second; a PCIe 3.0 x4 link, see pcisig.com
_SLOW_REDUCE = 2e9  # bytes per second on one machine; below what GPUs reach through main memory


def advice(outcomes: Sequence[Outcome], reports: Sequence[Report], *, cores: int) -> list[str]:
    """Return advice, one sentence per problem.

    Example:
        >>> advice([Outcome(name="data loader", state="failed")], [], cores=2)
        ['Samples are lost or repeated: please report this, with the output of `accel env`.']
    """
    lines = [ABOUT[one.name] for one in outcomes if one.state == FAILED and one.name in ABOUT]
    if not reports:
        return lines
    first = reports[0]
    on_accelerator = first.facts.get("device type") not in {None, "cpu"}
    threads = sum(int(report.facts.get("threads", 0)) for report in reports)
    copy = first.speeds.get("host to device, pinned")
    reduce = first.speeds.get("all-reduce")
    if not on_accelerator and first.facts.get("accelerators"):
        lines.append(
            f"There is an accelerator ({first.facts['accelerators']}), but the config computes on the CPU:"
            " look at use_cpu and at ACCELERATE_USE_CPU."
        )
    if threads > 2 * cores:
        lines.append(
            f"{threads} threads of all processes share {cores} cores: set num_cpu_threads_per_process, or"
            " OMP_NUM_THREADS."
        )
    if on_accelerator and copy is not None and copy < _SLOW_COPY:
        lines.append(
            f"Copies to the device reach {copy / 1e9:.1f} GB/s: look at the width of its PCIe link"
            " (`nvidia-smi -q -d PERFORMANCE`, `lspci -vv`)."
        )
    if on_accelerator and reduce is not None and reduce < _SLOW_REDUCE:
        lines.append(
            f"All-reduce reaches {reduce / 1e9:.1f} GB/s: look at how devices are connected (`nvidia-smi topo"
            " -m`), at NCCL_P2P_DISABLE, and at the network between machines."
        )
    return lines
