"""Time per step when the main process reads for all ranks, relative to a sharded loader.

    uv run python tools/benchmarks/dispatcher.py [--reference-python PATH]

Two processes, gloo, on the CPU, train a small model with DDP on batches of 16: token ids of one length, token
ids of other lengths in every batch, and images. Sharded (`dispatch_batches=False`) and dispatched
(`dispatch_batches=True`) epochs alternate in the same two processes, and turns of ours alternate with turns
of the reference, so that whatever else the machine does slows down all. Printed are medians of the slower
rank's time per step, and the median of the ratios of neighbouring epochs. Claim: at most 1.3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from ranks import WORLD, Ranks, join
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader, IterableDataset

if TYPE_CHECKING:
    from collections.abc import Iterator

CLAIM = 1.3
BATCH = 16
STEPS = 20
CASES = ("tokens", "ragged tokens", "images")
WAYS = ("sharded", "dispatched")


class Samples(IterableDataset[dict[str, torch.Tensor]]):
    """Samples from memory, in order."""

    def __init__(self, case: str) -> None:
        torch.manual_seed(0)
        count = STEPS * BATCH * WORLD
        if case == "images":
            self.samples = [{"inputs": image} for image in torch.randn(count, 3, 32, 32)]
        else:
            lengths = [128] * count if case == "tokens" else torch.randint(32, 225, (count,)).tolist()
            self.samples = [{"inputs": torch.randint(1000, (length,))} for length in lengths]
        for index, sample in enumerate(self.samples):
            sample["labels"] = torch.tensor(index % 10)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self.samples)


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad to the longest."""
    inputs = [sample["inputs"] for sample in samples]
    if inputs[0].dim() == 1:
        longest = max(map(len, inputs))
        inputs = [pad(tokens, (0, longest - len(tokens))) for tokens in inputs]
    return {"inputs": torch.stack(inputs), "labels": torch.stack([sample["labels"] for sample in samples])}


class Tokens(torch.nn.Module):
    """One layer of a small transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(1000, 32)
        self.layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.head = torch.nn.Linear(32, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Class scores, of shape `(batch, 10)`."""
        return self.head(self.layer(self.embed(inputs)).mean(1))


def make_model(case: str) -> torch.nn.Module:
    if case != "images":
        return Tokens()
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 225, 10),
    )


class Contest:
    """Both loaders of a library and the model that is trained with them."""

    def __init__(self, library: str, case: str) -> None:
        package, utils = import_module(library), import_module(f"{library}.utils")
        self.accelerator: Any = package.Accelerator(cpu=True)
        self.loaders: dict[str, Any] = {}
        for way in WAYS:
            config = utils.DataLoaderConfiguration(dispatch_batches=way == "dispatched")
            accelerator = package.Accelerator(cpu=True, dataloader_config=config)
            # The reference cannot join batches of other widths: without a claim on it, the widest for all.
            collating = collate if library == "accel" or case != "ragged tokens" else collate_wide
            self.loaders[way] = accelerator.prepare(
                DataLoader(Samples(case), batch_size=BATCH, collate_fn=collating)
            )
        model = make_model(case)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def epoch(self, way: str) -> float:
        """Seconds per step."""
        dist.barrier()
        start = time.perf_counter()
        steps = 0
        for batch in self.loaders[way]:
            loss = cross_entropy(self.model(batch["inputs"]), batch["labels"])
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            steps += 1
        dist.barrier()
        return (time.perf_counter() - start) / steps


def collate_wide(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad to the length of the longest sample there is."""
    batch = collate(samples)
    batch["inputs"] = pad(batch["inputs"], (0, 224 - batch["inputs"].shape[1]))
    return batch


def work(library: str, rank: int, port: int) -> None:
    """Be one rank: for every line `[case, way]` answer with seconds per step."""
    join(rank, port)
    known: dict[str, Contest] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        case, way = json.loads(line)
        if case not in known:
            known[case] = Contest(library, case)
            for each in WAYS:
                known[case].epoch(each)
        print(known[case].epoch(way), flush=True)
    dist.destroy_process_group()


def compare(ranks: dict[str, Ranks], case: str, rounds: int) -> dict[str, dict[str, float]]:
    """Run the contestants alternately; return medians per library, in seconds per step and as a ratio."""
    times: dict[str, dict[str, list[float]]] = {
        name: {column: [] for column in (*WAYS, "ratio")} for name in ranks
    }
    for turn in range(rounds):
        for name, pair in ranks.items():
            for way in WAYS if turn % 2 else WAYS[::-1]:
                times[name][way].append(pair.measure(case, way))
            found = times[name]
            found["ratio"].append(found["dispatched"][-1] / found["sharded"][-1])
    return {
        name: {column: statistics.median(values) for column, values in found.items()}
        for name, found in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="pairs of epochs to compare")
    parser.add_argument(
        "--reference-python", type=Path, help="interpreter of an environment with the reference"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="which data")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.rank, arguments.port)
        return
    ranks = {"accel": Ranks(sys.executable, __file__, "accel")}
    if arguments.reference_python:
        ranks["accelerate"] = Ranks(str(arguments.reference_python), __file__, "accelerate")
    missed: list[str] = []
    for case in arguments.cases:
        for name, found in compare(ranks, case, arguments.rounds).items():
            print(
                f"{case:>14} {name:>11}: sharded {found['sharded'] * 1e3:6.2f} ms per step, "
                f"dispatched {found['dispatched'] * 1e3:6.2f} ms, ratio {found['ratio']:.2f}",
                flush=True,
            )
            if name == "accel" and found["ratio"] > CLAIM:
                missed.append(case)
    for pair in ranks.values():
        pair.close()
    if missed:
        sys.exit(f"more than the claimed {CLAIM}: {', '.join(missed)}")


if __name__ == "__main__":
    main()
