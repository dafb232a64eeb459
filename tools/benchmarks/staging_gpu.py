"""How long training on a GPU waits for a background save, relative to a pinned copy and a blocking save.

    python tools/benchmarks/staging_gpu.py [--gigabytes 2] [--folder DIR] [--small]

A model of that size with the state of AdamW, three times as much in all. `save_state(blocking=False)`
copies it to the host and returns; a thread then writes it. Claim: it returns in at most 1 / 0.6 of the time
in which a plain pinned copy moves as much (except the first save, which allocates the buffers that later
saves reuse), and a blocking save writes the same bytes. `--small`: a small model, on the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bigmodel_case import claim
from gpu_facts import copy_bandwidth, device_for, synchronize

from accel_train import Accelerator

ROUNDS = 3


def digests(folder: Path) -> dict[str, str]:
    """What the files of weights and optimizers hold."""
    files = [*folder.glob("*.safetensors"), *folder.glob("optimizer*")]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the model in float32")
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="for checkpoints: twice three times that"
    )
    parser.add_argument("--small", action="store_true", help="a small model, on the CPU")
    options = parser.parse_args()
    device = device_for(small=options.small)
    width, count = (64, 4) if options.small else (4096, round(options.gigabytes * 1e9 / (4 * 4096**2)))
    accelerator = Accelerator(cpu=device.type == "cpu")
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(count)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    nbytes = 3 * count * 4 * width**2
    copy = copy_bandwidth(min(nbytes, 1 << 28), device, back=True)
    stalls: list[float] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        waiting, behind = Path(name) / "waiting", Path(name) / "behind"
        start = time.perf_counter()
        accelerator.save_state(str(waiting))
        print(f"a save that waits: {time.perf_counter() - start:.3f} s for {nbytes / 1e9:.2f} GB", flush=True)
        for turn in range(ROUNDS):
            shutil.rmtree(behind, ignore_errors=True)
            synchronize(device)
            start = time.perf_counter()
            save: Any = accelerator.save_state(str(behind), blocking=False)
            stalls.append(time.perf_counter() - start)
            save.wait()
            total = time.perf_counter() - start
            print(
                f"save {turn + 1} in the background: waited {stalls[-1]:.3f} s, staged with "
                f"{nbytes / stalls[-1] / 1e9:.2f} GB/s, all written after {total:.3f} s",
                flush=True,
            )
        same = digests(waiting) == digests(behind) != {}
    print(f"{'holds ' if same else 'MISSED'}  the same bytes as of a save that waits")
    print(f"pinned copy to the host: {copy / 1e9:.2f} GB/s")
    good = claim("staging over a pinned copy", copy * min(stalls[1:]) / nbytes, 1 / 0.6)
    return int(not same or (not good and not options.small))


if __name__ == "__main__":
    sys.exit(main())
