"""Compare losses in chunks and MLPs in tiles with the plain model: peak memory, and time of a step.

Claim: peak memory grows with the sequence by hidden states, not by logits, and a step with a loss in chunks
takes no longer. The baseline is the same model of transformers in plain PyTorch. On the CPU, memory is what
the tracker of `accel check` counts: all living storages but parameters; on a GPU, what the allocator counts,
parameters included.

    uv run tools/benchmarks/chunked_loss.py --lengths 512 1024 2048 4096 --chunks 256 1024 --rounds 5
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from accel_cli.commands.estimate.trace import LiveStorageTracker
from accel_plugins.kwargs import TilingKwargs
from accel_state.accelerator_state import AcceleratorState
from accel_train import Accelerator


def make_model(options: argparse.Namespace, device: torch.device) -> nn.Module:
    """A Llama whose vocabulary is large beside its width, as in small models of today."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=options.vocabulary,
        max_position_embeddings=max(options.lengths),
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(device)


def make_step(
    model: nn.Module, backward: Callable[[torch.Tensor], None], length: int, device: torch.device
) -> Callable[[], None]:
    """A forward and backward pass; what the model returns lives until its end, as in most scripts."""
    tokens = torch.ones(1, length, dtype=torch.int64, device=device)

    def step() -> None:
        outputs = model(input_ids=tokens, labels=tokens, use_cache=False)
        backward(outputs.loss)
        for parameter in model.parameters():
            parameter.grad = None

    return step


def peak(model: nn.Module, step: Callable[[], None], device: torch.device) -> float:
    """Return the peak of a step, in MB."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() / 1e6
    with LiveStorageTracker(None) as tracker:
        tracker.add(model)
        step()
    return max(moment.activations + 4 * moment.gradients for moment in tracker.moments) / 1e6


def seconds(step: Callable[[], None], device: torch.device) -> float:
    """Return the time of a step."""
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> int:
    """Print peaks and times for all lengths; fail if the largest length misses the claim."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=1.05)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases: dict[str, TilingKwargs | None] = {"plain": None}
    for chunk in options.chunks:
        cases[f"loss {chunk}"] = TilingKwargs(loss_chunk_size=chunk)
        cases[f"loss and MLP {chunk}"] = TilingKwargs(loss_chunk_size=chunk, mlp_tile_size=chunk)
    steps: dict[str, tuple[nn.Module, Callable[[torch.Tensor], None]]] = {}
    for name, tiling in cases.items():
        model, backward = make_model(options, device), torch.Tensor.backward
        if tiling is not None:
            AcceleratorState._reset_state(reset_partial_state=True)  # pyright: ignore[reportPrivateUsage] - several in turn
            accelerator = Accelerator(cpu=device.type == "cpu", kwargs_handlers=[tiling])
            model, backward = accelerator.prepare(model), accelerator.backward
        steps[name] = (model.train(), backward)
    print(f"{'tokens':>7} {'case':18} {'peak MB':>9} {'of plain':>9} {'ms':>8} {'of plain':>9}")
    missed: list[str] = []
    for length in options.lengths:
        made = {name: make_step(model, backward, length, device) for name, (model, backward) in steps.items()}
        peaks = {name: peak(steps[name][0], step, device) for name, step in made.items()}
        times: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(options.rounds):
            for name, step in made.items():
                times[name].append(seconds(step, device))
        for name in made:
            memory, fastest = peaks[name] / peaks["plain"], min(times[name]) / min(times["plain"])
            print(
                f"{length:7} {name:18} {peaks[name]:9.1f} {memory:9.2f} {1000 * min(times[name]):8.0f}"
                f" {fastest:9.2f}"
            )
            if length == max(options.lengths) and name != "plain":
                is_slow = "MLP" not in name and fastest > options.tolerance
                missed += [name] if memory > 0.75 or is_slow else []
    print("missed: " + ", ".join(missed) if missed else "ok")
    return len(missed)


if __name__ == "__main__":
    sys.exit(main())
