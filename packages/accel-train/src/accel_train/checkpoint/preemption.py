"""Save a checkpoint when a scheduler announces the end of a job: on all ranks after the same step; then exit.

A signal handler sets a flag, and the ranks add their flags up at the end of each step, on the host.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from accel_state.errors import SettingsError
from accel_state.platforms import can_wait_for_signals

if TYPE_CHECKING:
    from accel_state.runtime import Runtime
    from accel_train.data.adapter import PreparedLoader

logger = logging.getLogger(__name__)

PREEMPTED = 128 + signal.SIGTERM
"""The exit code after such a checkpoint: that of a shell whose command SIGTERM has ended."""

_NOTICES = [signal.Signals[name] for name in ("SIGTERM", "SIGUSR1") if name in signal.Signals.__members__]
_END: Any = object()
_active: Preemption | None = None


class Preemption:
    """The notice that this job will end.

    Args:
        runtime: The runtime of this process.
        save: Saves a checkpoint on every rank, and returns where.
        is_restarted: Whether the launcher starts ranks again that have failed; it is then ended, too.
    """

    def __init__(self, runtime: Runtime, save: Callable[[], object], *, is_restarted: bool = False) -> None:
        self._runtime = runtime
        self._save = save
        self._is_restarted = is_restarted
        self._handlers: dict[signal.Signals, Any] = {}
        self.notice: int | None = None
        # Whether an optimizer has stepped since a loader has yielded.
        self._has_stepped = False
        self._is_postponed = False

    def install(self) -> None:
        """Handle the signals in this process until `uninstall`, in place of an earlier `Accelerator`.

        Raises:
            SettingsError: This is not the main thread.
        """
        global _active  # noqa: PLW0603 - a process has one handler of a signal
        if threading.current_thread() is not threading.main_thread():
            raise SettingsError(
                "ProjectConfiguration(save_on_preemption=True): Python handles signals only in the main "
                "thread. Create the Accelerator there."
            )
        end()
        self._handlers = {number: signal.signal(number, self._on_notice) for number in _NOTICES}
        _active = self

    def uninstall(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._handlers.items():
            # A handler that C installed is None and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._handlers = {}

    def count_optimizer_step(self) -> None:
        """Note that an optimizer has stepped."""
        self._has_stepped = True

    def watch(self, loader: PreparedLoader[Any]) -> None:
        """Learn from a loader when steps end, and let its data workers outlive notices."""
        loader.preemption = self
        loader.wrap_worker_init(OutlivingWorker)

    def watched(self, batches: Generator[Any]) -> Generator[Any]:
        """Yield the batches of a pass; end a step when the next is asked for after an optimizer step."""
        outer = self._has_stepped
        try:
            with closing(batches):
                with _notices_blocked():  # Data workers start here, and inherit it.
                    batch = next(batches, _END)
                while batch is not _END:
                    self._has_stepped = False
                    yield batch
                    if self._has_stepped:
                        self.end_step()
                    batch = next(batches, _END)
        finally:
            self._has_stepped = outer  # A pass inside of a step, as of an evaluation, leaves it as it was.

    @contextmanager
    def postponed(self) -> Generator[None]:
        """Heed notices at the end of the block, in which ranks take different numbers of steps."""
        outer, self._is_postponed = self._is_postponed, True
        try:
            yield
        finally:
            self._is_postponed = outer
        self.end_step()

    def end_step(self) -> None:
        """Save and exit if any rank has got a notice. All ranks call it as often, but for `postponed` blocks.

        Raises:
            SystemExit: The checkpoint is saved; the exit code is `PREEMPTED`.
        """
        if self._is_postponed:
            return
        notices = torch.tensor(int(self.notice is not None), device="cpu")
        self._runtime.collectives.all_reduce(notices)
        if notices.item():
            self._leave()

    def _on_notice(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.notice = number

    def _leave(self) -> None:
        folder = self._save()
        logger.warning("This job is preempted. Saved %s, exiting with %d.", folder, PREEMPTED)
        if self._is_restarted and self._runtime.topology.is_local_main:
            os.kill(os.getppid(), signal.SIGTERM)
        raise SystemExit(PREEMPTED)


def end() -> None:
    """Stop handling signals; do nothing if none are handled."""
    global _active
    preemption, _active = _active, None
    if preemption is not None:
        preemption.uninstall()


@contextmanager
def _notices_blocked() -> Generator[None]:
    """Postpone the signals in this thread; the threads and processes that it starts never get them."""
    if not can_wait_for_signals():  # no thread of a worker could wait for its parent's
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOTICES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class OutlivingWorker:
    """A `worker_init_fn` by which a data worker ends when its parent ends it, not by the notice itself.

    Launchers and schedulers send it to all processes of a job, and without workers no step comes to its end.

    Args:
        inner: The `worker_init_fn` of the loader.
    """

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self.inner = inner

    def __call__(self, worker_id: int) -> None:
        """Wait for the parent's signal in a thread, since `_notices_blocked` has blocked the signals."""
        if can_wait_for_signals():
            threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
        if self.inner is not None:
            self.inner(worker_id)


def _exit_with_parent(parent: int) -> None:
    while signal.sigwaitinfo(_NOTICES).si_pid != parent:
        pass
    os._exit(0)  # as torch's own handler in data workers does


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=end)
