"""Time of collectives on nested data, relative to one raw collective of the same bytes and to the reference.

    uv run python tools/benchmarks/collectives.py [--reference-python PATH]

Two processes, gloo, on the CPU. `ours` and `raw` (plain torch.distributed: one message for all bytes, into
new memory where the operation returns new tensors) run in the same two processes, the reference in two
processes of its own interpreter. They run alternately, so that whatever else the machine does slows down all.
A turn is a loop of calls between two barriers; its time is that of the slower rank, divided by the number of
calls. Printed are medians over the turns, and medians of the ratios of neighbouring turns.

Ours raises on every rank if the data of the ranks does not match, so the source of a broadcast waits for the
other ranks; the raw broadcast is therefore followed by an all-gather of eight bytes.

Claims: trees of small tensors take at most 0.2 of the reference's time, one tensor of 16 MB at most 1.05 of
a raw collective's, objects no longer than the reference's.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from compared import options

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD = 2
TENSOR_OPERATIONS = ("gather", "broadcast", "reduce")
OBJECT_OPERATIONS = ("gather_object", "broadcast_object_list")
SHAPES = ((16,), (16, 8), (4, 4, 2))
CLAIMS = {
    "120 small": ("reference", 0.2),
    "256 small": ("reference", 0.2),
    "16 MB": ("raw", 1.05),
    "objects": ("reference", 1.0),
}
"""Which other time, and how much of it ours takes at most."""
CALLS = {"120 small": (100, 4), "256 small": (100, 2), "16 MB": (4, 4), "objects": (200, 200)}
"""In a turn: of ours and raw, of the reference."""
PAIRS = 4  # turns of ours and raw for one of the reference


def small_leaves(count: int) -> dict[str, Any]:
    """Nested data with `count` leaves of three shapes, about a quarter of a kilobyte each."""
    leaves = [torch.randn(SHAPES[index % len(SHAPES)]) for index in range(count)]
    half = count // 2
    return {
        "outputs": {f"layer{index}": leaf for index, leaf in enumerate(leaves[:half])},
        "rest": leaves[half:],
    }


def make_data(case: str) -> Any:
    """The argument of the collectives."""
    if case == "objects":
        return [{"name": "a metric", "values": list(range(20)), "text": "a sentence of a sample " * 5}] * 4
    torch.manual_seed(0)
    return torch.randn(1 << 22) if case == "16 MB" else small_leaves(int(case.split(maxsplit=1)[0]))


def raw_calls(data: Any) -> dict[str, Callable[[], object]]:
    """One message of torch.distributed with as many bytes as the data, or its collectives of objects."""
    if isinstance(data, list):
        received: list[Any] = [None] * WORLD
        return {
            "gather_object": lambda: dist.all_gather_object(received, data),
            "broadcast_object_list": lambda: dist.broadcast_object_list(list(data), src=0),
        }
    leaves = [data] if isinstance(data, torch.Tensor) else [*data["outputs"].values(), *data["rest"]]
    flat = torch.cat([leaf.reshape(-1) for leaf in leaves])
    answer, answers = torch.zeros(1, dtype=torch.int64), torch.zeros(WORLD, dtype=torch.int64)

    def broadcast() -> None:
        dist.broadcast(flat, src=0)
        dist.all_gather_into_tensor(answers, answer)

    def mean() -> None:
        total = flat.clone()
        dist.all_reduce(total)
        total.div_(WORLD)

    return {
        "gather": lambda: dist.all_gather_into_tensor(flat.new_empty(WORLD * flat.numel()), flat),
        "broadcast": broadcast,
        "reduce": mean,
    }


def library_calls(library: str, data: Any) -> dict[str, Callable[[], object]]:
    """The collectives of accel, or of the reference."""
    operations = import_module(f"{library}.utils")
    return {
        "gather": lambda: operations.gather(data),
        "broadcast": lambda: operations.broadcast(data),
        "reduce": lambda: operations.reduce(data, "mean"),
        "gather_object": lambda: operations.gather_object(data),
        "broadcast_object_list": lambda: operations.broadcast_object_list(list(data)),
    }


def work(library: str, rank: int, port: int) -> None:
    """Be one rank: for every line `[case, operation, who, calls]` answer with seconds per call."""
    join(rank, port)
    state = import_module(f"{library}.state").PartialState(cpu=True)
    known: dict[str, dict[str, dict[str, Callable[[], object]]]] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        case, operation, variant, calls = json.loads(line)
        if case not in known:
            data = make_data(case)
            known[case] = {"raw": raw_calls(data), library: library_calls(library, data)}
        call = known[case]["raw" if variant == "raw" else library][operation]
        for _ in range(calls // 10 + 1):  # to the steady state
            call()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        dist.barrier()
        print((time.perf_counter() - start) / calls, flush=True)
    state.destroy_process_group()


def join(rank: int, port: int) -> None:
    """Be one rank: with one thread, on the CPU, in a group of gloo."""
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))


class Ranks:
    """The two processes: each runs this file with `--work LIBRARY` and answers line by line."""

    def __init__(self, python: str, library: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        command = [python, __file__, "--work", library, "--port", str(port)]
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


def compare(ranks: dict[str, Ranks], case: str, operation: str, rounds: int) -> dict[str, float]:
    """Run the contestants alternately; return medians, in seconds and of ratios."""
    calls, calls_of_reference = CALLS[case]
    times: dict[str, list[float]] = {
        name: [] for name in ("ours", "raw", "reference", "of raw", "of reference")
    }
    for _ in range(rounds):
        for turn in range(PAIRS):
            for variant in ("ours", "raw") if turn % 2 else ("raw", "ours"):
                times[variant].append(ranks[variant].measure(case, operation, variant, calls))
            times["of raw"].append(times["ours"][-1] / times["raw"][-1])
        if "reference" in ranks:
            reference = ranks["reference"].measure(case, operation, "reference", calls_of_reference)
            times["reference"].append(reference)
            times["of reference"].append(statistics.median(times["ours"][-PAIRS:]) / reference)
    return {name: statistics.median(found) if found else float("nan") for name, found in times.items()}


def main() -> None:
    parser = options(__doc__, 7, "how many turns the reference has")
    parser.add_argument("--cases", nargs="+", choices=CLAIMS, default=list(CLAIMS), help="which data")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.rank, arguments.port)
        return
    mine = Ranks(sys.executable, "accel")
    ranks = {"ours": mine, "raw": mine}
    if arguments.reference_python:
        ranks["reference"] = Ranks(str(arguments.reference_python), "accelerate")
    print(f"{'':>30} {'ours':>12} {'raw':>12} {'reference':>13} {'ours/raw':>9} {'ours/reference':>15}")
    missed: list[str] = []
    for case in arguments.cases:
        other, claim = CLAIMS[case]
        for operation in OBJECT_OPERATIONS if case == "objects" else TENSOR_OPERATIONS:
            found = compare(ranks, case, operation, arguments.rounds)
            name = f"{operation} {case}"
            columns = (f"{found[variant] * 1e6:>9.0f} us" for variant in ("ours", "raw"))
            print(
                f"{name:>30} {' '.join(columns)} {found['reference'] * 1e6:>10.0f} us "
                f"{found['of raw']:>9.2f} {found['of reference']:>15.3f}",
                flush=True,
            )
            if found[f"of {other}"] > claim:
                missed.append(name)
    for pair in {id(pair): pair for pair in ranks.values()}.values():
        pair.close()
    if missed:
        sys.exit(f"claims missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
