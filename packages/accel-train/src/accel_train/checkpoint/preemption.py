"""Save a checkpoint when a scheduler announces the end of a job: on all ranks after the same step; then exit.

A signal handler sets a flag. The thread of the hang monitor, which asks the process group's store once a
second anyway, passes the notice on to the other ranks. Each rank then tells how many steps it has done, and
the checkpoint follows the step after the largest number; a rank that has done fewer waits after its next step
until that number is known. A step itself compares flags, and communicates nothing.
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

import torch.distributed as dist
from torch.distributed import (
    PrefixStore,
    get_backend,
    is_initialized,
)

from accel_state import hang_monitor
from accel_state.errors import DistributedOperationException, SettingsError
from accel_state.process_group import clone_store
from accel_train.checkpoint.agreement import make_all_gather

if TYPE_CHECKING:
    from accel_state.runtime import Runtime
    from accel_train.data.adapter import PreparedLoader

logger = logging.getLogger(__name__)

PREEMPTED = 128 + signal.SIGTERM
"""The exit code after such a checkpoint: that of a shell whose command SIGTERM has ended."""

_OPTION = "ProjectConfiguration(save_on_preemption=True)"
_NOTICES = [signal.Signals[name] for name in ("SIGTERM", "SIGUSR1") if name in signal.Signals.__members__]
_END: Any = object()
_active: Preemption | None = None


class Preemption:
    """The notice that this job will end, and the agreement of all ranks on the step that is its last.

    Args:
        runtime: The runtime of this process.
        save: Saves a checkpoint on every rank, and returns where.
        is_restarted: Whether the launcher starts ranks again that have failed; it is then ended, too.

    Raises:
        SettingsError: There is no store through which the ranks could agree.
    """

    def __init__(self, runtime: Runtime, save: Callable[[], object], *, is_restarted: bool = False) -> None:
        self._runtime = runtime
        self._save = save
        self._is_restarted = is_restarted
        self._handlers: dict[signal.Signals, Any] = {}
        self.notice: int | None = None
        self._is_alone = runtime.topology.world_size == 1
        # What the thread of the hang monitor and the main thread share.
        self._lock = threading.Lock()
        self._steps = 0
        self._is_agreeing = False
        self._agreed = threading.Event()
        self._last_step: int | None = None
        # Whether an optimizer has stepped since a loader has yielded.
        self._has_stepped = False
        if not self._is_alone:
            self._listen()

    def install(self) -> None:
        """Handle the signals in this process until `uninstall`, in place of an earlier `Accelerator`.

        Raises:
            SettingsError: This is not the main thread.
        """
        global _active  # noqa: PLW0603 - a process has one handler of a signal
        if threading.current_thread() is not threading.main_thread():
            raise SettingsError(
                f"{_OPTION}: Python handles signals only in the main thread. Create the Accelerator there."
            )
        end()
        self._handlers = {number: signal.signal(number, self._on_notice) for number in _NOTICES}
        _active = self

    def uninstall(self) -> None:
        """Restore the previous signal handlers, and stop polling."""
        for number, handler in self._handlers.items():
            # A handler that C installed is None and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._handlers = {}
        monitor = hang_monitor.active()
        if monitor is not None and self._poll in monitor.polls:
            monitor.polls.remove(self._poll)

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

    def end_step(self) -> None:
        """Save and exit if this step is the last one.

        Raises:
            SystemExit: The checkpoint is saved; the exit code is `PREEMPTED`.
        """
        if self._is_alone:
            if self.notice is not None:
                self._leave()
            return
        with self._lock:
            self._steps += 1
            is_agreeing = self._is_agreeing
        if is_agreeing:
            self._agreed.wait()
            if self._steps == self._last_step:
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

    def _listen(self) -> None:
        """Let the thread of the hang monitor pass notices on."""
        monitor, rank = hang_monitor.active(), self._runtime.topology.rank
        if monitor is None and is_initialized() and get_backend() == "fake":
            return  # `accel check` has no other ranks.
        if monitor is None:
            raise SettingsError(f"{_OPTION}: the ranks have no store to agree through.")
        store = clone_store(dist.distributed_c10d._get_default_store())
        number = store.add(f"accel/preemption/{rank}", 1)  # An earlier one of this process has other keys.
        self._store = PrefixStore(f"accel/preemption/{number}", store)
        monitor.polls.append(self._poll)

    def _poll(self) -> None:
        """Pass a notice on, and begin to agree; called about once a second, in a thread."""
        if self._is_agreeing:
            return
        if self.notice is not None:
            self._store.set("notice", "")
        elif not self._store.check(["notice"]):
            return
        with self._lock:
            self._is_agreeing, steps = True, self._steps
        threading.Thread(target=self._agree, args=(steps,), name="accel-preemption", daemon=True).start()

    def _agree(self, steps: int) -> None:
        """Set the last step: the one after what any rank had done when it began to agree."""
        try:
            gather = make_all_gather(self._runtime, "preemption", in_main_thread=False)
            self._last_step = max(gather.exchange(_OPTION, steps)) + 1
        except (RuntimeError, DistributedOperationException) as error:
            logger.warning("This job is preempted and saves no checkpoint: %s", error)
        finally:
            self._agreed.set()


def end() -> None:
    """Stop handling signals; do nothing if none are handled."""
    global _active
    preemption, _active = _active, None
    if preemption is not None:
        preemption.uninstall()


@contextmanager
def _notices_blocked() -> Generator[None]:
    """Postpone the signals in this thread; the threads and processes that it starts never get them."""
    if not hasattr(signal, "sigwaitinfo"):  # as on macOS: no thread of a worker could wait for its parent's
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
        if hasattr(signal, "sigwaitinfo"):
            threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
        if self.inner is not None:
            self.inner(worker_id)


def _exit_with_parent(parent: int) -> None:
    while signal.sigwaitinfo(_NOTICES).si_pid != parent:
        pass
    os._exit(0)  # as torch's own handler in data workers does


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=end)
