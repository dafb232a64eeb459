"""The pytest side of the harness: pools of ranks, kept alive between tests, one pool per world size.

A *nursery* process imports torch once and forks ranks on demand (`harness.worker`), so that a pool of any
size costs a fork instead of an import of torch per rank. The ranks see the environment that torchrun gives to
its workers and share a gloo process group.

Example of a test:

    from harness import distributed

    @distributed(world_size=2)
    def test_the_sum_is_the_same_everywhere(tmp_path):
        ...  # runs on both ranks; `torch.distributed` is initialised
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from harness import simulated

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT = 180.0  # seconds a body may take: the machine may be busy, a hang is forever
GRACE = 2.0  # seconds for the other ranks once one has failed: they may be stuck waiting for it
START = 300.0  # seconds for the nursery to import what ranks need; 40 on a busy machine have been seen
MAX_GROUPS = 24  # that a rank keeps, as libraries and caches do: a thread of each wakes 100 times a second
IDLE_GROUPS = 6  # the same of ranks that wait while something else runs
LOG_TAIL = 20000  # characters of the ranks' output shown with a failure; a crash alone fills thousands
FOLDER = Path(__file__).resolve().parent
PRELOADED = (
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "deepspeed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "accel_plugins.deepspeed.strategy",
    "accel_plugins.fsdp.fsdp1",
    "accel_plugins.fsdp.fsdp2",
    "accel_plugins.fsdp.presharded",
    "accel_plugins.megatron.strategy",
    "accel_plugins.pipeline.strategy",
    "accel_plugins.tiling",
    "accel_train.checkpoint.load",
    "accel_train.checkpoint.save",
    "accel_train.checkpoint.single_files",
    "accel_train.fsdp",
    "harness.small_llama",
    "sklearn.datasets",
)
"""What many bodies import: 7 s of computing, once for all ranks instead of once for each."""

ON_DEVICE = tuple(
    name
    for name in PRELOADED
    if not name.startswith(("deepspeed", "megatron", "accel_plugins.deep", "accel_plugins.mega"))
)
"""The same of bodies on a simulated device, less the engines that choose a device when they are imported."""

bodies: dict[tuple[str, str], Callable[..., None]] = {}


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank is asked to run: a body, named so that the rank can import it from its file."""

    module: str
    file: str
    name: str
    fixtures: dict[str, Any]
    restart: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank says about a body: nothing, the reason for which it was skipped, or an error's text."""

    error: str | None = None
    skipped: str | None = None


@dataclass(slots=True)
class Rank:
    """One worker process and the pipe to it."""

    pid: int
    link: Connection


class Nursery:
    """The process that has torch imported and forks ranks.

    Args:
        *preload: Modules that it imports, too, so that its ranks need not.
        device: The name of the simulated accelerator that its ranks have (`harness.simulated`).
    """

    def __init__(self, *preload: str, device: str | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="harness")
        self.folder = Path(self._folder.name)
        self.log = self.folder / "ranks.log"
        self._listener = socket.socket(socket.AF_UNIX)
        address = str(self.folder / "socket")
        self._listener.bind(address)
        self._listener.listen(64)
        self._listener.settimeout(1)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.worker", address, *preload],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=worker_environment(device),
                start_new_session=True,
            )
        self._control = self._accept()

    def spawn(self, world_size: int) -> list[Rank]:
        """Fork `world_size` ranks; return them in rank order, their process group ready."""
        self._control.send((world_size, str(self.folder)))
        links = [self._accept() for _ in range(world_size)]
        hellos = sorted((*link.recv(), link) for link in links)
        return [Rank(pid, link) for _, pid, link in hellos]

    def close(self) -> None:
        """End the nursery and with it every rank that is still there."""
        self._control.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.close()
        self._folder.cleanup()

    def _accept(self) -> Connection:
        end = time.monotonic() + START
        while self._process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                peer, _ = self._listener.accept()
                peer.setblocking(True)
                return Connection(peer.detach())
        raise RuntimeError(
            f"no rank came up within {START:.0f} s, or their process ended:\n{self.log.read_text()}"
        )


