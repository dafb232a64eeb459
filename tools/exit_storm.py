"""Run many small jobs of two ranks, and count those that did their work but exited with a non-zero code.

    python tools/exit_storm.py --by fork accel torchrun mpirun --jobs 157 --launched 4

Ranks are forked from a process that has imported torch already, so that a job costs a second rather than
ten; their interpreters end as those of scripts do. `--by` names real launchers besides. With `--slow-threads`
the threads of gloo get the time that is left over, as on a loaded machine. A rank that ended otherwise is
reported with its exit code and the last line that it wrote. A job that does not end is killed and counted
as late; the jobs of a kind that were not started within `--limit` are left out. The totals are printed in
any case.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch._dynamo  # pyright: ignore[reportUnusedImport] - which DDP imports when it is first made
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.topology import free_port
from accel_train import Accelerator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

RANKS = 2
DONE = "done"
LAUNCHERS = {
    "accel": (sys.executable, "-m", "accel_cli", "launch", "--cpu", f"--num_processes={RANKS}"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={RANKS}", "--standalone"),
    "mpirun": ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(RANKS), sys.executable),
}


def model() -> torch.nn.Sequential:
    """A model that tensor parallelism can divide as well."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))


PLAN: dict[str, ParallelStyle] = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def train(
    module: torch.nn.Module, step: Callable[[torch.Tensor], None], gather: Callable[[torch.Tensor], Any]
) -> None:
    """Three steps, and a gather at the end."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=False)
    for _ in range(3):
        optimizer.zero_grad()
        step(module(torch.ones(4, 8)).sum())
        optimizer.step()
    gather(torch.ones(1))


def slow_down(slow: bool) -> None:
    """Let all threads of this process but the first run only when nobody else wants to, all on one core."""
    if slow:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        for thread in Path("/proc/self/task").iterdir():
            if int(thread.name) != os.getpid():
                os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))


def plain(kind: str, *, slow: bool) -> None:
    """The job in PyTorch alone, which leaves the end to the interpreter."""
    for name in ("RANK", "SIZE"):  # as Open MPI tells them, and plain PyTorch does not know
        if f"OMPI_COMM_WORLD_{name}" in os.environ:
            os.environ[name.replace("SIZE", "WORLD_SIZE")] = os.environ[f"OMPI_COMM_WORLD_{name}"]
    dist.init_process_group("gloo")
    slow_down(slow)
    module: Any = model()
    if kind == "ddp":
        module = DistributedDataParallel(module)
    elif kind == "fsdp2":
        fully_shard(module, mesh=init_device_mesh("cpu", (RANKS,)))
    else:
        parallelize_module(module, init_device_mesh("cpu", (RANKS,)), PLAN)
    train(
        module,
        lambda loss: loss.backward(),
        lambda one: dist.all_gather([torch.empty(1) for _ in range(RANKS)], one),
    )


def ours(kind: str, *, slow: bool) -> None:
    """The job with an Accelerator."""
    how: dict[str, Any] = {}
    if kind == "fsdp2":
        how["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    elif kind == "tp":
        how["parallelism_config"] = ParallelismConfig(tp_size=RANKS)
    accelerator = Accelerator(cpu=True, **how)
    slow_down(slow)
    module: Any = model()
    if kind == "tp":
        module._tp_plan = PLAN
    prepared = accelerator.prepare(module)
    train(prepared, accelerator.backward, accelerator.gather)


LIBRARIES = {"ours": ours, "plain": plain}


@dataclass(slots=True, kw_only=True)
class Figures:
    """How jobs ended.

    Args:
        jobs: How many were started.
        bad: How many of them ended and not with 0 on every rank.
        late: How many had not ended in time, and were killed.
        lines: A line for each rank of those.
    """

    jobs: int = 0
    bad: int = 0
    late: int = 0
    lines: list[str] = field(default_factory=list[str])

    def add(self, codes: Sequence[int], outputs: Sequence[str], *, late: bool = False) -> None:
        """Count a job."""
        self.jobs += 1
        self.late += late
        self.bad += not late and any(codes)
        for rank, (code, text) in enumerate(zip(codes, outputs, strict=True)):
            if code or late:
                last = (text.strip().splitlines() or [""])[-1]
                self.lines.append(f"rank {rank}: {'late' if late else code}: {last}")

    def __str__(self) -> str:
        return f"{self.bad:>4} {self.late:>6} {self.jobs:>6}"


HEADER = f"{'started by':>10} {'kind':>6} {'library':>7} {'bad':>4} {'late':>6} {'jobs':>6}"


@dataclass(slots=True, kw_only=True)
class Running:
    """A job that runs."""

    pids: list[int]
    outputs: list[Path]
    agent: int
    started: float = field(default_factory=time.monotonic)
    codes: dict[int, int] = field(default_factory=dict[int, int])

    def end(self, figures: Figures, *, late: bool = False) -> None:
        """Kill what is left of it and count it."""
        for pid in {*self.pids} - {*self.codes}:
            os.kill(pid, signal.SIGKILL)
            self.codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.kill(self.agent, signal.SIGKILL)
        os.waitpid(self.agent, 0)
        figures.add(
            [self.codes[pid] for pid in self.pids], [path.read_text() for path in self.outputs], late=late
        )


def fork_job(folder: Path, number: int) -> Running | int:
    """Start a job as torchrun's agent would; give the job, or in a child the rank that it is."""
    agent, port = fork_store()
    running = Running(pids=[], outputs=[folder / f"{number}.{rank}" for rank in range(RANKS)], agent=agent)
    for path in running.outputs:
        path.touch()
    for rank in range(RANKS):
        pid = os.fork()
        if not pid:
            become_rank(rank, port, running.outputs[rank])
            return rank
        running.pids.append(pid)
    return running


