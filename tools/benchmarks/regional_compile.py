"""Compile time of regional compilation: the first training step of a transformer of 24 blocks.

    uv run python tools/benchmarks/regional_compile.py [--blocks 24] [--rounds 1]

Measured, in fresh processes with empty caches, is the wall time of the first forward and backward pass of a
model that `torch.compile` compiles with inductor, as a whole and by regions, less that of the same pass
uncompiled. Also printed is the time of later steps. Claim: the compile time by regions is at most a third
of that of the whole.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

CLAIM = 1 / 3
WAYS = ("eager", "whole", "regions")


def small_gpt(blocks: int) -> Any:
    """A model of equal blocks."""
    import torch

    class Block(torch.nn.Module):
        """A block of a small GPT."""

        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
            self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
            self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Attention and a feed-forward network."""
            batch, length, width = x.shape
            shape = (batch, length, 3, self.heads, width // self.heads)
            q, k, v = self.qkv(self.first(x)).view(shape).permute(2, 0, 3, 1, 4)
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))

    class Model(torch.nn.Module):
        """Embeddings, blocks and a head."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(512, 64)
            self.blocks = torch.nn.ModuleList(Block(64, 4) for _ in range(blocks))
            self.norm, self.head = torch.nn.LayerNorm(64), torch.nn.Linear(64, 512)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            """The next token's logits."""
            x = self.tokens(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Model()


def measure(way: str, blocks: int) -> dict[str, float]:
    """Wall time of the first step and of a later one, in this process."""
    import torch

    from accel import Accelerator
    from accel.utils import TorchDynamoPlugin, has_compiled_regions

    plugin = TorchDynamoPlugin(
        backend="no" if way == "eager" else "inductor", use_regional_compilation=way == "regions"
    )
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    model = accelerator.prepare(small_gpt(blocks))
    assert has_compiled_regions(model) == (way != "eager")
    tokens = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(0))
    times: list[float] = []
    for _ in range(12):
        start = time.perf_counter()
        accelerator.backward(model(tokens).square().mean())
        times.append(time.perf_counter() - start)
    return {"first": times[0], "later": statistics.median(times[2:])}


def in_fresh_process(way: str, blocks: int) -> dict[str, float]:
    """The same in a process of its own, with nothing in any cache."""
    with tempfile.TemporaryDirectory() as folder:
        answer = subprocess.run(
            [sys.executable, __file__, "--measure", way, "--blocks", str(blocks)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
        )
    return json.loads(answer.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=24, help="how many blocks the model has")
    parser.add_argument("--rounds", type=int, default=1, help="how often each way is measured")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.blocks)))
        return
    ratios: list[float] = []
    for _ in range(arguments.rounds):
        found = {way: in_fresh_process(way, arguments.blocks) for way in WAYS}
        compiling = {way: found[way]["first"] - found["eager"]["first"] for way in ("whole", "regions")}
        for way in WAYS:
            took = f", compiling {compiling[way]:6.1f} s" if way in compiling else ""
            print(f"{way:>8}: later steps {1e3 * found[way]['later']:6.1f} ms{took}")
        ratios.append(compiling["regions"] / compiling["whole"])
    ratio = statistics.median(ratios)
    print(f"compile time by regions: {ratio:.3f} of the whole's, {arguments.blocks} blocks")
    if ratio > CLAIM:
        sys.exit(f"more than the claimed {CLAIM:.3f}")


if __name__ == "__main__":
    main()
