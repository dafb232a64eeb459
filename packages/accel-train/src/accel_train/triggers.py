"""A flag that any rank can set and all ranks can check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from accel_state.runtime import Runtime


class Trigger:
    """A flag that is set on one rank and checked on all, such as "stop early"."""

    __slots__ = ("_raised", "_runtime")

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._raised = False

    def set(self) -> None:
        """Set the flag on this rank."""
        self._raised = True

    def check(self) -> bool:
        """Return whether any rank has set the flag since the last check, and reset it. A collective."""
        count = torch.tensor(int(self._raised), device=self._runtime.device)
        self._raised = False
        self._runtime.collectives.all_reduce(count)
        return bool(count.item())
