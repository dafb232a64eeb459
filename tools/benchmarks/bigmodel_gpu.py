"""Offloaded forwards and loading on a GPU, beside the bandwidth of its bus and the reference.

    python tools/benchmarks/bigmodel_gpu.py [--rounds N] [--small]

Models of blocks of 50 MB (small layers, where overhead counts) and 436 MB (a layer of an 8B model in
bfloat16), with all blocks on the CPU, and with blocks of 436 MB on the disk. Each library runs in processes
of its own, alternately; the best of each counts. The reference takes part if it is installed.

Claims: with blocks of 436 MB on the CPU, bytes moved per forward over its time reach 85 % of the bandwidth
of a plain pinned copy, and half the reference's time; from the disk 70 % of the smaller of read and copy;
loading to the GPU the same. All limits are measured in the same process. Also printed: the peak of the
device's memory in blocks (two blocks, and the activations of the forward). `--small`: small blocks, on the
CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from bigmodel_case import claim
from gpu_facts import copy_bandwidth, device_for, read_bandwidth, seconds, synchronize
from torch import nn

LIMITS = {"cpu": 1 / 0.85, "disk": 1 / 0.7, "load": 1 / 0.7}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model: bytes of a block, number of blocks, and where they are offloaded to."""

    width: int
    blocks: int
    where: str

    @property
    def name(self) -> str:
        """What is printed."""
        return f"{4 * 2 * self.width**2 / 1e6:.0f} MB on the {self.where}"


CASES = (
    Case(width=2500, blocks=48, where="cpu"),
    Case(width=7382, blocks=16, where="cpu"),
    Case(width=7382, blocks=8, where="disk"),
)
SMALL = (Case(width=64, blocks=6, where="cpu"), Case(width=64, blocks=4, where="disk"))


class Block(nn.Module):
    """Four linear layers in bfloat16, and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16}
        self.layers = nn.Sequential(*(nn.Linear(width, width, **options) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return x + self.layers(x)


class Model(nn.Module):
    """Blocks in a row, and a small head, which stays on the device and so says where the blocks run."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(case.width) for _ in range(case.blocks))
        self.head = nn.Linear(case.width, 16, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def write_checkpoint(case: Case, folder: Path) -> None:
    """Write random weights, one file for each block and one for the head."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Model(case).state_dict().items()}
    table = {name: f"{'.'.join(name.split('.')[:2])}.safetensors" for name in shapes}
    for file in sorted(set(table.values())):
        values: dict[str, torch.Tensor] = {}
        for name in (name for name in shapes if table[name] == file):
            values[name] = torch.empty(shapes[name], dtype=torch.bfloat16)
            values[name].view(torch.int16).random_(0x3A00, 0x3B80)  # 0.0005 to 0.004, quickly drawn
        save_file(values, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def measure(library: str, case: Case, folder: Path, device: torch.device) -> dict[str, float]:
    """Measure a case: seconds of a forward and of a load to the device, and the limits of this process."""
    api: Any = import_module(library)
    on_device: int | str = "cpu" if device.type == "cpu" else 0
    with api.init_empty_weights():
        offloaded, resident = Model(case), Model(case)
    device_map = {**{f"blocks.{index}": case.where for index in range(case.blocks)}, "head": on_device}
    options = {"offload_folder": str(folder / library)} if case.where == "disk" else {}
    model = api.load_checkpoint_and_dispatch(offloaded, str(folder), device_map=device_map, **options)
    x = torch.randn(1, case.width, device=device, dtype=torch.bfloat16)
    block = 4 * 2 * case.width**2
    with torch.no_grad():
        expected = model(x)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        forward = seconds(lambda: model(x), device)
        peak = torch.cuda.max_memory_allocated() / block if device.type == "cuda" else 0.0
        start = time.perf_counter()
        api.load_checkpoint_and_dispatch(resident, str(folder), device_map={"": on_device})
        synchronize(device)
        load = time.perf_counter() - start
        assert torch.equal(expected, resident(x)), "the offloaded model computes something else"
    read = read_bandwidth(folder / "blocks.0.safetensors")
    copy = copy_bandwidth(min(block, 1 << 28), device)
    moved = case.blocks * block
    return {"forward": forward, "load": load, "moved": moved, "peak": peak, "copy": copy, "read": read}


def compare(case: Case, number: int, options: argparse.Namespace) -> bool:
    """Run a case with each library alternately; print its figures; say whether the claims hold."""
    libraries = ["accel", *(["accelerate"] if find_spec("accelerate") else [])]
    best: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        write_checkpoint(case, Path(name))
        for _ in range(options.rounds):
            for library in libraries:
                command = [
                    sys.executable,
                    __file__,
                    "--role",
                    library,
                    "--case",
                    str(number),
                    "--folder",
                    name,
                ]
                command += ["--small"] if options.small else []
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    print(f"MISSED  {case.name}, {library}: {done.stderr[-2000:]}", flush=True)
                    return False
                found = json.loads(done.stdout.strip().splitlines()[-1])
                fastest = best.setdefault(library, found)
                for key in ("forward", "load"):
                    fastest[key] = min(fastest[key], found[key])
    for library, found in best.items():
        rates = ", ".join(
            f"{key} {found['moved'] / found[key] / 1e9:.2f} GB/s" for key in ("forward", "load")
        )
        print(f"{case.name}, {library}: {rates}, peak {found['peak']:.1f} blocks", flush=True)
    ours = best["accel"]
    print(f"{case.name}: pinned copy {ours['copy'] / 1e9:.2f} GB/s, read {ours['read'] / 1e9:.2f} GB/s")
    slower = min(ours["copy"], ours["read"])
    limit = ours["copy"] if case.where == "cpu" else slower
    good = claim(
        f"{case.name}: limit over forward", limit * ours["forward"] / ours["moved"], LIMITS[case.where]
    )
    good &= claim(f"{case.name}: limit over load", slower * ours["load"] / ours["moved"], LIMITS["load"])
    if "accelerate" in best:
        ratio = ours["forward"] / best["accelerate"]["forward"]
        good &= claim(f"{case.name}: forward over the reference's", ratio, 0.5)
    return good or case.width == CASES[0].width


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="processes per library; the best counts")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="for checkpoints: 7 GB")
    parser.add_argument("--small", action="store_true", help="small blocks, on the CPU")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = SMALL if options.small else CASES
    if options.role:
        device = device_for(small=options.small)
        print(json.dumps(measure(options.role, cases[options.case], Path(options.folder), device)))
        return 0
    good = [compare(case, number, options) for number, case in enumerate(cases)]
    return int(not all(good) and not options.small)


if __name__ == "__main__":
    sys.exit(main())
