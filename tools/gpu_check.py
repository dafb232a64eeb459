"""Run the checks that need a GPU, in five steps of less than ten minutes each.

    tools/gpu_check.sh --prepare            # where there is a network: pack wheels into build/gpu
    tools/gpu_check.sh A                    # on the machine with the GPU, then B, C, D and E
    tools/gpu_check.sh --rehearse A         # anywhere: collect the tests, run the programs small, on the CPU

A: facts and limits of the machine, the packages' tests, NCCL. B: strategies, FP8, Megatron. C: offloaded
models, beside a pinned copy and the reference. D: speed of FP8, checkpoints, `accel test`, the example, and
CUDA's sanitizer of streams. E: bitsandbytes, optimizers that know shards, losses in chunks, axes.

The machine needs Python 3.12 with torch 2.11 or newer, transformers, accelerate, scikit-learn, pytest and
hypothesis. What else is needed is packed by `--prepare` (for Linux on x86-64; `WHEELS` names it; at most 64
MiB, bitsandbytes apart): a step installs it into a folder of its own, without a network. Without build/gpu a
step uses what is installed. Not here: the tests of `tests-integration/clients`, whose environment needs uv.

Each result is printed at once. At the end, junit files of the tests and `gpu_check_STEP.json` are in `$OUT`
(build/gpu/out by default). A check that takes too long is interrupted, and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
PACKED = ROOT / "build" / "gpu"
BENCHMARKS = "tools/benchmarks"
TARGET = ("--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:")
PLATFORMS = [
    f"--platform={name}_x86_64"
    for name in ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
]
MIB = 1 << 20
LIMIT_MIB = 64
WHEELS = {  # those of uv.lock
    "wheels": (
        *("annotated-types", "einops", "hjson", "megatron-core", "msgpack", "ninja", "prompt-toolkit"),
        *("py-cpuinfo", "pydantic", "pydantic-core", "questionary", "shtab", "torchao", "typing-inspection"),
        *("wcwidth", "xxhash"),
    ),
    "bitsandbytes": ("bitsandbytes",),
}
SOURCES = ("deepspeed",)  # there is no wheel: it is built here
GRACE_S = 20.0  # in which an interrupted check writes its report


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a step.

    Args:
        name: What it is called in the report.
        command: Its arguments for Python; those of pytest begin with `-m pytest`.
        seconds: After so many it is interrupted.
        small: Further arguments where it is rehearsed on the CPU; `None` if it cannot run there.
        environ: Further variables.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    small: tuple[str, ...] | None = None
    environ: tuple[tuple[str, str], ...] = ()

    @property
    def is_test(self) -> bool:
        """Whether it is run by pytest."""
        return self.command[:2] == ("-m", "pytest")


def gpu_tests(name: str, *paths: str, seconds: int, marker: str = "gpu", **more: str) -> Check:
    """Tests of some files; rehearsed, those that need a GPU are only collected.

    torch warns on GPUs of what it calls prototypes: warnings are no errors.
    """
    options = ("-v", "--tb=short", "-W", "default", "-p", "no:cacheprovider", "-m", marker)
    return Check(
        name=name,
        command=("-m", "pytest", *options, *paths),
        seconds=seconds,
        small=("--collect-only", "-q") if marker == "gpu" else (),
        environ=tuple(more.items()),
    )


def program(name: str, *command: str, seconds: int, small: tuple[str, ...] | None = ("--small",)) -> Check:
    """A program that prints its results."""
    return Check(name=name, command=command, seconds=seconds, small=small)


def files_with_gpu_tests(folder: str) -> list[str]:
    """Return the files with tests marked `gpu`: others may import what is not installed there."""
    files = sorted((ROOT / folder).glob("*/tests/test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "mark.gpu" in file.read_text()]


OF_MAIN_THREAD = (
    "packages/accel-train/tests/test_data_gpu.py",
    "packages/accel-train/tests/test_checkpoint_staging.py",
    "packages/accel-trackers/tests/test_session.py",
    *("-k", "not data-worker"),
)
"""Tests of code whose copies are made by the main thread: the sanitizer sees no other thread or process."""

STEPS: dict[str, tuple[Check, ...]] = {
    "A": (
        program("facts", f"{BENCHMARKS}/gpu_facts.py", seconds=90),
        gpu_tests("nccl", "tests-integration/training/test_nccl_gpu.py", seconds=90),
        gpu_tests("little-memory", "tests-integration/bigmodel/test_little_memory_gpu.py", seconds=120),
        gpu_tests("packages", *files_with_gpu_tests("packages"), seconds=240),
    ),
    "B": (
        gpu_tests("strategies", "tests-integration/training/test_devices.py", seconds=400),
        gpu_tests("fp8", "tests-integration/training/test_fp8_gpu.py", seconds=80),
        gpu_tests("megatron", "tests-integration/training/test_megatron_gpu.py", seconds=80),
    ),
    "C": (
        program("bandwidth", f"{BENCHMARKS}/bigmodel_gpu.py", "--rounds", "1", seconds=260),
        program("generate", f"{BENCHMARKS}/generate_gpu.py", seconds=300),
    ),
    "D": (
        program("fp8-speed", f"{BENCHMARKS}/fp8.py", "--gpu", "--compile", seconds=150),
        program("staging", f"{BENCHMARKS}/staging_gpu.py", seconds=100),
        program(
            "accel-test", "-m", "accel_cli", "test", "--num_processes", "1", seconds=100, small=("--cpu",)
        ),
        program("example", "packages/accel-suite/examples/digits.py", seconds=50, small=()),
        gpu_tests("sanitizer", *OF_MAIN_THREAD, seconds=80, TORCH_CUDA_SANITIZER="1"),
    ),
    "E": (
        gpu_tests("bits", "packages/accel-quant/tests", seconds=150, marker="not thorough"),
        gpu_tests("bits-gpu", "tests-integration/bigmodel/test_quantized_gpu.py", seconds=150),
        gpu_tests("axes", "tests-integration/training/test_axes_gpu.py", seconds=240),
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Prepare, or run a step; return 0 if all of it passed."""
    parser = argparse.ArgumentParser(description="Check what only a machine with a GPU can show.")
    parser.add_argument("step", nargs="?", choices=STEPS, help="the step to run")
    parser.add_argument("--prepare", action="store_true", help="pack the wheels into build/gpu")
    parser.add_argument("--rehearse", action="store_true", help="run small, on the CPU")
    parser.add_argument("--only", metavar="NAME", help="run this check alone")
    arguments = parser.parse_args(argv)
    if arguments.prepare:
        return prepare()
    if arguments.step is None:
        parser.error("name a step: A, B, C, D or E; or --prepare")
    checks = [step for step in STEPS[arguments.step] if arguments.only in {None, step.name}]
    return Run(arguments.step, rehearse=arguments.rehearse).run(checks)


