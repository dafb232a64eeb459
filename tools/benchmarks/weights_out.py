"""Peak memory and time of gathering the full weights of a model sharded across two ranks.

    uv run python tools/benchmarks/weights_out.py [--megabytes 800] [--bucket 64]

A model of that size is sharded by FSDP2 over two ranks of the CPU. Each row is measured in the same two
processes, after a warm-up: the largest growth of the memory of a rank (VmHWM beyond VmRSS),
and the seconds of the slower rank.

- `buckets`: `named_full_parameters(bucket_bytes=…)`; `to main`: with `to_main_only=True`;
- `state dict`: `get_state_dict`, whose result is on the main process;
- `one by one`: `full_tensor()` of every parameter, by hand.

Claim: gathering in buckets takes the memory of at most two buckets, and 16 MB.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from process_memory import memory
from ranks import WORLD, Ranks, join
from torch import nn

WIDTH = 1024
SLACK = 16e6  # bytes


def passes(accelerator: Any, model: nn.Module, bucket: int) -> dict[str, Any]:
    """Return what is measured by name: each is called on both ranks."""

    def full(parameter: Any) -> Any:
        return parameter.detach().full_tensor()

    def drain(tensors: Any) -> None:
        for _ in tensors:
            pass

    return {
        "buckets": lambda: drain(accelerator.named_full_parameters(bucket_bytes=bucket)),
        "to main": lambda: drain(accelerator.named_full_parameters(bucket_bytes=bucket, to_main_only=True)),
        "state dict": lambda: accelerator.get_state_dict(model),
        "one by one": lambda: drain(full(parameter) for parameter in model.parameters()),
    }


def work(rank: int, port: int) -> None:
    """Measure as told on standard input: the name of a pass, what is asked for, and the size of a bucket."""
    from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
    from accel_train import Accelerator

    join(rank, port)
    print("ready", flush=True)
    accelerator, model = None, None
    for line in sys.stdin:
        name, what, number = json.loads(line)
        if name == "make":
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Linear"],
            )
            accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
            layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(number)]
            model = accelerator.prepare(nn.Sequential(*layers))
            print(0.0, flush=True)
            continue
        assert model is not None
        run = passes(accelerator, model, number)[name]
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        before, start = memory("VmRSS"), time.perf_counter()
        run()
        taken = time.perf_counter() - start
        print(taken if what == "seconds" else memory("VmHWM") - before, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=800, help="size of the model")
    parser.add_argument("--bucket", type=float, default=64, help="megabytes of a bucket")
    parser.add_argument("--rounds", type=int, default=3, help="how often each pass is timed")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.rank, arguments.port)
        return
    bucket = int(arguments.bucket * 1e6)
    ranks = Ranks(sys.executable, __file__, "accel")
    ranks.measure("make", "", round(arguments.megabytes * 1e6 / (4 * WIDTH * WIDTH)))
    print(f"{arguments.megabytes:.0f} MB in {WORLD} shards, buckets of {arguments.bucket:.0f} MB", flush=True)
    peaks: dict[str, float] = {}
    for name in ("buckets", "to main", "state dict", "one by one"):
        ranks.measure(name, "seconds", bucket)
        peaks[name] = max(ranks.measure(name, "bytes", bucket) for _ in range(arguments.rounds))
        seconds = min(ranks.measure(name, "seconds", bucket) for _ in range(arguments.rounds))
        print(f"  {name:>10}: grows by {peaks[name] / 1e6:7.1f} MB, {seconds:6.3f} s", flush=True)
    ranks.close()
    if max(peaks["buckets"], peaks["to main"]) > 2 * bucket + SLACK:
        sys.exit("not as claimed: a pass takes more than two buckets")


if __name__ == "__main__":
    main()