def fork_store() -> tuple[int, str]:
    """Start a process that keeps a store; this one must stay without threads, as it is forked again."""
    seen, port_end = os.pipe()
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        os.write(port_end, str(store.port).encode())
        signal.pause()
    port = os.read(seen, 16).decode()
    os.close(seen)
    os.close(port_end)
    return pid, port


def become_rank(rank: int, port: str, output: Path) -> None:
    """Take over the environment of a rank, and write into a file of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID="storm", TORCHELASTIC_RESTART_COUNT="0", OMP_NUM_THREADS="1",
    )  # fmt: skip
    stream = output.open("w")
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)


def storm(options: argparse.Namespace, folder: Path, figures: Figures) -> bool:
    """Run forked jobs.

    Returns:
        Whether this process is a rank, which has its work before it.
    """
    deadline, started = time.monotonic() + options.limit, 0
    running: list[Running] = []
    while started < options.jobs or running:
        while started < options.jobs and len(running) < options.at_once and time.monotonic() < deadline:
            job = fork_job(folder, started)
            if isinstance(job, int):
                return True
            started += 1
            running.append(job)
        if not running:
            break
        time.sleep(0.01)
        for job in [*running]:
            for pid in {*job.pids} - {*job.codes}:
                if (status := os.waitpid(pid, os.WNOHANG))[0]:
                    job.codes[pid] = os.waitstatus_to_exitcode(status[1])
            late = job.started + options.job_limit < time.monotonic()
            if late or len(job.codes) == RANKS:
                job.end(figures, late=late and len(job.codes) < RANKS)
                running.remove(job)
    return False


def launched(options: argparse.Namespace, launcher: str, library: str, kind: str, figures: Figures) -> None:
    """Run jobs by real commands."""
    slow = ["--slow-threads"] if options.slow_threads else []
    line = [*LAUNCHERS[launcher], __file__, *slow, "--rank", library, kind]
    deadline = time.monotonic() + options.limit
    while figures.jobs < options.launched and time.monotonic() < deadline:
        running = [
            subprocess.Popen(
                line,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **(rendezvous(launcher, library))},
            )
            for _ in range(min(options.at_once, options.launched - figures.jobs))
        ]
        until = time.monotonic() + options.job_limit
        for process in running:
            late = False
            try:
                output, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = True
                kill_with_descendants(process.pid)
                output, _ = process.communicate()
            figures.add([process.returncode], [output], late=late)


def rendezvous(launcher: str, library: str) -> dict[str, str]:
    """The variables of the rendezvous if neither the launcher nor the library sets them."""
    if (launcher, library) != ("mpirun", "plain"):
        return {}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def kill_with_descendants(pid: int) -> None:
    """Kill a process and all that it has started, also what is in a session of its own."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for child in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def hogs(count: int) -> Iterator[subprocess.Popen[bytes]]:
    """Processes that keep a core busy each."""
    for _ in range(count):
        yield subprocess.Popen([sys.executable, "-c", "while True: pass"])


