"""Run the checks that need a GPU, in five steps of less than ten minutes each.

    tools/gpu_check.sh --prepare            # where there is a network: pack wheels into build/gpu
    tools/gpu_check.sh A                    # on the machine with the GPU, then B, C, D and E
    tools/gpu_check.sh --rehearse A         # anywhere: collect the tests, run the programs small, on the CPU

A: facts and limits of the machine, the packages' tests, NCCL. B: strategies, FP8, Megatron. C: offloaded
models, beside a pinned copy and the reference. D: speed of FP8, checkpoints, `accel test`, the example, and
CUDA's sanitizer of streams. E: bitsandbytes, optimizers that know shards, losses in chunks, axes.

The machine needs Python 3.12 with torch 2.11 or newer, transformers, accelerate, scikit-learn, pytest and
hypothesis. What else is needed is packed by `--prepare` (for Linux on x86-64; `WHEELS` names it): a step
installs it into a folder of its own, without a network. Without build/gpu a step uses what is installed.
Not here: the tests of `tests-integration/nightly/clients`, whose environment needs uv.

Junit files of the tests are in `$OUT` (build/gpu/out by default). A check that takes too long is interrupted,
and the next one runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKED = ROOT / "build" / "gpu"
BENCHMARKS = "tools/benchmarks"
TARGET = ("--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:")
PLATFORMS = [
    f"--platform={name}_x86_64"
    for name in ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
]
WHEELS = {  # those of uv.lock
    "wheels": (
        *("annotated-types", "einops", "hjson", "megatron-core", "msgpack", "ninja", "prompt-toolkit"),
        *("py-cpuinfo", "pydantic", "pydantic-core", "questionary", "shtab", "torchao", "typing-inspection"),
        *("wcwidth", "xxhash"),
    ),
    "bitsandbytes": ("bitsandbytes",),
}
SOURCES = ("deepspeed",)  # there is no wheel: it is built here
GRACE_S = 20  # in which an interrupted check writes its report


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a step.

    Args:
        name: What it is called in the report.
        command: Its arguments for Python; those of pytest begin with `-m pytest`.
        seconds: After so many it is interrupted.
        small: Further arguments where it is rehearsed on the CPU.
        environ: Further variables.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    small: tuple[str, ...] = ()
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


def program(name: str, *command: str, seconds: int, small: tuple[str, ...] = ("--small",)) -> Check:
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
        gpu_tests("nccl", "tests-integration/distributed/test_nccl_gpu.py", seconds=90),
        gpu_tests("little-memory", "tests-integration/bigmodel/test_little_memory_gpu.py", seconds=120),
        gpu_tests("packages", *files_with_gpu_tests("packages"), seconds=240),
    ),
    "B": (
        gpu_tests("strategies", "tests-integration/distributed/test_devices.py", seconds=400),
        gpu_tests("fp8", "tests-integration/distributed/fp8/test_fp8_gpu.py", seconds=80),
        gpu_tests("megatron", "tests-integration/distributed/megatron/test_megatron_gpu.py", seconds=80),
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
        gpu_tests("axes", "tests-integration/distributed/axes/test_axes_gpu.py", seconds=240),
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
    out = Path(os.environ.get("OUT") or PACKED / "out")
    out.mkdir(parents=True, exist_ok=True)
    environ = environment(arguments.step)
    code = "import sys, torch; print(sys.version, torch.__version__, torch.accelerator.is_available())"
    facts = subprocess.run(
        [sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True, check=True
    )
    print(f"##### step {arguments.step}: Python {facts.stdout.strip()}", flush=True)
    if not arguments.rehearse and facts.stdout.split()[-1] == "False":
        print("There is no accelerator here; --rehearse runs what can run without.")
        return 1
    checks = [check for check in STEPS[arguments.step] if arguments.only in {None, check.name}]
    states: list[str] = []
    for check in checks:
        started = time.monotonic()
        junit = f"--junitxml={out / f'{arguments.step}_{check.name}.xml'}"
        state = run(check, environ, junit, rehearse=arguments.rehearse)
        states.append(f"{check.name:<14} {state:<12} {time.monotonic() - started:6.1f} s")
        print(f"##### {states[-1]}", flush=True)
    bad = [line for line in states if line.split()[1] != "passed"]
    print(
        f"\n##### step {arguments.step}: {len(states) - len(bad)} of {len(states)} checks passed",
        *states,
        sep="\n",
    )
    return int(bool(bad))


def prepare() -> int:
    """Pack our wheels and those of `WHEELS`."""
    uv = os.environ.get("UV") or shutil.which("uv") or "uv"
    pip = [uv, "tool", "run", "pip"]
    locked = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    versions = {package["name"]: f"{package['name']}=={package['version']}" for package in locked}
    shutil.rmtree(PACKED, ignore_errors=True)
    ours = PACKED / "wheels"
    build = ["build", "--quiet", "--all-packages", "--wheel", "--out-dir", str(ours)]
    subprocess.run([uv, *build], cwd=ROOT, check=True)
    for name, distributions in WHEELS.items():
        command = [*pip, "download", "--quiet", "--no-deps", *TARGET, *PLATFORMS, "-d", str(PACKED / name)]
        subprocess.run([*command, *(versions[each] for each in distributions)], check=True)
    wanted = [versions[each] for each in SOURCES]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "-w", str(ours), *wanted], check=True)
    (ours / ".gitignore").unlink(missing_ok=True)
    for folder in (PACKED / name for name in WHEELS):
        sizes = [file.stat().st_size for file in folder.iterdir()]
        print(f"{folder}: {len(sizes)} wheels, {sum(sizes) / (1 << 20):.1f} MiB")
    return 0


def environment(step: str) -> dict[str, str]:
    """Install what was packed into a folder of its own; return the environment with it on the path."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    names = ("wheels", "bitsandbytes") if step == "E" else ("wheels",)
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


def run(check: Check, environ: dict[str, str], junit: str, *, rehearse: bool) -> str:
    """Run a check until its time is over; return what became of it."""
    more = check.small if rehearse else [junit] * check.is_test
    limit = check.seconds * (4 if rehearse else 1)  # a CPU may be busy with other things
    command = [sys.executable, *check.command, *more]
    print(f"\n##### {check.name}: python {' '.join(command[1:])}", flush=True)
    status = subprocess.run(
        ["timeout", "--signal=INT", f"--kill-after={GRACE_S}", str(limit), *command],
        cwd=ROOT,
        env={**environ, **dict(check.environ)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        check=False,
    ).returncode
    interrupted = status in {124, 137}
    return "passed" if status == 0 else "interrupted" if interrupted else f"failed ({status})"


if __name__ == "__main__":
    sys.exit(main())
