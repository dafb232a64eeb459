"""One forward of a 2.4 GB model with all blocks on disk and the file in the page cache, executing on the CPU.

    uv run python tools/benchmarks/bigmodel_forward.py [--reference-python PATH]

The limit is the same model wholly in memory, measured alternately in the same process. Claim: at most 1.1 of
that. `cold` is a forward after the kernel was asked to drop the file from its cache; mapped pages may stay.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
from bigmodel_case import VOCABULARY, Model, arguments, blocks_on, claim, run_roles, write_checkpoint

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

PASSES = 7


def forward(
    options: argparse.Namespace, meta_model: Any, loader: Any, extra: dict[str, Any]
) -> dict[str, float]:
    write_checkpoint(options.folder)
    with meta_model():
        disk = Model()
    disk = loader(disk, options.folder, device_map=blocks_on("disk"), **extra)
    from safetensors.torch import load_file

    memory = Model()
    for file in sorted(options.folder.glob("*.safetensors")):
        memory.load_state_dict(load_file(file), strict=False)
    tokens = torch.arange(8).remainder(VOCABULARY)[None]
    times: dict[str, list[float]] = {"disk": [], "memory": []}
    with torch.no_grad():
        assert torch.allclose(disk(tokens), memory(tokens), atol=1e-3)
        for _ in range(PASSES):
            for name, model in (("memory", memory), ("disk", disk)):
                start = time.perf_counter()
                model(tokens)
                times[name].append(time.perf_counter() - start)
        cold = float("inf")
        for _ in range(2):
            drop(options.folder)
            start = time.perf_counter()
            disk(tokens)
            cold = min(cold, time.perf_counter() - start)
    best = {name: min(values) for name, values in times.items()}
    return {**best, "ratio": best["disk"] / best["memory"], "cold": cold}


def drop(folder: Path) -> None:
    """Ask the kernel to forget the files; pages that are mapped stay."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def ours(options: argparse.Namespace) -> dict[str, float]:
    from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch

    return forward(options, init_empty_weights, load_checkpoint_and_dispatch, {})


def reference(options: argparse.Namespace) -> dict[str, float]:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch  # pyright: ignore[reportMissingImports] - in its own environment

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        return forward(options, init_empty_weights, load_checkpoint_and_dispatch, {"offload_folder": folder})


def main() -> int:
    found = run_roles(arguments(__doc__).parse_args(), {"ours": ours, "reference": reference})
    if found is None:
        return 0
    for role, figures in found.items():
        disk, memory, cold = figures["disk"], figures["memory"], figures["cold"]
        ratio = figures["ratio"]
        print(f"{role:>10}: disk {disk:.3f} s, cold {cold:.3f} s, memory {memory:.3f} s, x {ratio:.2f}")
    return 0 if claim("disk over memory", found["ours"]["ratio"], 1.1) else 1


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")
    sys.exit(main())
