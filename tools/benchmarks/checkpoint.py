"""Time and memory of saving the state of a large model, relative to the reference and to raw disk writes.

    uv run python tools/benchmarks/checkpoint.py --folder DIR [--reference-python PATH] [--gigabytes 1.2]

A model of that size with the state of AdamW, three times as much in all, on the CPU. Both libraries keep it
in processes of their own and save alternately, each time to a new folder on an idle disk; `dd conv=fsync`
writes as many random bytes there. Compared is the fastest time of each, since what else the machine does only
adds. Claims:

- `save_state(blocking=False)` stalls at most a quarter as long as the reference's `save_state`;
- blocking, without flushing (which the reference never does), it takes no longer than the reference's;
- with flushing it takes at most 1.1 times as long as `dd`;
- while it saves, blocking, memory grows by at most a tenth of the checkpoint;
- `load_state` from the page cache takes no longer than the reference's, into a run that has trained (`load`)
  and into one that has not (`first load`), and memory grows by at most a tenth of the checkpoint, beside the
  moments that a first load allocates.

Also printed: the slowdown of a loop of tiny steps, which holds the GIL all the time, while a background
thread writes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from process_memory import memory

WIDTH = 2048
BLOCK = 1 << 28  # bytes that dd writes over and over
CLAIMS = {
    "stall": 0.25,
    "blocking": 1.0,
    "flushed": 1.1,
    "memory": 0.1,
    "load": 1.0,
    "first load": 1.0,
    "memory of a load": 0.1,
    "memory of a first load": 0.1,
}


class Library:
    """One library with its model, in this process."""

    def __init__(self, name: str, gigabytes: float, *, is_trained: bool) -> None:
        self.accelerator = import_module(name).Accelerator(cpu=True)
        count = round(gigabytes * 1e9 / (4 * WIDTH * WIDTH))
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
        model, optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        for parameter in model.parameters() if is_trained else ():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        self.bytes = 3 * count * 4 * WIDTH * WIDTH

    def save(self, folder: str, options: dict[str, Any]) -> dict[str, Any]:
        """Save once; return seconds until the call returned and until it was done, and how memory grew."""
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        before = memory("VmRSS")
        start = time.perf_counter()
        saved = self.accelerator.save_state(folder, **options)
        stall = time.perf_counter() - start
        grown = memory("VmHWM") - before
        pace = None
        if options.get("blocking") is False:
            pace = steps_per_second(lambda: saved.done)
            saved.wait()
        total = time.perf_counter() - start
        return {"stall": stall, "whole": total, "grown": grown, "pace": pace, "bytes": self.bytes}

    def load(self, folder: str) -> dict[str, Any]:
        """Load once; return seconds and how memory grew."""
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        before = memory("VmRSS")
        start = time.perf_counter()
        self.accelerator.load_state(folder)
        taken = time.perf_counter() - start
        return {"stall": taken, "grown": memory("VmHWM") - before, "bytes": self.bytes}


def steps_per_second(stop: Any) -> float:
    """Run tiny training steps until `stop` is true; return their number per second."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer, batch, steps = torch.optim.SGD(model.parameters()), torch.ones(4, 32), 0
    start = time.perf_counter()
    while not stop():
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps / (time.perf_counter() - start)


