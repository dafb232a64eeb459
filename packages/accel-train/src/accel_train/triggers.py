"""A flag that any process can raise and all of them see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from accel_state.runtime import Runtime


class Trigger:
    """A flag that is raised on one process and seen on all, such as "stop early".

    Args:
        runtime: Whose processes share the flag.
    """

    __slots__ = ("_raised", "_runtime")

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._raised = False

    def set(self) -> None:
        """Raise the flag on this process."""
        self._raised = True

    def check(self) -> bool:
        """Whether any process has raised the flag since the last check; lowers it. A collective."""
        count = torch.tensor(int(self._raised), device=self._runtime.device)
        self._raised = False
        self._runtime.collectives.all_reduce(count)
        return bool(count.item())
