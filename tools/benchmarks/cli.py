"""Run time of the command, relative to the reference's and to plain Python.

    uv run python tools/benchmarks/cli.py [--reference-python PATH]

Whole processes, from start to exit, alternately; the interpreter of this script runs ours, the other the
reference's (its `accelerate.commands.accelerate_cli`). Printed are medians of wall times and of the ratios of
each turn. Claims: `accel --help`, `accel config default`, `accel env --help` and `accel launch --help` at
least 15 times as fast as the reference's; `accel launch script` of one process costs at most 0.3 s more than
`python script`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compared import options

TIMES_FASTER = 15.0
EXTRA_SECONDS = 0.3
WRITTEN = (
    Path(tempfile.gettempdir()) / "accel_benchmark_config.yaml"
)  # removed before each run, and at the end
QUICK = (
    ("--help",),
    ("config", "default", "--config_file", str(WRITTEN)),
    ("env", "--help"),
    ("launch", "--help"),
)


def seconds(*command: str) -> float:
    """Wall time of a whole process."""
    WRITTEN.unlink(missing_ok=True)
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def take_turns(commands: dict[str, tuple[str, ...]], rounds: int) -> list[dict[str, float]]:
    """Time every command once per round, after one round that fills the page cache."""
    for command in commands.values():
        seconds(*command)
    return [{name: seconds(*command) for name, command in commands.items()} for _ in range(rounds)]


def median(turns: list[dict[str, float]], name: str) -> float:
    return statistics.median(turn[name] for turn in turns)


def quick(reference: str | None, rounds: int) -> list[str]:
    """Compare the commands that have to answer at once; return what falls short of the claim."""
    missed: list[str] = []
    for words in QUICK:
        commands = {
            "python -c pass": (sys.executable, "-c", "pass"),
            "ours": (sys.executable, "-m", "accel_cli", *words),
        }
        if reference:
            commands["reference"] = (reference, "-m", "accelerate.commands.accelerate_cli", *words)
        turns = take_turns(commands, rounds)
        name = " ".join(("accel", *(word for word in words if word != str(WRITTEN))))
        print(
            f"{name:>36}: {median(turns, 'ours'):6.3f} s "
            f"(python -c pass: {median(turns, 'python -c pass'):.3f} s)"
        )
        if reference:
            ratio = statistics.median(turn["reference"] / turn["ours"] for turn in turns)
            print(f"{'reference':>36}: {median(turns, 'reference'):6.3f} s, {ratio:.1f} times as long")
            if ratio < TIMES_FASTER:
                missed.append(f"{name}: {ratio:.1f} times as fast, claimed are {TIMES_FASTER}")
    return missed


def launch(reference: str | None, rounds: int) -> list[str]:
    """Compare starting an empty script; return what falls short of the claim."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.touch()
        plain, ours = "python script", "accel launch script"
        options = ("launch", "--cpu", str(script))
        commands = {plain: (sys.executable, str(script)), ours: (sys.executable, "-m", "accel_cli", *options)}
        if reference:
            commands["reference"] = (reference, "-m", "accelerate.commands.accelerate_cli", *options)
        turns = take_turns(commands, rounds)
    extra = {
        name: statistics.median(turn[name] - turn[plain] for turn in turns)
        for name in commands
        if name != plain
    }
    print(f"{plain:>36}: {median(turns, plain):6.3f} s")
    for name, more in extra.items():
        print(f"{name:>36}: {median(turns, name):6.3f} s, {more:.3f} s more than plain Python")
    if reference:
        print(f"{'':>36}  the reference costs {extra['reference'] / extra[ours]:.0f} times as much")
    return (
        [f"{ours}: {extra[ours]:.3f} s more, claimed are {EXTRA_SECONDS}"]
        if extra[ours] > EXTRA_SECONDS
        else []
    )


def main() -> None:
    arguments = options(__doc__, 7, "how often each command runs").parse_args()
    reference = str(arguments.reference_python) if arguments.reference_python else None
    missed = quick(reference, arguments.rounds) + launch(reference, arguments.rounds)
    WRITTEN.unlink(missing_ok=True)
    if missed:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
