"""Run many small jobs of two ranks and count those that did their work and yet did not end with 0.

    python tools/exit_storm.py --jobs 100 --who ours plain --kind ddp fsdp2 tp --load 2

Ranks are forked from a process that has imported torch already, so that a job costs a second rather than
ten; their interpreters end as those of scripts do. With `--slow-threads` the threads of gloo get the time
that is left over, as on a loaded machine. `--launcher` starts real commands instead. A rank that ended
otherwise is told with its exit code and with the last line that it wrote.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


WHO = {"ours": ours, "plain": plain}


@dataclass(slots=True, kw_only=True)
class Figures:
    """How jobs ended.

    Args:
        jobs: How many ran.
        bad: How many did not end with 0 on every rank.
        told: A line for each rank of those.
    """

    jobs: int = 0
    bad: int = 0
    told: list[str] = field(default_factory=list[str])

    def add(self, codes: Sequence[int], outputs: Sequence[str]) -> None:
        """Count a job."""
        self.jobs += 1
        if any(codes):
            self.bad += 1
            last = [(text.strip().splitlines() or [""])[-1] for text in outputs]
            self.told += [
                f"rank {rank}: {code}: {line}"
                for rank, (code, line) in enumerate(zip(codes, last, strict=True))
                if code
            ]


@dataclass(slots=True, kw_only=True)
class Running:
    """A job that runs."""

    pids: list[int]
    outputs: list[Path]
    agent: int
    codes: dict[int, int] = field(default_factory=dict[int, int])


def fork_job(folder: Path, number: int) -> Running | int:
    """Start a job as torchrun's agent would; give the job, or in a child the rank that it is."""
    agent, port = fork_store()
    running = Running(pids=[], outputs=[folder / f"{number}.{rank}" for rank in range(RANKS)], agent=agent)
    for rank in range(RANKS):
        pid = os.fork()
        if not pid:
            become_rank(rank, port, running.outputs[rank])
            return rank
        running.pids.append(pid)
    return running


def fork_store() -> tuple[int, str]:
    """Start a process that keeps a store; this one must stay without threads, as it is forked again."""
    seen, told = os.pipe()
    pid = os.fork()
    if not pid:
        store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        os.write(told, str(store.port).encode())
        signal.pause()
    port = os.read(seen, 16).decode()
    os.close(seen)
    os.close(told)
    return pid, port


def become_rank(rank: int, port: str, output: Path) -> None:
    """Take over the environment of a rank, and write into a file of its own."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID="storm", TORCHELASTIC_RESTART_COUNT="0", OMP_NUM_THREADS="1",
    )  # fmt: skip
    stream = output.open("w")
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)


def storm(jobs: int, at_once: int, folder: Path, figures: Figures) -> bool:
    """Run forked jobs.

    Returns:
        Whether this process is a rank, which has its work before it.
    """
    waiting: dict[int, Running] = {}
    started = 0
    while started < jobs or waiting:
        while started < jobs and len(waiting) < at_once * RANKS:
            job = fork_job(folder, started)
            if isinstance(job, int):
                return True
            started += 1
            waiting |= dict.fromkeys(job.pids, job)
        pid, status = os.wait()
        if pid not in waiting:  # a store
            continue
        job = waiting.pop(pid)
        job.codes[pid] = os.waitstatus_to_exitcode(status)
        if len(job.codes) == RANKS:
            figures.add([job.codes[pid] for pid in job.pids], [path.read_text() for path in job.outputs])
            os.kill(job.agent, signal.SIGKILL)
    return False


def launched(launcher: str, who: str, kind: str, jobs: int, at_once: int) -> Figures:
    """Run jobs by real commands."""
    line = [*LAUNCHERS[launcher], __file__, "--rank", who, kind]
    figures = Figures()
    while figures.jobs < jobs:
        running = [
            subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for _ in range(min(at_once, jobs - figures.jobs))
        ]
        for process in running:
            told, _ = process.communicate()
            figures.add([process.returncode], [told])
    return figures


def hogs(count: int) -> Iterator[subprocess.Popen[bytes]]:
    """Processes that keep a core busy each."""
    for _ in range(count):
        yield subprocess.Popen([sys.executable, "-c", "while True: pass"])


def storms(options: argparse.Namespace, folder: Path) -> tuple[str, str] | None:
    """Run every kind of job and print its figures.

    Returns:
        In a forked rank the job that it shall do, otherwise nothing.
    """
    for kind, who in itertools.product(options.kind, options.who):
        if options.launcher:
            figures = launched(options.launcher, who, kind, options.jobs, options.at_once)
        else:
            figures = Figures()
            if storm(options.jobs, options.at_once, folder, figures):
                return who, kind
        print(
            f"{options.launcher or 'forked'} {kind} {who}: {figures.bad} of {figures.jobs} did not end with 0"
        )
        print(*(f"  {line}\n" for line in figures.told), sep="", end="", flush=True)
    return None


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=20, help="of each kind")
    parser.add_argument("--who", nargs="+", default=[*WHO], choices=[*WHO])
    parser.add_argument("--kind", nargs="+", default=["ddp", "fsdp2", "tp"], choices=["ddp", "fsdp2", "tp"])
    parser.add_argument("--at-once", type=int, default=2, help="jobs that run at the same time")
    parser.add_argument("--load", type=int, default=0, help="processes that keep a core busy each")
    parser.add_argument("--slow-threads", action="store_true")
    parser.add_argument("--launcher", choices=[*LAUNCHERS])
    parser.add_argument("--rank", nargs=2, metavar=("WHO", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    job, folder, load = options.rank, Path(tempfile.mkdtemp()), [*hogs(0 if options.rank else options.load)]
    if job is None:
        job = storms(options, folder)
    if job is not None:
        WHO[job[0]](job[1], slow=options.slow_threads)
        print(DONE, flush=True)  # and now the end of the interpreter
        return
    for one in load:
        one.kill()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