def storms(options: argparse.Namespace, folder: Path, totals: dict[str, Figures]) -> tuple[str, str] | None:
    """Run every kind of job and print its figures.

    Returns:
        In a forked rank the job that it shall do, otherwise nothing.
    """
    print(HEADER, flush=True)
    for way, kind, library in itertools.product(options.by, options.kind, options.library):
        figures, is_rank = Figures(), False
        try:
            if way != "fork":
                launched(options, way, library, kind, figures)
            elif is_rank := storm(options, folder, figures):
                return library, kind
        finally:
            if not is_rank:
                show(f"{way:>10} {kind:>6} {library:>7}", figures, totals.setdefault(library, Figures()))
    return None


def show(words: str, figures: Figures, total: Figures) -> None:
    """Print the figures of a kind, and add them to the total."""
    print(words, figures)
    print(*(f"  {line}\n" for line in figures.lines), sep="", end="", flush=True)
    total.jobs += figures.jobs
    total.bad += figures.bad
    total.late += figures.late


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--by", nargs="+", default=["fork"], choices=["fork", *LAUNCHERS])
    parser.add_argument("--jobs", type=int, default=20, help="of each kind, by forking")
    parser.add_argument("--launched", type=int, default=4, help="of each kind, by each real launcher")
    parser.add_argument("--library", nargs="+", default=[*LIBRARIES], choices=[*LIBRARIES])
    parser.add_argument("--kind", nargs="+", default=["ddp", "fsdp2", "tp"], choices=["ddp", "fsdp2", "tp"])
    parser.add_argument("--at-once", type=int, default=2, help="jobs that run at the same time")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds in which jobs of a kind are started"
    )
    parser.add_argument("--job-limit", type=float, default=120.0, help="seconds after which a job is killed")
    parser.add_argument("--load", type=int, default=0, help="processes that keep a core busy each")
    parser.add_argument("--slow-threads", action="store_true")
    parser.add_argument("--rank", nargs=2, metavar=("LIBRARY", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    job = options.rank or run_storms(options)
    if job is not None:
        LIBRARIES[job[0]](job[1], slow=options.slow_threads)
        print(DONE, flush=True)  # and now the end of the interpreter


def run_storms(options: argparse.Namespace) -> tuple[str, str] | None:
    """Run all storms, print the totals whatever happens, and leave nothing behind.

    Returns:
        In a forked rank the job that it shall do.
    """
    parent, folder, load = os.getpid(), Path(tempfile.mkdtemp()), [*hogs(options.load)]
    totals: dict[str, Figures] = {}
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return storms(options, folder, totals)
    finally:
        if os.getpid() == parent:
            for library, figures in totals.items():
                print(f"{'all':>10} {'':>6} {library:>7} {figures}", flush=True)
            for one in load:
                one.kill()
            for child in psutil.Process().children(recursive=True):
                child.kill()
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
