"""Rank and device of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.labels import FP8BackendType
from accel_state.rank_methods import RankMethods
from accel_train.accelerator.facet import Facet

if TYPE_CHECKING:
    import torch

    from accel_state.accelerator_state import AcceleratorState
    from accel_state.labels import DistributedType
    from accel_state.partial_state import PartialState


class ProcessFacet(Facet, RankMethods):
    """Rank, world size and device of this process."""

    __slots__ = ()

    @property
    def _process(self) -> PartialState:
        return self._parts.process

    @property
    def state(self) -> AcceleratorState:
        """The process-wide state."""
        return self._parts.state

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._parts.process.device

    @property
    def distributed_type(self) -> DistributedType:
        """The documented label of the strategy and device."""
        return self._parts.state.distributed_type

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that multiplies matrices in 8 bits; `FP8BackendType.NO` without FP8.

        Example:
            >>> from accel_train import Accelerator
            >>> Accelerator(cpu=True).fp8_backend.value
            'NO'
        """
        converter = self._parts.converter
        backend = None if converter is None else converter.recipe.backend
        return FP8BackendType(backend or "NO")

    @property
    def fp8_enabled(self) -> bool:
        """Whether matrices are multiplied in 8 bits."""
        return self.fp8_backend is not FP8BackendType.NO

    @property
    def num_processes(self) -> int:
        """Number of processes of the run."""
        return self._parts.process.num_processes

    @property
    def process_index(self) -> int:
        """The rank of this process among all."""
        return self._parts.process.process_index

    @property
    def local_process_index(self) -> int:
        """The local rank of this process."""
        return self._parts.process.local_process_index

    @property
    def multi_device(self) -> bool:
        """Whether several processes each have an accelerator of their own."""
        process = self._parts.process
        return process.num_processes > 1 and process.device.type != "cpu"

    def set_trigger(self) -> None:
        """Set a flag on this rank, which `check_trigger` returns on all ranks.

        Example:
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.set_trigger()
            >>> accelerator.check_trigger(), accelerator.check_trigger()
            (True, False)
        """
        self._parts.trigger.set()

    def check_trigger(self) -> bool:
        """Return whether any rank has called `set_trigger` since the last check; call it on every rank."""
        return self._parts.trigger.check()
