"""`accel launch --explain`: where each setting comes from, and what would be run."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from accel_cli.output import Table
from accel_cli.redact import redact
from accel_state.settings import OPTIONS
from accel_state.settings.environ import as_text as value_text
from accel_state.settings.merge import TITLES
from accel_state.settings.model import value_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel_cli.launch.job import Job
    from accel_cli.launch.plan import LaunchPlan


def explain(
    plan: LaunchPlan, job: Job, environ: Mapping[str, str], notes: Sequence[str] = ()
) -> list[Table | str]:
    """Return what would be run, and why."""
    return [
        Table(head=("setting", "value", "comes from"), rows=tuple(_settings(plan))),
        f"\nway: {plan.launcher.explain}",
        f"\ncommand:\n  {shlex.join(job.command)}",
        "\n  ".join(["\nenvironment, as far as it differs:", *_differences(environ, job.environ)]),
        *(f"\nnote: {note}" for note in notes),
    ]


def _settings(plan: LaunchPlan) -> list[tuple[str, str, str]]:
    """Return every setting that has a source, and the number of processes, which is decided in any case."""
    rows: list[tuple[str, str, str]] = []
    for option in OPTIONS:
        source_of = plan.merged.source_of(option.path)
        if option.path == "launch.num_processes":
            origin = source_of.origin if source_of.value is not None else "this machine"
            rows.append((option.path, str(plan.launch.num_processes), origin))
        elif source_of.value is not None:
            value = value_at(plan.merged.settings, option.path)
            off = option.section in TITLES and not value_at(plan.merged.settings, option.section)
            text = redact(option.path, value_text(source_of.value if value is None else value))
            if not off:
                rows.append((option.path, text, source_of.origin))
            elif option.name and source_of.layer < 3:
                rows.append(
                    (
                        option.path,
                        value_text(source_of.value),
                        f"{source_of.origin}; not used: no {TITLES[option.section]}",
                    )
                )
    return rows


def _differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    changed = [
        f"{name}={shown if (shown := redact(name, value)) != value else shlex.quote(value)}"
        for name, value in after.items()
        if before.get(name) != value
    ]
    return [*changed, *(f"unset {name}" for name in before if name not in after)] or ["(nothing)"]