def prepare() -> int:
    """Pack our wheels and those of `WHEELS`; return 1 if they are too large to travel."""
    uv = os.environ.get("UV") or shutil.which("uv")
    pip = [uv, "tool", "run", "pip"] if uv else [sys.executable, "-m", "pip"]
    shutil.rmtree(PACKED, ignore_errors=True)
    folders = {name: PACKED / name for name in WHEELS}
    subprocess.run(
        [uv or "uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", str(folders["wheels"])],
        cwd=ROOT,
        check=True,
    )
    for name, distributions in WHEELS.items():
        wanted = [f"{each}=={locked_version(each)}" for each in distributions]
        command = [*pip, "download", "--quiet", "--no-deps", *TARGET, *PLATFORMS, "-d", str(folders[name])]
        subprocess.run([*command, *wanted], check=True)
    for each in SOURCES:
        wanted = f"{each}=={locked_version(each)}"
        subprocess.run(
            [*pip, "wheel", "--quiet", "--no-deps", "-w", str(folders["wheels"]), wanted], check=True
        )
    fits = True
    for folder in folders.values():
        (folder / ".gitignore").unlink(missing_ok=True)
        size = sum(file.stat().st_size for file in folder.iterdir()) / MIB
        print(f"{folder}: {len(list(folder.iterdir()))} wheels, {size:.1f} MiB")
        fits = fits and size <= LIMIT_MIB
    return int(not fits)


def locked_version(distribution: str) -> str:
    """Return the version of a distribution in uv.lock."""
    lines = (ROOT / "uv.lock").read_text().splitlines()
    at = lines.index(f'name = "{distribution}"')
    return lines[at + 1].split('"')[1]


