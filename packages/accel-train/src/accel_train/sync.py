"""When gradients are synchronised: the accumulation plan, and the context manager that applies it."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from torch import nn

    from accel_state.gradient_state import GradientState


def next_micro_batch(done: int, *, num_steps: int, at_end: bool) -> tuple[int, bool]:
    """Count one micro-batch; the last one of a loader ends a window early.

    Returns:
        The micro-batches since the last optimizer step, and whether this one ends the window.

    Example:
        >>> next_micro_batch(0, num_steps=2, at_end=False)
        (1, False)
        >>> next_micro_batch(1, num_steps=2, at_end=False)
        (0, True)
        >>> next_micro_batch(0, num_steps=2, at_end=True)
        (0, True)
    """
    done += 1
    return (0, True) if at_end or done >= num_steps else (done, False)


class Synchronizer:
    """Counter of micro-batches that keeps gradients local until an accumulation window is complete.

    Itself the context manager of a micro-batch that is a whole window; `Accumulation` is that of all others.
    """

    __slots__ = ("_no_sync", "_state", "step")

    def __init__(
        self,
        state: GradientState,
        no_sync: Callable[[nn.Module], AbstractContextManager[None]] | None,
    ) -> None:
        self._state = state
        self._no_sync = no_sync
        self.step = 0
        state.sync_gradients = True  # also where the window of an earlier `Accelerator` was interrupted

    def __enter__(self) -> None:
        """Begin a micro-batch that is a whole window."""
        self.step, self._state.sync_gradients = 0, True

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def advance(self) -> bool:
        """Count one micro-batch; return whether its gradients complete a window."""
        state = self._state
        at_end = state.sync_with_dataloader and state.end_of_dataloader
        self.step, sync = next_micro_batch(self.step, num_steps=state.num_steps, at_end=at_end)
        state.sync_gradients = sync
        return sync

    def local(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Return a context manager in which the gradients of these models stay local."""
        if self._no_sync is None:
            return nullcontext()
        with ExitStack() as stack:  # leaves what it has entered if a later model's context raises
            for model in models:
                stack.enter_context(self._no_sync(model))
            return stack.pop_all()

    def skips_sync(self) -> bool:
        """Whether micro-batches inside a window leave their gradients local."""
        return self._no_sync is not None and not self._state.plugin_kwargs.get("sync_each_batch", False)


class Accumulation:
    """One micro-batch: counted on entry, its gradients kept local unless it completes a window.

    A class and not a generator: it is entered once per micro-batch, and must cost next to nothing.
    """

    __slots__ = ("_local", "_models", "_synchronizer")

    def __init__(self, synchronizer: Synchronizer, models: Sequence[nn.Module]) -> None:
        self._synchronizer = synchronizer
        self._models = models
        self._local: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        """Count the micro-batch."""
        synchronizer = self._synchronizer
        if not synchronizer.advance() and synchronizer.skips_sync():
            self._local = synchronizer.local(self._models)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the models' own contexts."""
        if self._local is not None:
            self._local.__exit__(kind, error, traceback)
