"""Combine the reports of all ranks of a test: which checks passed, and which failed."""

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
