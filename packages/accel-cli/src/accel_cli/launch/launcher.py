"""A launcher: when it is used, what it runs, and how it explains itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel_cli.launch.checks import Facts
    from accel_cli.launch.job import Job
    from accel_cli.launch.plan import LaunchPlan
    from accel_state.settings import LaunchSettings

JobMaker: TypeAlias = "Callable[[LaunchPlan], Job]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A way to start the processes of a job; what a distribution registers.

    Args:
        name: The name under which it is registered.
        applies: Whether it can start what was asked for, by what is known of the machine and the settings of
            the launch, whose numbers of processes and machines are decided; pure. A launcher that is used
            only when it is selected asks for `launch.launcher`.
        job: Makes the program to become, or `"module:function"` of what does.
        explain: What happens, as one clause for `--explain`.
        check: A last look before the job runs, which raises a `SettingsError`; not asked by `--explain`.
        environ: Variables that its workers get besides those of the settings.

    Example:
        >>> row = Launcher(name="mine", applies=lambda *_: False, job="my_package:job", explain="…")
        >>> row.check is None
        True
    """

    name: str
    applies: Callable[[Facts, LaunchSettings], bool]
    job: JobMaker | str
    explain: str
    check: Callable[[LaunchPlan], None] | None = None
    environ: Callable[[LaunchPlan], Mapping[str, str]] | None = None
