"""Runs of several ranks of which one is killed, at a chosen change of the disk."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import signal
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.pool import GRACE, Job, Nursery, Pool, bodies

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from harness.pool import Rank

CHANGES = frozenset({"open", "write", "fsync", "mkdir", "replace"})
TIMEOUT = 120.0  # seconds after which a rank that has not answered is said to hang


def mortal(body: Callable[..., None]) -> Callable[..., None]:
    """Mark a function at module level as one that a `Crowd` runs, with a `moment` at which a rank dies."""
    bodies[body.__module__, body.__qualname__] = body
    return body


class Killer:
    """`os`, as a module sees it, that kills the process at one of its changes of the disk.

    Args:
        moment: How many changes happen before; the one at which it dies happens in part, or not at all.
    """

    def __init__(self, moment: int) -> None:
        self.moment = moment

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return (lambda *args: self.change(name, real, args)) if name in CHANGES else real

    def change(self, name: str, real: Any, args: tuple[Any, ...]) -> Any:
        """Do it, or half of it and die."""
        self.moment -= 1
        if self.moment < 0:
            if name == "write":
                os.write(args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)


class Crowd:
    """Ranks that are forked for one run each.

    Args:
        nursery: Forks them.
        world_size: How many there are.
    """

    def __init__(self, nursery: Nursery, world_size: int) -> None:
        self._nursery = nursery
        self._world_size = world_size

    def run(self, body: Callable[..., None], victim: int | None = None, **arguments: Any) -> bool:
        """Run a function on new ranks; return whether all have come to its end.

        Args:
            body: What to run, `mortal`.
            victim: The rank that may die.
            **arguments: Of the function; its `moment` is `None` on all ranks but the victim.
        """
        file = inspect.getsourcefile(body)
        assert file is not None
        ranks = self._nursery.spawn(self._world_size)
        try:
            for index, rank in enumerate(ranks):
                fixtures: Mapping[str, Any] = arguments if index == victim else {**arguments, "moment": None}
                job = Job(body.__module__, str(Path(file).resolve()), body.__qualname__, dict(fixtures))
                rank.link.send_bytes(pickle.dumps(job))
            return self._all_end(ranks, victim)
        finally:
            for rank in ranks:  # as a launcher does once one has died
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
                rank.link.close()

    def _all_end(self, ranks: list[Rank], victim: int | None) -> bool:
        """Wait until all have answered, or the victim is dead, whatever the others say then."""
        waiting: dict[Any, int] = {rank.link: index for index, rank in enumerate(ranks)}
        problems: list[str] = []
        deadline = time.monotonic() + TIMEOUT
        while waiting and (ready := wait([*waiting], max(0.0, deadline - time.monotonic()))):
            for link in ready:
                index = waiting.pop(link)
                try:
                    error = pickle.loads(link.recv_bytes()).error  # pyright: ignore[reportAttributeAccessIssue]
                except (EOFError, OSError):
                    if index == victim:
                        return False
                    error = "it died"
                if error is not None:  # perhaps since the victim has died, which shows at once
                    problems.append(f"--- rank {index}\n{error}")
                    deadline = min(deadline, time.monotonic() + GRACE)
        if waiting:
            stacks = Pool(self._nursery, ranks).stacks([*waiting.values()])
            problems.append(f"--- no answer from ranks {[*waiting.values()]}; their threads:\n{stacks}")
        assert not problems, "\n".join(problems)
        return True