class Run:
    """A step: its environment, its report, and the files that it leaves."""

    def __init__(self, step: str, *, rehearse: bool) -> None:
        self.step, self.rehearse = step, rehearse
        self.out = Path(os.environ.get("OUT") or PACKED / "out")
        self.out.mkdir(parents=True, exist_ok=True)
        self.results: list[dict[str, object]] = []

    def run(self, checks: list[Check]) -> int:
        """Run the checks, whatever fails; write the report after each."""
        environ = self.environment()
        code = "import torch; print(torch.__version__, torch.accelerator.is_available(), torch.__file__)"
        facts = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
        )
        line = f"Python {platform.python_version()}, torch {facts.stdout.strip() or facts.stderr[-500:]}"
        print(f"##### step {self.step}: {line}", flush=True)
        if not self.rehearse and " True " not in facts.stdout:
            print("There is no accelerator here; --rehearse runs what can run without.")
            return 1
        for check in checks:
            self.results.append(self.run_one(check, environ))
            report = {"step": self.step, "machine": line, "rehearsed": self.rehearse, "checks": self.results}
            (self.out / f"gpu_check_{self.step}.json").write_text(json.dumps(report, indent=1))
        failed = [result for result in self.results if result["state"] not in {"passed", "left out"}]
        passed = len(self.results) - len(failed)
        print(f"\n##### step {self.step}: {passed} of {len(self.results)} checks passed")
        for result in self.results:
            print(f"{result['name']:<14} {result['state']:<12} {result['seconds']:6.1f} s")
        return int(bool(failed))

    def environment(self) -> dict[str, str]:
        """Install what was packed into a folder of its own; return the environment with it on the path."""
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        names = ("wheels", "bitsandbytes") if self.step == "E" else ("wheels",)
        wheels = [str(file) for name in names for file in sorted((PACKED / name).glob("*.whl"))]
        if not wheels:
            return environ
        site = PACKED / "site"
        shutil.rmtree(site, ignore_errors=True)
        options = ("--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", "--quiet")
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), *wheels]
        subprocess.run(command, check=True)
        path = [str(site), *filter(None, [environ.get("PYTHONPATH")])]
        return {**environ, "PYTHONPATH": os.pathsep.join(path)}

    def run_one(self, check: Check, environ: dict[str, str]) -> dict[str, object]:
        """Run a check; return its result."""
        command = [sys.executable, *check.command]
        if self.rehearse:
            if check.small is None:
                return {"name": check.name, "state": "left out", "seconds": 0.0, "lines": []}
            command += check.small
        elif check.is_test:
            command.append(f"--junitxml={self.out / f'{self.step}_{check.name}.xml'}")
        print(f"\n##### {check.name}: python {' '.join(command[1:])}", flush=True)
        started, lines = time.monotonic(), list[str]()
        limit = check.seconds * (4 if self.rehearse else 1)  # a CPU may be busy with other things
        status = watch(command, {**environ, **dict(check.environ)}, limit, lines)
        seconds = round(time.monotonic() - started, 1)
        state = "passed" if status == 0 else "interrupted" if status is None else f"failed ({status})"
        print(f"##### {check.name}: {state} after {seconds} s", flush=True)
        shown = [line for line in lines if not check.is_test or line.startswith(("FAILED", "ERROR", "="))]
        return {"name": check.name, "state": state, "seconds": seconds, "lines": shown[-200:]}


def watch(command: list[str], environ: dict[str, str], seconds: float, lines: list[str]) -> int | None:
    """Run a command, printing and keeping its lines; return its exit status, `None` if it took too long."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        deadline = Deadline(process, seconds)
        copy_lines(process.stdout, lines)
        process.wait()
        deadline.cancel()
    return None if deadline.passed else process.returncode


def copy_lines(stream: IO[str], lines: list[str]) -> None:
    """Print each line as it comes, and keep it."""
    for line in stream:
        print(line, end="", flush=True)
        lines.append(line.rstrip("\n"))


class Deadline:
    """Interrupt a process after some seconds, for its report; kill its session a little later."""

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        self.passed = False
        self._process = process
        self._timers = [
            threading.Timer(seconds, self._signal, (signal.SIGINT,)),
            threading.Timer(seconds + GRACE_S, self._signal, (signal.SIGKILL,)),
        ]
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def cancel(self) -> None:
        """Leave the process alone."""
        for timer in self._timers:
            timer.cancel()

    def _signal(self, number: signal.Signals) -> None:
        self.passed = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


if __name__ == "__main__":
    sys.exit(main())
