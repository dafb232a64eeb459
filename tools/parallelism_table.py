"""Train one small model along every axis and pair of axes of parallelism, and compare with one process.

    uv run tools/parallelism_table.py                       # prints the table; about ten minutes on two cores
    uv run tools/parallelism_table.py --world-size 2 --axis ep
    uv run tools/parallelism_table.py --write               # also writes the rows into the docs

Every row is a job of 2 or 4 processes that trains a Llama of transformers (a Mixtral where there are experts)
for 20 steps on the same data by the same script: `ParallelismConfig` alone differs (beside the context of
`maybe_context_parallel` under `cp_size`). The one process is a loop
in plain PyTorch. A row shows the largest difference of a loss, of a norm of the gradients and of a weight at
the end, all in float32, or the error by which `accel` refuses the combination.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from accel import Accelerator
from accel.utils import DataLoaderConfiguration, ParallelismConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "ep", "pp")
ROWS, LENGTH, VOCABULARY, STEPS = 8, 16, 64, 20
MAX_NORM, BOUND = 0.2, 2e-5
PAGE = Path(__file__).resolve().parents[1] / "packages/accel-suite/docs/reference/parallelism.md"
HEAD = ["| processes | sizes | loss | gradient norm | weights |", "| --- | --- | --- | --- | --- |"]
BEGIN, END = "<!-- table: tools/parallelism_table.py -->", "<!-- end of the table -->"


def sizes_of(axes: Sequence[str], world: int) -> dict[str, int] | None:
    """Return the sizes that put `world` processes along some axes; `None` if there are too few.

    Experts are spread over processes that have samples of their own, so that this axis needs another one.
    """
    sizes = dict.fromkeys(axes, 2)
    if axes == ("ep",):
        sizes = {"dp_shard": world, "ep": world}
    elif "ep" in axes:
        sizes = {"dp_shard": 2} | sizes
        if "dp_shard" in axes:
            sizes["dp_shard"] = 4
    elif len(axes) == 1:
        sizes = {axes[0]: world}
    count = 1
    for axis, size in sizes.items():
        count *= 1 if axis == "ep" else size
    return {f"{axis}_size": size for axis, size in sizes.items()} if count == world else None


def rows_of(worlds: Sequence[int], axes: Sequence[str]) -> list[tuple[int, dict[str, int]]]:
    """Return world size and sizes of every axis and pair of axes, those that have one of `axes`."""
    wanted = [*((axis,) for axis in AXES), *combinations(AXES, 2)]
    cells = [(world, sizes_of(some, world)) for world in worlds for some in wanted if {*some} & {*axes}]
    return [(world, sizes) for world, sizes in cells if sizes is not None]


def make_model(*, experts: bool) -> nn.Module:
    """Return the model with its first weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": LENGTH,
        "use_cache": False,
    }
    if experts:
        config = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
        model: nn.Module = MixtralForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():  # the constructor of Mixtral leaves experts uninitialized
            parameter.normal_(std=0.1)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW, whose large epsilon lets gradients of a wrong size show."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=1e-3)


