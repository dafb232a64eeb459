"""Offloaded generation and loading on a GPU, beside the bandwidth of its bus and the reference.

    uv run python tools/benchmarks/bigmodel_gpu.py --gpu [--reference-python PATH]

Claims: with all blocks on the CPU, bytes moved per forward over its time reach 85 % of the bandwidth of a
plain pinned copy, and twice the reference's tokens per second; loading to the GPU reaches 85 % of the
smaller of read and copy bandwidth. Both limits are measured in the same process.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from bigmodel_case import Model, arguments, blocks_on, claim, run_roles, write_checkpoint

if TYPE_CHECKING:
    import argparse

PASSES = 8


def seconds(work: Any) -> float:
    torch.accelerator.synchronize()
    start = time.perf_counter()
    work()
    torch.accelerator.synchronize()
    return time.perf_counter() - start


def copy_bandwidth() -> float:
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device=torch.device(0))
    return max(host.numel() / seconds(lambda: device.copy_(host, non_blocking=True)) for _ in range(5))


def read_bandwidth(options: argparse.Namespace) -> float:
    best = 0.0
    for file in options.folder.glob("*.safetensors"):
        start, total = time.perf_counter(), 0
        with file.open("rb", buffering=0) as stream:
            buffer = bytearray(16 << 20)
            while got := stream.readinto(buffer):
                total += got
        best = max(best, total / (time.perf_counter() - start))
    return best


def run(options: argparse.Namespace, meta_model: Any, loader: Any) -> dict[str, float]:
    write_checkpoint(options.folder)
    with meta_model():
        offloaded, resident, warm = Model(), Model(), Model()
    loader(warm, options.folder, device_map={"": 0})
    del warm
    load = seconds(lambda: loader(resident, options.folder, device_map={"": 0}))
    model = loader(offloaded, options.folder, device_map=blocks_on("cpu", around=0))
    moved = sum(parameter.nbytes for parameter in resident.blocks.parameters())
    tokens = torch.zeros(1, 1, dtype=torch.long, device=torch.device(0))
    with torch.no_grad():
        model(tokens)
        forward = min(seconds(lambda: model(tokens)) for _ in range(PASSES))
        assert torch.allclose(model(tokens), resident(tokens), atol=1e-3)
    return {"forward": forward, "load": load, "moved": moved}


def ours(options: argparse.Namespace) -> dict[str, float]:
    from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch

    found = run(options, init_empty_weights, load_checkpoint_and_dispatch)
    copy, read = copy_bandwidth(), read_bandwidth(options)
    bus = copy * found["forward"] / found["moved"]  # the inverse of the share: the smallest is the best
    return {**found, "bus over us": bus, "limit over load": min(copy, read) * found["load"] / found["moved"]}


def reference(options: argparse.Namespace) -> dict[str, float]:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch  # pyright: ignore[reportMissingImports] - in its own environment

    return run(options, init_empty_weights, load_checkpoint_and_dispatch)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--gpu", action="store_true", help="required: says that there is one")
    options = parser.parse_args()
    if not options.role and not options.gpu:
        parser.error("needs a GPU: pass --gpu where there is one")
    found = run_roles(options, {"ours": ours, "reference": reference})
    if found is None:
        return 0
    mine = found["ours"]
    print(f"forward {mine['forward']:.3f} s for {mine['moved'] / 1e9:.2f} GB, load {mine['load']:.3f} s")
    good = claim("bus bandwidth over ours, offloaded forward", mine["bus over us"], 1 / 0.85)
    good &= claim("smaller of read and copy over ours, load", mine["limit over load"], 1 / 0.85)
    if "reference" in found:
        good &= claim("forward over the reference's", mine["forward"] / found["reference"]["forward"], 0.5)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
