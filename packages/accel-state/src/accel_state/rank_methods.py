"""Methods of what knows the rank of this process: code for selected ranks, a shard of data for each."""

from __future__ import annotations

import builtins
import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from accel_state.process import goes_first, only_if, shard_inputs

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from accel_state.partial_state import PartialState

P = ParamSpec("P")
R = TypeVar("R")


class RankMethods:
    """The methods that `PartialState`, `AcceleratorState` and `Accelerator` have in common."""

    __slots__ = ()

    @property
    def _process(self) -> PartialState:
        """The state of this process, as each of them finds it."""
        raise NotImplementedError

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self._process.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first of all processes."""
        return self._process.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self._process.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last of all processes."""
        return self._process.process_index == self._process.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait for all ranks (a barrier).

        Raises:
            DistributedOperationException: In debug mode, another rank calls another collective.
        """
        self._process.runtime.barrier()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run a block on the main process first, then on the others.

        Example:
            >>> from accel_state import PartialState
            >>> with PartialState(cpu=True).main_process_first():
            ...     _ = "download on one process, find it in the cache on the others"
        """
        return goes_first(self.is_main_process, self.wait_for_everyone)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run a block on the first process of each node first, then on the others."""
        return goes_first(self.is_local_main_process, self.wait_for_everyone)

    @overload
    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_main_process(self, function: None = None) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_main_process(self, function: Any = None) -> Any:
        """Decorate a function so that only the main process runs it; the others get `None`.

        Example:
            >>> from accel_state import PartialState
            >>> @PartialState(cpu=True).on_main_process
            ... def answer():
            ...     return 42
            >>> answer()
            42
        """
        return _run_if(self.is_main_process, function)

    @overload
    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_local_main_process(
        self, function: None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_local_main_process(self, function: Any = None) -> Any:
        """Decorate a function so that only the first process of each node runs it."""
        return _run_if(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function so that only the last process runs it."""
        return only_if(self.is_last_process, function)

    @overload
    def on_process(
        self, function: Callable[P, R], process_index: int | None = None
    ) -> Callable[P, R | None]: ...
    @overload
    def on_process(
        self, function: None = None, process_index: int | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorate a function so that only one process runs it.

        Args:
            function: The function; leave it out to decorate with arguments.
            process_index: The rank. With one process, every rank is this one.

        Raises:
            ValueError: `process_index` is missing.

        Example:
            >>> from accel_state import PartialState
            >>> @PartialState(cpu=True).on_process(process_index=0)
            ... def answer():
            ...     return 42
            >>> answer()
            42
        """
        return self._on(function, "process_index", self._process.process_index, process_index)

    @overload
    def on_local_process(
        self, function: Callable[P, R], local_process_index: int | None = None
    ) -> Callable[P, R | None]: ...
    @overload
    def on_local_process(
        self, function: None = None, local_process_index: int | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorate a function so that only one process of each node runs it.

        Args:
            function: The function; leave it out to decorate with arguments.
            local_process_index: The local rank. With one process, every local rank is this one.

        Raises:
            ValueError: `local_process_index` is missing.
        """
        return self._on(
            function, "local_process_index", self._process.local_process_index, local_process_index
        )

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Yield this rank's shard of some data.

        Args:
            inputs: A list, tuple, tensor, numpy array or `datasets.Dataset`, or a dict of such, equally long.
            apply_padding: Repeat the last item of `inputs` so that all shards are equally long, as a
                following `gather` of tensors may need.

        Raises:
            ValueError: The values of a dict are not equally long.
            TypeError: `inputs` has another type.

        Example:
            >>> from accel_state import PartialState
            >>> with PartialState(cpu=True).split_between_processes(["a", "b"]) as shard:
            ...     shard
            ['a', 'b']
        """
        shard = shard_inputs(
            inputs, self._process.num_processes, self._process.process_index, apply_padding=apply_padding
        )
        return nullcontext(shard)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per node, as the built-in `print` does."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)  # noqa: T201 - it is what was asked for

    def _on(self, function: Any, name: str, mine: int, wanted: int | None) -> Any:
        if wanted is None:
            raise ValueError(f"Say which process shall run the function: {name}=0, for example.")
        return _run_if(mine == wanted or not self.use_distributed, function)


def _run_if(condition: bool, function: Any) -> Any:
    run = functools.partial(only_if, condition)
    return run if function is None else run(function)
