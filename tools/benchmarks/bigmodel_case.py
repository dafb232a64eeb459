"""The model of the bigmodel benchmarks: 48 transformer blocks, 2.4 GB in float32; and how roles are run.

A benchmark is one script that runs itself in fresh processes, one per role, each with its own Python:
`ours` with this one, `reference` with the one of `--reference-python`. A role prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, HEADS, BLOCKS, VOCABULARY = 1024, 16, 48, 1000


class Block(nn.Module):
    """Attention and a perceptron, each with a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for part in self.qkv(self.ln1(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(functional.gelu(self.up(self.ln2(x))))


class Model(nn.Module):
    """A decoder without a mask: what counts here is the traffic of weights."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run it."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks_on(device: int | str, around: int | str = "cpu", blocks: int = BLOCKS) -> dict[str, int | str]:
    """A map with every block on one device, embedding and head on another."""
    return {"embed": around, **{f"blocks.{i}": device for i in range(blocks)}, "head": around}


def write_checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write random weights as four safetensors shards, unless they are there."""
    from safetensors.torch import save_file

    if (folder / "model.safetensors.index.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    with torch.device("meta"):
        names = {name: tensor.shape for name, tensor in Model().state_dict().items()}
    table: dict[str, str] = {}
    keys = list(names)
    for shard in range(4):
        part = keys[shard * len(keys) // 4 : (shard + 1) * len(keys) // 4]
        file = f"model-{shard + 1:05d}-of-00004.safetensors"
        tensors = {name: (torch.randn(names[name]) * 0.02).to(dtype) for name in part}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        table.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--reference-python", help="a Python in whose environment the reference is installed")
    parser.add_argument(
        "--folder", type=Path, default=Path("/var/tmp/accel-bigmodel"), help="for the checkpoint"
    )
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes per role; the best counts")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    return parser


def run_roles(
    options: argparse.Namespace, roles: dict[str, Callable[[argparse.Namespace], dict[str, Any]]]
) -> dict[str, dict[str, Any]] | None:
    """Run the one role asked for and print its figures; or run all alternately and keep the best of each."""
    if options.role:
        print(json.dumps(roles[options.role](options)))
        return None
    best: dict[str, dict[str, Any]] = {}
    for _ in range(options.rounds):
        for role in roles:
            python = options.reference_python if role.startswith("reference") else sys.executable
            if python is None:
                continue
            command = [python, sys.argv[0], "--role", role, "--folder", str(options.folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{role} failed:\n{done.stderr[-3000:]}")
            found = json.loads(done.stdout.strip().splitlines()[-1])
            fastest = best.setdefault(role, found)
            best[role] = {key: min(fastest[key], value) for key, value in found.items()}
    return best


def claim(text: str, value: float, limit: float) -> bool:
    """Print a claim with its figure; say whether it holds."""
    holds = value <= limit
    print(f"{'holds ' if holds else 'MISSED'}  {text}: {value:.3g} (claim: at most {limit:.3g})")
    return holds