def serve(name: str, gigabytes: float, *, is_trained: bool) -> None:
    """Save and load as told on standard input."""
    library = Library(name, gigabytes, is_trained=is_trained)
    print(json.dumps({"bytes": library.bytes}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["what"] == "pace":
            end = time.perf_counter() + 3
            answer: dict[str, Any] = {"pace": steps_per_second(lambda end=end: time.perf_counter() > end)}
        elif request["what"] == "load":
            answer = library.load(request["folder"])
        else:
            answer = library.save(request["folder"], request["options"])
        print(json.dumps(answer), flush=True)


class Server:
    """The far end of `serve`."""

    def __init__(self, python: str, name: str, gigabytes: float, *, is_trained: bool = True) -> None:
        command = [python, __file__, "--serve", name, "--gigabytes", str(gigabytes)]
        command += [] if is_trained else ["--untrained"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.bytes = int(self._answer()["bytes"])

    def ask(self, what: str, folder: Path | None = None, **options: Any) -> dict[str, Any]:
        """Let it save, or do as many tiny steps as it can; return what it measured."""
        assert self._process.stdin is not None
        request = {"what": what, "folder": str(folder), "options": options}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError("the process that saves has ended")


def load_in_turn(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Let both libraries load what they have saved, from the page cache; return their results."""
    libraries = [("accel", sys.executable)]
    if arguments.reference_python:
        libraries.append(("accelerate", str(arguments.reference_python)))
    answers: dict[str, list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for name, python in libraries:
            target = arguments.folder / f"{name}-benchmark"
            size, label = arguments.gigabytes, "reference " * (name == "accelerate")
            server = Server(python, name, size)
            options = {"flush": False} if name == "accel" else {}
            server.ask("save", target, **options)
            for _ in range(2):
                answers.setdefault(f"{label}load", []).append(server.ask("load", target))
            server.close()
            fresh = Server(python, name, size, is_trained=False)
            answers.setdefault(f"{label}first load", []).append(fresh.ask("load", target))
            fresh.close()
            discard(target)
    return answers


def dd(block: Path, target: Path, size: int) -> dict[str, Any]:
    """Let `dd` write as many bytes, no zeros, from memory, and flush them at the end."""
    count = round(size / block.stat().st_size)
    start = time.perf_counter()
    for part in range(count):
        flush = ",fsync" if part == count - 1 else ""
        command = ["dd", f"if={block}", f"of={target}", "bs=1M", "oflag=append", f"conv=notrunc{flush}"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return {"stall": time.perf_counter() - start}


def measure(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Run all alternately; return their results."""
    ours = Server(sys.executable, "accel", arguments.gigabytes)
    reference = None
    if arguments.reference_python:
        reference = Server(str(arguments.reference_python), "accelerate", arguments.gigabytes)
    target = arguments.folder / "accel-benchmark"
    block = Path("/dev/shm/accel-benchmark")
    block.write_bytes(os.urandom(BLOCK))
    runs: dict[str, Any] = {
        "stall": lambda: ours.ask("save", target, blocking=False),
        "blocking": lambda: ours.ask("save", target, flush=False),
        "flushed": lambda: ours.ask("save", target),
        "dd": lambda: dd(block, target, ours.bytes),
        "alone": lambda: ours.ask("pace"),
    }
    if reference is not None:
        runs["reference"] = lambda: reference.ask("save", target)
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    ours.ask("save", target, blocking=False)  # takes the memory that later saves use again
    start = time.monotonic()
    for turn in range(arguments.rounds):
        if turn and time.monotonic() - start > arguments.seconds:
            print(f"{turn} of {arguments.rounds} rounds: {arguments.seconds:.0f} s are over")
            break
        # Another order each time: what a disk has just done tells on what it does next.
        for name in random.Random(turn).sample(sorted(runs), len(runs)):
            discard(target)
            answers[name].append(runs[name]())
    discard(target)
    block.unlink()
    ours.close()
    if reference is not None:
        reference.close()
    return answers


def discard(target: Path) -> None:
    """Leave an idle disk without the last checkpoint."""
    shutil.rmtree(target, ignore_errors=True)
    target.unlink(missing_ok=True)
    os.sync()


def ratio(answers: dict[str, list[dict[str, Any]]], name: str, base: str, key: str = "stall") -> float:
    choose = min if key == "stall" else max
    return choose(answer[key] for answer in answers[name]) / choose(answer[key] for answer in answers[base])


def report(answers: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Print; return the ratios that are claimed."""
    size = answers["blocking"][0]["bytes"]
    print(f"{size / 1e9:.1f} GB to save")
    for name in sorted(answers):
        if name != "alone":
            times = sorted(answer["stall"] for answer in answers[name])
            print(f"  {name:>9}: {times[0]:6.2f} s, median {statistics.median(times):6.2f} s")
    grown = statistics.median(one["grown"] / size for one in answers["blocking"] + answers["flushed"])
    ratios = {"flushed": ratio(answers, "flushed", "dd"), "memory": grown}
    print(f"  with flushing, beside dd conv=fsync: {ratios['flushed']:.2f}")
    print(f"  memory that blocking saves take: {grown:.3f} of the checkpoint")
    if "reference" in answers:
        ratios |= {name: ratio(answers, name, "reference") for name in ("stall", "blocking")}
        taken = statistics.median(answer["grown"] / size for answer in answers["reference"])
        print(f"  memory that the reference takes: {taken:.3f} of the checkpoint")
        print(f"  stall of a background save, beside the reference's save: {ratios['stall']:.2f}")
        print(f"  blocking without flushing, beside the reference's save: {ratios['blocking']:.2f}")
    pace = ratio(answers, "stall", "alone", "pace")
    print(f"  pace of a loop of tiny steps while the background writes: {pace:.2f} of undisturbed")
    return ratios


def report_loads(answers: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Print; return the ratios that are claimed."""
    size = answers["load"][0]["bytes"]
    print(f"{size / 1e9:.2f} GB to load")
    for name in sorted(answers):
        times = sorted(answer["stall"] for answer in answers[name])
        print(f"  {name:>20}: {times[0]:6.2f} s, median {statistics.median(times):6.2f} s")
    ratios: dict[str, float] = {}
    for name in ("load", "first load"):
        moments = size * 2 / 3 if name == "first load" else 0
        taken = {
            kind: statistics.median(answer["grown"] for answer in answers[kind]) / 1e6
            for kind in (name, f"reference {name}")
            if kind in answers
        }
        ratios[f"memory of a {name}"] = (taken[name] * 1e6 - moments) / size
        print(f"  {name}: memory grows, in MB: {', '.join(f'{kind} {mb:.0f}' for kind, mb in taken.items())}")
        if f"reference {name}" in answers:
            ratios[name] = ratio(answers, name, f"reference {name}")
            print(f"  {name}, beside the reference's: {ratios[name]:.2f}")
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where to save, on the disk that is measured")
    parser.add_argument("--gigabytes", type=float, default=1.2, help="size of the model")
    parser.add_argument("--rounds", type=int, default=3, help="how often each takes its turn")
    parser.add_argument("--seconds", type=float, default=600, help="after which no further round begins")
    parser.add_argument(
        "--reference-python", type=Path, help="interpreter of an environment with the reference"
    )
    parser.add_argument("--only", choices=("saves", "loads"), help="measure only these")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--untrained", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.gigabytes, is_trained=not arguments.untrained)
        return
    if arguments.folder is None:
        parser.error("--folder is needed: a folder on the disk that is measured")
    ratios: dict[str, float] = {}
    if arguments.only != "loads":
        ratios |= report(measure(arguments))
    if arguments.only != "saves":
        ratios |= report_loads(load_in_turn(arguments))
    missed = [
        f"{name}: {value:.2f} > {CLAIMS[name]}" for name, value in ratios.items() if value > CLAIMS[name]
    ]
    if missed:
        sys.exit(f"not as claimed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
