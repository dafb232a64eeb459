"""Rank and device of this process, and code for selected ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from accel_state.labels import FP8BackendType
from accel_train.accelerator.facet import Facet

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from accel_state.accelerator_state import AcceleratorState
    from accel_state.labels import DistributedType

P = ParamSpec("P")
R = TypeVar("R")


class ProcessFacet(Facet):
    """Rank, world size and device of this process."""

    __slots__ = ()

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
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self._parts.process.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether several processes each have an accelerator of their own."""
        process = self._parts.process
        return process.num_processes > 1 and process.device.type != "cpu"

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first of all processes."""
        return self._parts.process.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self._parts.process.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last of all processes."""
        return self._parts.process.is_last_process

    @overload
    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_main_process(self, function: None = None) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_main_process(self, function: Any = None) -> Any:
        """Decorate a function that only the main process runs; elsewhere it returns `None`."""
        return self._parts.process.on_main_process(function)

    @overload
    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_local_main_process(
        self, function: None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_local_main_process(self, function: Any = None) -> Any:
        """Decorate a function that only the first process of every node runs."""
        return self._parts.process.on_local_main_process(function)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function that only the last process runs."""
        return self._parts.process.on_last_process(function)

    @overload
    def on_process(
        self, function: Callable[P, R], process_index: int | None = None
    ) -> Callable[P, R | None]: ...
    @overload
    def on_process(
        self, function: None = None, process_index: int | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorate a function that only the process of rank `process_index` runs."""
        return self._parts.process.on_process(function, process_index)

    @overload
    def on_local_process(
        self, function: Callable[P, R], local_process_index: int | None = None
    ) -> Callable[P, R | None]: ...
    @overload
    def on_local_process(
        self, function: None = None, local_process_index: int | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorate a function that only one process of every node runs, by its local rank."""
        return self._parts.process.on_local_process(function, local_process_index)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on the main process first, then on all others."""
        return self._parts.process.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on the first process of every node first, then on the others of the node."""
        return self._parts.process.local_main_process_first()

    def split_between_processes(
        self,
        inputs: Any,
        apply_padding: bool = False,
    ) -> AbstractContextManager[Any]:
        """Yield this rank's shard of some inputs.

        Args:
            inputs: A list, tuple, dict of lists, tensor, numpy array or `datasets.Dataset`.
            apply_padding: Whether the last element is repeated until all shards are equally long, for
                results that will be gathered.

        Example:
            >>> from accel_train import Accelerator
            >>> with Accelerator(cpu=True).split_between_processes([1, 2, 3]) as mine:
            ...     mine
            [1, 2, 3]
        """
        return self._parts.process.split_between_processes(inputs, apply_padding=apply_padding)

    def wait_for_everyone(self) -> None:
        """Wait for all ranks (a barrier)."""
        self._parts.process.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of every node only; arguments as of the builtin `print`."""
        self._parts.process.print(*args, **kwargs)

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