@dataclass(slots=True)
class Pool:
    """The ranks of one world size."""

    nursery: Nursery
    ranks: list[Rank] = field(default_factory=list[Rank])

    def run(self, job: Job, timeout: float) -> None:
        """Run a body on every rank; raise `AssertionError` with every rank's story unless all succeed."""
        message = _pickled(job)
        written = self.nursery.log.stat().st_size
        for rank in self.ranks:
            with contextlib.suppress(OSError):  # a rank that died between tests is reported below
                rank.link.send_bytes(message)
        answers = self._collect(timeout)
        stories = {index: answer.error for index, answer in answers.items() if answer.error is not None}
        silent = [index for index in range(len(self.ranks)) if index not in answers]
        if stories or silent:
            lines = [f"--- rank {index} of {len(self.ranks)}\n{stories[index]}" for index in sorted(stories)]
            if silent:
                lines.append(f"--- no answer from ranks {silent}; their threads:\n{self.stacks(silent)}")
            output = self.nursery.log.read_bytes()[written:].decode(errors="replace")
            if output.strip():
                lines.append(f"--- output of the ranks\n{output[-LOG_TAIL:]}")
            self.kill()
            raise AssertionError("\n".join(lines))
        self.kill_above(MAX_GROUPS)
        reasons = [answer.skipped for answer in answers.values() if answer.skipped is not None]
        if reasons:
            pytest.skip(reasons[0])

    def kill_above(self, groups: int) -> None:
        """End these ranks if one has more groups than this."""
        if any(_groups_of(rank.pid) > groups for rank in self.ranks):
            self.kill()

    def kill(self) -> None:
        """End these ranks, whatever they are doing; the next test gets new ones."""
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
            rank.link.close()
        self.ranks = []

    def _collect(self, timeout: float) -> dict[int, Answer]:
        silent = {rank.link: index for index, rank in enumerate(self.ranks)}
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + timeout
        while silent and (ready := wait(list(silent), max(0.0, deadline - time.monotonic()))):
            for link in ready:
                index = silent.pop(link)  # pyright: ignore[reportArgumentType]
                answers[index] = _receive(self.ranks[index])
                if answers[index].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def stacks(self, silent: list[int]) -> str:
        """What silent ranks do: each, with its data workers, writes stacks when it gets SIGUSR1."""
        for index in silent:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank = psutil.Process(self.ranks[index].pid)
                for process in (rank, *rank.children(recursive=True)):
                    process.send_signal(signal.SIGUSR1)
                    time.sleep(0.2)  # they write to one file
        time.sleep(0.5)
        return "\n".join(
            f"rank {index}:\n{(self.nursery.folder / f'{self.ranks[index].pid}.stack').read_text()}"
            for index in silent
        )


def worker_environment(device: str | None = None) -> dict[str, str]:
    """The environment of the nursery: this process's, on the CPU, with one thread a rank."""
    ours = {
        name: value
        for name, value in (os.environ if device is None else simulated.environment(device)).items()
        if not name.startswith(("ACCELERATE_", "PYTEST_", "TORCHELASTIC_"))
        and name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    }
    path = [str(FOLDER.parent), str(FOLDER.parents[1] / "tools"), ours.get("PYTHONPATH", "")]
    return {
        **ours,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }


_nurseries: dict[str | None, Nursery] = {}
_pools: dict[tuple[str | None, int], Pool] = {}


def distributed(
    world_size: int = 2, *, timeout: float = TIMEOUT, restart: bool = False, device: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a test: its body runs once on each of `world_size` ranks; any rank's error fails it.

    The body is a function at module level. It finds `torch.distributed` initialised (gloo, CPU, one thread
    a rank), the seeds set to 0, no accel state, and warnings as errors; it must leave the environment and the
    process groups as they were. Fixtures and parameters are pickled.

    Args:
        world_size: How many ranks.
        timeout: Seconds after which silence is a hang.
        restart: The body spoils its process group (a stall, a rank that dies): use fresh ranks afterwards.
        device: The name of a simulated accelerator, such as "npu": the ranks have two of them each, and the
            process group serves it, too. The test is skipped where it cannot be compiled.
    """

    def mark(body: Callable[..., None]) -> Callable[..., None]:
        if "." in body.__qualname__:
            raise TypeError(f"@distributed wants a function at module level, not {body.__qualname__!r}")
        bodies[body.__module__, body.__qualname__] = body
        file = inspect.getsourcefile(body)
        assert file is not None

        @functools.wraps(body)
        def test(**fixtures: Any) -> None:
            pool = _pool(world_size, device)
            try:
                pool.run(
                    Job(body.__module__, str(Path(file).resolve()), body.__qualname__, fixtures, restart),
                    timeout,
                )
            finally:
                if restart:
                    pool.kill()

        return test

    return mark


def close_all() -> None:
    """End every pool of this process. Called at the end of the session; harmless when repeated."""
    _pools.clear()
    while _nurseries:
        _nurseries.popitem()[1].close()


def trim_pools(but: tuple[str | None, int] | None = None) -> None:
    """End the ranks that would wait with many groups, but for those of one pool."""
    for key, pool in _pools.items():
        if key != but:
            pool.kill_above(IDLE_GROUPS)


def shared_nursery(device: str | None = None) -> Nursery:
    """The nursery of this session's pools for a device, started when it is first asked for."""
    if device not in _nurseries:
        if not _nurseries:
            atexit.register(close_all)
        _nurseries[device] = Nursery(*(PRELOADED if device is None else ON_DEVICE), device=device)
    return _nurseries[device]


def _pool(world_size: int, device: str | None) -> Pool:
    if device is not None:
        simulated.require()
    trim_pools(but=(device, world_size))
    pool = _pools.setdefault((device, world_size), Pool(shared_nursery(device)))
    if not pool.ranks:
        pool.ranks = pool.nursery.spawn(world_size)
    return pool


def _groups_of(pid: int) -> int:
    """How many groups of gloo a process has, by their threads; 0 where `/proc` does not say."""
    names: list[str] = []
    for path in Path(f"/proc/{pid}/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended
            names.append(path.read_text().strip())
    return names.count("gloo_tcp_loop")


def _receive(rank: Rank) -> Answer:
    try:
        return pickle.loads(rank.link.recv_bytes())
    except (EOFError, OSError):
        return Answer(error=f"the process of this rank (pid {rank.pid}) died")


def _pickled(job: Job) -> bytes:
    try:
        return pickle.dumps(job)
    except Exception as error:  # pickling runs the code of whatever it meets
        for name, value in job.fixtures.items():
            try:
                pickle.dumps(value)
            except Exception:  # noqa: BLE001 - as above
                raise TypeError(f"fixture {name!r} cannot be sent to the ranks: {error}") from error
        raise
