"""A 2.4 GB meta model in a fresh process, beside the reference's.

    uv run python tools/benchmarks/bigmodel_meta_model.py [--reference-python PATH]

Claims: at most 0.3 s, and nothing of the compiler stack imported.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from bigmodel_case import Model, arguments, claim, run_roles

if TYPE_CHECKING:
    import argparse


def build(init_empty_weights: Any) -> dict[str, float]:
    before = set(sys.modules)
    start = time.perf_counter()
    with init_empty_weights():
        model = Model()
        for parameter in model.parameters():
            parameter.data.normal_(0.0, 0.02)  # what many models do
    seconds = time.perf_counter() - start
    heavy = {name.split(".")[0] for name in set(sys.modules) - before} & {"sympy"}
    return {
        "seconds": seconds,
        "compiler": len(heavy),
        "gigabytes": sum(p.nbytes for p in model.parameters()) / 1e9,
    }


def ours(_: argparse.Namespace) -> dict[str, float]:
    from accel_bigmodel import init_empty_weights

    return build(init_empty_weights)


def reference(_: argparse.Namespace) -> dict[str, float]:
    from accelerate import init_empty_weights  # pyright: ignore[reportMissingImports] - in its own environment

    return build(init_empty_weights)


def main() -> int:
    found = run_roles(arguments(__doc__).parse_args(), {"ours": ours, "reference": reference})
    if found is None:
        return 0
    for role, figures in found.items():
        print(f"{role:>10}: {figures['seconds']:.3f} s for {figures['gigabytes']:.2f} GB")
    good = claim("seconds for the meta model", found["ours"]["seconds"], 0.3)
    good &= claim("compiler packages imported", found["ours"]["compiler"], 0)
    return 0 if good else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
