"""Time of `Accelerator.log` with each tracker, relative to calling the library directly.

    uv run python tools/benchmarks/trackers.py [--trackers NAME ...] [--rounds N] [--gpu]

Each library runs offline in a process of its own, in a new folder. Ours and the library's own call log the
same loss, a tensor that the direct call reads with `item()`, learning rate and epoch to the same run, and
alternate within one process, in rounds of as many calls each, at least one and some 20 ms. Before each round
the library's own threads have time to finish the work of the last one. Ratios are of the medians over pairs
of neighbouring rounds, and of the fastest rounds, which other work on the machine disturbs less; the claim
is about the former. `none` is `Accelerator.log` without trackers. With `--gpu`, a training step on the
device that logs its loss alternates with the same step that logs nothing, and with one where the library is
called with `item()`. Libraries that are not installed are left out, and named.

Claim: at most 1.10 of the direct call.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_state.libraries import is_installed
from accel_train import Accelerator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

CLAIM = 1.10
ROUND_SECONDS = 0.02
MOST_CALLS = 200  # of a round
PAUSE_SECONDS = 0.05  # before a round
DEVICE_STEPS = 200
ROOT = Path(__file__).resolve().parents[2]
OFFLINE_CASES = runpy.run_path(str(ROOT / "tests-integration/tracking/library_cases.py"))


def scalars_one_by_one(write: Callable[..., Any], values: Mapping[str, float], step: int) -> None:
    for name, value in values.items():
        write(name, value, step)


def direct_dvclive(live: Any, values: Mapping[str, float], step: int) -> None:
    live.step = step
    for name, value in values.items():
        live.log_metric(name, value)
    live.next_step()


def direct_aim(run: Any, values: Mapping[str, float], step: int) -> None:
    for name, value in values.items():
        run.track(value, name=name, step=step)


def direct_clearml(task: Any, values: Mapping[str, float], step: int) -> None:
    logger = task.get_logger()
    for name, value in values.items():
        logger.report_scalar(title=name, series=name, value=value, iteration=step)


def direct_mlflow(_: Any, values: Mapping[str, float], step: int) -> None:
    import_module("mlflow").log_metrics(values, step=step)


# By the tracker's name: what its users write, given the library's own object.
DIRECT: dict[str, Callable[[Any, dict[str, float], int], object]] = {
    "aim": direct_aim,
    "clearml": direct_clearml,
    "comet_ml": lambda experiment, values, step: experiment.log_metrics(values, step=step),
    "dvclive": direct_dvclive,
    "mlflow": direct_mlflow,
    "swanlab": lambda run, values, step: run.log(values, step=step),
    "tensorboard": lambda writer, values, step: scalars_one_by_one(writer.add_scalar, values, step),
    "trackio": lambda run, values, step: run.log(values, step=step),
    "wandb": lambda run, values, step: run.log(values, step=step),
}


def start(name: str) -> Accelerator:
    """An accelerator with one tracker that is started offline."""
    accelerator = Accelerator(log_with=name, project_dir="logs")
    accelerator.init_trackers("project", init_kwargs={name: OFFLINE_CASES["CASES"][name][2]})
    return accelerator


def alternate(kinds: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, in rounds where who goes first alternates; the first round is thrown away."""
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(rounds + 1):
        for name in sorted(kinds, reverse=turn % 2 == 1):
            time.sleep(PAUSE_SECONDS)
            begin = time.perf_counter()
            kinds[name]()
            seconds[name].append(time.perf_counter() - begin)
    return {name: times[1:] for name, times in seconds.items()}


def measure(name: str, rounds: int) -> dict[str, list[float]]:
    """Microseconds per call of a library, of every round."""
    accelerator = start(name)
    library, direct = accelerator.get_tracker(name, unwrap=True), DIRECT[name]
    loss, step = torch.tensor(0.25), 0

    calls = 1

    def ours() -> None:
        nonlocal step
        for _ in range(calls):
            step += 1
            accelerator.log({"loss": loss, "lr": 1e-3, "epoch": 3}, step=step)

    def theirs() -> None:
        nonlocal step
        for _ in range(calls):
            step += 1
            direct(library, {"loss": loss.item(), "lr": 1e-3, "epoch": 3}, step)

    def by_hand() -> None:
        nonlocal step
        for _ in range(calls):
            step += 1
            if accelerator.is_main_process:
                values = {"loss": loss, "lr": 1e-3, "epoch": 3}
                read = {
                    name: value.item() if isinstance(value, torch.Tensor) else value
                    for name, value in values.items()
                }
                direct(library, read, step)

    kinds = {"ours": ours, "direct": theirs, "by hand": by_hand}
    calls = max(1, min(MOST_CALLS, int(ROUND_SECONDS / min(alternate(kinds, 5)["direct"]))))
    seconds = alternate(kinds, rounds)
    accelerator.end_training()
    return {kind: [one / calls * 1e6 for one in times] for kind, times in seconds.items()}


