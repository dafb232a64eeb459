"""Loading a 2.4 GB safetensors checkpoint, beside the reference and plain `safetensors`.

    uv run python tools/benchmarks/bigmodel_load.py [--reference-python PATH]

Claims: with all blocks on disk at most 1/20 of the reference's time, memory grows by no more than the largest
block and 64 MB; with all on the CPU at most 1.3 of `safetensors.torch.load_file` and
`load_state_dict(assign=True)`.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from bigmodel_case import Model, arguments, blocks_on, claim, run_roles, write_checkpoint

if TYPE_CHECKING:
    import argparse

BLOCK_BYTES = 12 * 1024 * 1024 * 4 + 13 * 1024 * 4


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def load(
    options: argparse.Namespace, meta_model: Any, loader: Any, extra: dict[str, Any]
) -> dict[str, float]:
    write_checkpoint(options.folder)
    warm(options.folder)
    with meta_model():
        disk, cpu, first = Model(), Model(), Model()
    before = resident()
    start = time.perf_counter()
    loader(disk, options.folder, device_map=blocks_on("disk"), **extra)
    on_disk = time.perf_counter() - start
    grown = resident() - before
    on_cpu: list[float] = []
    for model in (first, cpu):  # twice, as the plain load below
        start = time.perf_counter()
        loader(model, options.folder, device_map={"": "cpu"})
        on_cpu.append(time.perf_counter() - start)
    return {"disk": on_disk, "grown": grown, "cpu": min(on_cpu)}


def ours(options: argparse.Namespace) -> dict[str, float]:
    from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch

    return load(options, init_empty_weights, load_checkpoint_and_dispatch, {})


def reference(options: argparse.Namespace) -> dict[str, float]:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch  # pyright: ignore[reportMissingImports] - in its own environment

    folder = tempfile.mkdtemp(dir=options.folder)
    try:
        return load(options, init_empty_weights, load_checkpoint_and_dispatch, {"offload_folder": folder})
    finally:
        shutil.rmtree(folder)


def plain(options: argparse.Namespace) -> dict[str, float]:
    from safetensors.torch import load_file

    write_checkpoint(options.folder)
    warm(options.folder)
    best = float("inf")
    for _ in range(2):  # the first pass pays what the roles above paid before their clocks started
        with torch.device("meta"):
            model = Model()
        start = time.perf_counter()
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(options.folder.glob("*.safetensors")):
            tensors.update(load_file(file))
        model.load_state_dict(tensors, assign=True)
        best = min(best, time.perf_counter() - start)
    return {"cpu": best}


def warm(folder: Path) -> None:
    """Have the files in the page cache."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            while stream.read(1 << 24):
                pass


def line(role: str, found: dict[str, float]) -> str:
    disk, cpu, grown = found["disk"], found["cpu"], found["grown"] / 1e6
    return f"{role}: disk {disk:.3f} s, cpu {cpu:.3f} s, memory grew by {grown:.1f} MB"


def main() -> int:
    options = arguments(__doc__).parse_args()
    found = run_roles(options, {"ours": ours, "plain": plain, "reference": reference})
    if found is None:
        return 0
    mine = found["ours"]
    print(line("ours", mine))
    print(f"plain safetensors, cpu: {found['plain']['cpu']:.3f} s")
    good = claim("cpu load over plain safetensors", mine["cpu"] / found["plain"]["cpu"], 1.3)
    good &= claim("bytes grown in a disk load", mine["grown"], BLOCK_BYTES + (64 << 20))
    if "reference" in found:
        other = found["reference"]
        print(line("reference", other))
        good &= claim("disk load over the reference's", mine["disk"] / other["disk"], 1 / 20)
    return 0 if good else 1


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")
    sys.exit(main())