def token_rows(steps: int) -> Any:
    """Return the samples."""
    tokens = torch.randint(0, VOCABULARY, (steps * ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


@cache
def train_alone(steps: int, *, experts: bool) -> dict[str, Any]:
    """Train in plain PyTorch."""
    model = make_model(experts=experts)
    optimizer = make_optimizer(model)
    losses, norms = [], []
    for batch in DataLoader(token_rows(steps), batch_size=ROWS):
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": model.state_dict()}


def train(sizes: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Train through `Accelerator`, on every process."""
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**sizes),
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    model = make_model(experts="ep_size" in sizes)
    optimizer = make_optimizer(model)
    loader = DataLoader(token_rows(steps), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms = [], []
    for batch in loader:
        if "cp_size" in sizes:
            loss = backward_in_context(accelerator, model, batch["input_ids"], sizes["cp_size"])
        else:
            loss = model(**batch).loss
            accelerator.backward(loss)
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        norm: Any = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    return {"losses": losses, "norms": norms, "weights": weights}


def backward_in_context(accelerator: Accelerator, model: nn.Module, tokens: Tensor, shards: int) -> Tensor:
    """Run both passes in a context of shards; return this rank's share of the loss, as the guide does."""
    labels = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], dim=1)
    buffers = [tokens.clone(), labels, torch.arange(LENGTH).repeat(len(tokens), 1)]
    count = int((labels != -100).sum())
    with accelerator.maybe_context_parallel(buffers, [1] * 3, {*buffers}):
        tokens, labels, positions = buffers
        loss = model(
            input_ids=tokens,
            position_ids=positions,
            labels=labels,
            shift_labels=labels,
            num_items_in_batch=count / shards,
        ).loss
        accelerator.backward(loss)
    return loss


def run(world: int, sizes: Mapping[str, int], steps: int) -> dict[str, Any] | str:
    """Run one job; return what it found, or the last line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.pt"
        worker = [__file__, "--steps", str(steps), "--worker", json.dumps(sizes), str(results)]
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", "--standalone"]
        env = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, *worker], env=env, capture_output=True, text=True, check=False)
        if results.exists():
            return torch.load(results, weights_only=True)
        refusal = re.search(r"accel_state\.errors\.\w+: (.*)", done.stderr)
        error = re.search(r"^\[rank\d\]: (\w[\w.]*: .*)", done.stderr, re.MULTILINE)
        return refusal[1] if refusal else f"FAIL: {error[1] if error else done.stderr[-500:]}"


def differences(value: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the largest difference of losses, of norms, and of weights."""
    losses, norms = (
        max(abs(a - b) for a, b in zip(value[name], right[name], strict=True)) for name in ("losses", "norms")
    )
    weights = max(
        (tensor.float() - right["weights"][name]).abs().max().item()
        for name, tensor in value["weights"].items()
    )
    if value["weights"].keys() != right["weights"].keys():
        raise ValueError(f"other names: {value['weights'].keys() ^ right['weights'].keys()}")
    return losses, norms, weights


def main() -> int:
    """Print the table; return 1 if a row is neither equal nor refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-size", action="append", type=int, help="only these numbers of processes")
    parser.add_argument("--axis", action="append", choices=AXES, help="only rows with one of these")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--write", action="store_true", help="write the table into the docs")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        sizes, results = arguments.worker
        value = train(json.loads(sizes), arguments.steps)
        if int(os.environ["RANK"]) == 0:
            torch.save(value, results)
        return 0
    print("\n".join(HEAD), flush=True)
    failed = False
    found: dict[str, str] = {}
    for world, sizes in rows_of(arguments.world_size or [2, 4], arguments.axis or AXES):
        value = run(world, sizes, arguments.steps)
        key = begin_of_row(world, sizes)
        if isinstance(value, str):
            failed |= value.startswith("FAIL")
            found[key] = f"{key}{'' if value.startswith('FAIL') else 'refused: '}{value} | | |"
        else:
            off = differences(value, train_alone(arguments.steps, experts="ep_size" in sizes))
            failed |= max(off) > BOUND
            found[key] = key + " | ".join(f"{number:.0e}" for number in off) + " |"
        print(found[key], flush=True)
    if arguments.write:
        PAGE.write_text(with_rows(PAGE.read_text(), found))
    return int(failed)


def begin_of_row(world: int, sizes: Mapping[str, int]) -> str:
    """Return the cells of a row that say what was run."""
    text = ", ".join(f"`{name.removesuffix('_size')}={size}`" for name, size in sizes.items())
    return f"| {world} | {text} | "


def with_rows(page: str, found: Mapping[str, str]) -> str:
    """Return the page with rows, by their first cells, in place of its own or beside them."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    known = table.splitlines()
    lines = [*HEAD]
    for key in (begin_of_row(*row) for row in rows_of([2, 4], AXES)):
        row = found.get(key) or next((line for line in known if line.startswith(key)), None)
        lines += [] if row is None else [row]
    return f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}"


if __name__ == "__main__":
    raise SystemExit(main())
