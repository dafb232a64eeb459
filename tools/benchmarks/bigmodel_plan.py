"""Time to compute a device map, relative to the reference.

    uv run python tools/benchmarks/bigmodel_plan.py [--reference-python PATH]

Claims: 16,000 modules in at most 1/20 of the reference's time; 200,000 tensors in at most one second. The
balance of real architectures is printed as the largest share over the mean (1 is perfect); the reference
knows only devices that are there, so that its split is compared through its own formula in `--shares`, when
it can run.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from bigmodel_case import arguments, claim, run_roles
from torch import nn

if TYPE_CHECKING:
    import argparse

MEMORY = {0: int(3e6), 1: int(3e6), "cpu": 10**9}


def tree(meta_model: Any, modules: int) -> nn.Module:
    with meta_model():
        return nn.Sequential(
            *[nn.Sequential(*[nn.Linear(16, 16) for _ in range(20)]) for _ in range(modules // 20)]
        )


def best_of(count: int, work: Any) -> float:
    times: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def ours(_: argparse.Namespace) -> dict[str, float]:
    from accel_bigmodel import get_balanced_memory, infer_auto_device_map, init_empty_weights

    middle, large = tree(init_empty_weights, 16_000), tree(init_empty_weights, 100_000)
    both: dict[int | str, int | str] = {0: "1GB", 1: "1GB", 2: "1GB"}
    return {
        "modules_16000": best_of(5, lambda: infer_auto_device_map(middle, MEMORY)),
        "tensors_200000": best_of(3, lambda: infer_auto_device_map(large, MEMORY)),
        "balanced_200000": best_of(3, lambda: get_balanced_memory(large, both)),
    }


def reference(_: argparse.Namespace) -> dict[str, float]:
    from accelerate import infer_auto_device_map, init_empty_weights  # pyright: ignore[reportMissingImports] - in its own environment

    middle = tree(init_empty_weights, 16_000)
    return {"modules_16000": best_of(2, lambda: infer_auto_device_map(middle, MEMORY))}


def main() -> int:
    found = run_roles(arguments(__doc__).parse_args(), {"ours": ours, "reference": reference})
    if found is None:
        return 0
    for role, figures in found.items():
        print(f"{role:>10}: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in figures.items()))
    good = claim("seconds for 200,000 tensors", found["ours"]["tensors_200000"], 1.0)
    good &= claim("seconds to balance 200,000 tensors", found["ours"]["balanced_200000"], 1.0)
    if "reference" in found:
        ratio = found["ours"]["modules_16000"] / found["reference"]["modules_16000"]
        good &= claim("16,000 modules over the reference's", ratio, 1 / 20)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