def measure_none(rounds: int) -> float:
    """Microseconds per call without trackers, at the fastest."""
    accelerator = Accelerator()
    values = {"loss": torch.tensor(0.25), "lr": 1e-3, "epoch": 3}

    def log() -> None:
        for step in range(MOST_CALLS):
            accelerator.log(values, step=step)

    return min(alternate({"none": log}, rounds)["none"]) / MOST_CALLS * 1e6


def measure_on_device(name: str, rounds: int) -> dict[str, list[float]]:
    """Microseconds per training step on the device: nothing logged, ours, and the library's call."""
    accelerator = start(name)
    library, direct = accelerator.get_tracker(name, unwrap=True), DIRECT[name]
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    inputs = torch.randn(512, 1024, device=accelerator.device)
    number = 0

    def loop(log: Callable[[torch.Tensor, int], object]) -> Callable[[], None]:
        def run() -> None:
            nonlocal number
            for _ in range(DEVICE_STEPS):
                number += 1
                loss = model(inputs).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                log(loss, number)
            torch.accelerator.synchronize()

        return run

    loops = {
        "direct": loop(lambda loss, step: direct(library, {"loss": loss.item()}, step)),
        "none": loop(lambda _, step: step),
        "ours": loop(lambda loss, step: accelerator.log({"loss": loss}, step=step)),
    }
    seconds = alternate(loops, rounds)
    accelerator.end_training()
    return {kind: [one / DEVICE_STEPS * 1e6 for one in times] for kind, times in seconds.items()}


def in_process(name: str, rounds: int, *, gpu: bool) -> dict[str, list[float]]:
    """Measure in a process of its own, offline, in a folder that is removed."""
    with tempfile.TemporaryDirectory() as folder:
        offline = {key: value.format(folder=folder) for key, value in OFFLINE_CASES["OFFLINE"].items()}
        use = "false" if gpu else "true"
        command = [sys.executable, __file__, "--measure", name, "--rounds", str(rounds)]
        ended = subprocess.run(
            [*command, *(["--gpu"] if gpu else [])],
            check=False,
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, **offline, "ACCELERATE_USE_CPU": use},
        )
        if ended.returncode:
            sys.exit(f"{name} ended with {ended.returncode}:\n{ended.stderr[-4000:]}")
        (answer,) = (line for line in ended.stdout.splitlines() if line.startswith("measured "))
        return json.loads(answer.removeprefix("measured "))


def installed(names: Sequence[str]) -> list[str]:
    """Those whose libraries are installed; says which are not."""
    found = [name for name in names if is_installed(name)]
    for name in names:
        if name not in found:
            print(f"{name:>12} is left out: {name} is not installed")
    return found


def report(name: str, times: Mapping[str, list[float]], baseline: str) -> float:
    """Print a line; return the ratio of ours."""
    ratios: dict[str, float] = {}
    for kind, values in times.items():
        pairs = zip(values, times[baseline], strict=True)
        ratios[kind] = statistics.median(one / other for one, other in pairs)
        fastest = min(values) / min(times[baseline])
        print(
            f"{name:>12} {kind:>7}: {statistics.median(values):9.1f} us median, {min(values):9.1f} us fastest"
            + ("" if kind == baseline else f", {ratios[kind]:.3f} and {fastest:.3f} of {baseline}"),
            flush=True,
        )
    return ratios["ours"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trackers", nargs="+", choices=sorted(DIRECT), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=40, help="pairs to compare")
    parser.add_argument("--gpu", action="store_true", help="measure training steps on the accelerator")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rounds = arguments.rounds
    if arguments.measure:
        found = (measure_on_device if arguments.gpu else measure)(arguments.measure, rounds)
        print(f"measured {json.dumps(found)}")
        return
    if arguments.gpu:
        for name in installed(arguments.trackers or ["tensorboard"]):
            report(name, in_process(name, rounds, gpu=True), "none")
        return
    names = installed(arguments.trackers or sorted(DIRECT))
    ratios = {name: report(name, in_process(name, rounds, gpu=False), "direct") for name in names}
    print(f"{'none':>12}    ours: {measure_none(rounds):9.2f} us fastest")
    missed = [name for name, ratio in ratios.items() if ratio > CLAIM]
    if missed:
        sys.exit(f"more than the claimed {CLAIM}: {', '.join(missed)}")


if __name__ == "__main__":
    main()
