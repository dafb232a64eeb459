"""Overhead of each strategy through `Accelerator`, relative to calling its library by hand.

    uv run python tools/benchmarks/strategies.py [--only NAME] [--what time|memory]

Two processes on the CPU train a small transformer. Step time: both ways alternate within one job, so that
whatever else the machine does slows down both; printed is the ratio of their times per step, the median over
pairs of rounds. Claim: at most 1.03. Memory: the peak of a rank with a model of 400 MB, each way in a job of
its own, from the making of the model to two steps. Claim: at most 1.05.

A row of `WAYS` is a strategy: how it is prepared by hand, and how through `Accelerator`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from process_memory import memory
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TIME_CLAIM, MEMORY_CLAIM = 1.03, 1.05
RANKS, STEPS, ROUNDS = 2, 8, 11


class Block(nn.Module):
    """A feed-forward block; what it computes does not matter here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the block has found."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1)
        self.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Go through all blocks."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


Step = Callable[[torch.Tensor], None]
"""One step of training on a batch: forward, backward, clipping, optimizer."""


@dataclass(frozen=True, slots=True)
class Way:
    """A strategy, prepared in two ways from a model."""

    by_hand: Callable[[Stack], Step]
    through_accel: Callable[[Stack], Step]


def by_hand(divide: Callable[[Stack], None]) -> Callable[[Stack], Step]:
    """The loop of plain PyTorch around a model that is divided in place."""

    def prepare(model: Stack) -> Step:
        divide(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

        def step(batch: torch.Tensor) -> None:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return prepare


def through(**make: Any) -> Callable[[Stack], Step]:
    """The loop of the documentation; `make` gives the arguments of `Accelerator`."""

    def prepare(model: Stack) -> Step:
        from accel import Accelerator

        arguments = {name: value() for name, value in make.items()}
        accelerator = Accelerator(cpu=True, **arguments)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        prepared, optimizer = accelerator.prepare(model, optimizer)

        def step(batch: torch.Tensor) -> None:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()

        return step

    return prepare


def fsdp2_by_hand(model: Stack) -> None:
    """`fully_shard` for every block, then for the rest."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tp_by_hand(model: Stack) -> None:
    """`parallelize_module` with a plan."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})


def fsdp2_plugin() -> Any:
    """What `fsdp2_by_hand` does."""
    from accel import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )


def tensor_axis() -> Any:
    """What `tp_by_hand` does."""
    from accel.parallelism_config import ParallelismConfig

    return ParallelismConfig(tp_size=RANKS)


def deepspeed_by_hand(stage: int) -> Callable[[Stack], Step]:
    """`deepspeed.initialize`, and the loop of its documentation."""

    def prepare(model: Stack) -> Step:
        from accel_plugins.deepspeed.library import start
        from accel_state.partial_state import PartialState

        deepspeed = start(PartialState(cpu=True).runtime)  # which spares both ways the same compilation
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 0.0,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

        def step(batch: torch.Tensor) -> None:
            engine.backward(engine(batch).square().mean())
            engine.step()

        return step

    return prepare


def deepspeed_plugin(stage: int) -> Callable[[], Any]:
    """What `deepspeed_by_hand` does."""

    def make() -> Any:
        from accel import DeepSpeedPlugin

        return DeepSpeedPlugin(zero_stage=stage)

    return make


WAYS: dict[str, Way] = {
    "fsdp2": Way(by_hand(fsdp2_by_hand), through(fsdp_plugin=fsdp2_plugin)),
    "tp": Way(by_hand(tp_by_hand), through(parallelism_config=tensor_axis)),
    **{
        f"zero{stage}": Way(deepspeed_by_hand(stage), through(deepspeed_plugin=deepspeed_plugin(stage)))
        for stage in (1, 2, 3)
    },
}


def alternate(steps: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the seconds of a call of each step, in every round but the first two; who begins alternates."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(ROUNDS + 2):
        for name in [*steps] if turn % 2 else reversed([*steps]):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                steps[name]()
            if turn >= 2:
                times[name].append((time.perf_counter() - start) / STEPS)
    return times


def run_on_ranks(*arguments: str) -> dict[str, float]:
    """Run this file with `--worker` and arguments on CPU ranks; return the JSON that rank 0 prints last."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(RANKS), "--standalone"]
    done = subprocess.run(
        [*command, __file__, "--worker", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure_time(name: str) -> dict[str, float]:
    """Run both ways alternately; return seconds per step and the ratio."""
    way = WAYS[name]
    steps = {"by hand": way.by_hand(Stack(256, 4)), "accel": way.through_accel(Stack(256, 4))}
    batch = torch.randn(8, 32, 256)
    calls = {label: partial(step, batch) for label, step in steps.items()}
    times = alternate(calls)
    ratios = [mine / raw for mine, raw in zip(times["accel"], times["by hand"], strict=True)]
    return {label: statistics.median(each) for label, each in times.items()} | {
        "ratio": statistics.median(ratios)
    }


def measure_memory(name: str, label: str) -> dict[str, float]:
    """The peak of this process in MiB while a model of 400 MB is made, prepared and trained."""
    way = WAYS[name]
    model = Stack(1024, 12)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 2**20
    step = (way.by_hand if label == "by hand" else way.through_accel)(model)
    del model
    for _ in range(2):
        step(torch.randn(2, 16, 1024))
    return {"peak": memory("VmHWM") / 2**20, "model": size}


def worker(arguments: list[str]) -> None:
    """One rank of a job."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    what, *rest = arguments
    found: dict[str, float] = (measure_time if what == "time" else measure_memory)(*rest)
    worst = {name: torch.tensor(value) for name, value in found.items()}
    for value in worst.values():
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps({name: value.item() for name, value in worst.items()}))
    dist.destroy_process_group()


def main() -> int:
    """Print a line per strategy; returns 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=list(WAYS))
    parser.add_argument("--what", choices=["time", "memory"])
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return 0
    holds = True
    for name in [options.only] if options.only else WAYS:
        if options.what != "memory":
            found = run_on_ranks("time", name)
            holds &= found["ratio"] <= TIME_CLAIM
            print(
                f"{name:10} step by hand {found['by hand'] * 1e3:7.2f} ms, accel {found['accel'] * 1e3:7.2f} "
                f"ms, ratio {found['ratio']:.3f} (claim {TIME_CLAIM})"
            )
        if options.what != "time":
            peaks = {label: run_on_ranks("memory", name, label) for label in ("by hand", "accel")}
            ratio = peaks["accel"]["peak"] / peaks["by hand"]["peak"]
            holds &= ratio <= MEMORY_CLAIM
            print(
                f"{name:10} model {peaks['accel']['model']:.0f} MiB, peak by hand "
                f"{peaks['by hand']['peak']:.0f} MiB, accel {peaks['accel']['peak']:.0f} MiB, "
                f"ratio {ratio:.3f} (claim {MEMORY_CLAIM})"
            )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
