"""Start two ranks with a given Python that time operations on request, for the collectives benchmarks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

WORLD = 2


def join(rank: int, port: int) -> None:
    """Be one rank: with one thread, on the CPU, in a group of gloo."""
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))


class Ranks:
    """The two processes: each runs `script --work LIBRARY --port N --rank N` and answers line by line.

    Args:
        python: The interpreter.
        script: The benchmark.
        library: What it measures.
    """

    def __init__(self, python: str, script: str, library: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        command = [python, script, "--work", library, "--port", str(port)]
        self.processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # as torchrun does: how the system schedules its cores depends on it
            )
            for rank in range(WORLD)
        ]
        for process in self.processes:
            self._answer(process)

    def measure(self, *what: str | int) -> float:
        """Seconds, of the slower rank, for what a line says."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()
        return max(float(self._answer(process)) for process in self.processes)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.communicate()

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        answer = process.stdout.readline()
        if not answer:
            sys.exit(f"a rank died: {process.args!r}")
        return answer
