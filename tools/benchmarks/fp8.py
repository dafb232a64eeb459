"""Overhead of `Accelerator(mixed_precision="fp8")` over calling the FP8 library directly.

    uv run python tools/benchmarks/fp8.py [--gpu] [--compile] [--rounds N] [--small]

One model, trained by a loop in plain PyTorch with torchao's own conversion, by accel, and in bfloat16,
one after the other in one process; with `--gpu` on a GPU, also with TransformerEngine where that is
installed. On a CPU FP8 is emulated, which is slower than bfloat16: there only the overhead of accel means
anything. The loop by hand is also measured beside a second one, which shows how far ratios are from 1
without any reason.

Claim: accel takes at most 1.03 of the time of the loop by hand, and as much memory. With `--compile` also the
time of FP8 over that of bfloat16, both compiled by accel, for each of torchao's recipes; claim: `tensorwise`
takes at most 0.9. `--small`: two steps of each, on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from accel_plugins.fp8 import te
from accel_plugins.fp8.ao import convert_model_to_fp8_ao
from accel_plugins.fp8.recipe import AORecipeKwargs, TERecipeKwargs
from accel_state.accelerator_state import AcceleratorState
from accel_state.libraries import is_installed
from accel_train import Accelerator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CLAIM = 1.03
COMPILED_CLAIM = 0.9
RECIPES = ("tensorwise", "rowwise")


def make_model(width: int) -> torch.nn.Module:
    """Six linear layers, of which the four in the middle are converted."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(6)]
    return torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.GELU())])


def by_hand(library: str | None, width: int, inputs: torch.Tensor) -> Callable[[], None]:
    """A training step in plain PyTorch."""
    device, model = inputs.device, make_model(width).to(inputs.device)
    if library == "AO":
        float8 = import_module("torchao.float8")
        config = replace(float8.Float8LinearConfig(), pad_inner_dim=True, emulate=device.type == "cpu")
        convert_model_to_fp8_ao(model, config)
    recipe: Any = None
    if library == "TE":
        te.convert_model(model)
        recipe = te.make_recipe(TERecipeKwargs())
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            if recipe is None:
                loss = model(inputs).float().square().mean()
            else:
                with te.fp8_autocast(recipe, enabled=True):
                    loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_accel(
    library: str | None, width: int, inputs: torch.Tensor, recipe: Any = None, backend: str = "no"
) -> Callable[[], None]:
    """The same step with accel, of one of torchao's recipes, compiled by a backend of `torch.compile`."""
    AcceleratorState._reset_state(reset_partial_state=True)
    handlers: dict[str | None, list[Any]] = {
        None: [],
        "AO": [AORecipeKwargs(config=recipe)],
        "TE": [TERecipeKwargs()],
    }
    accelerator = Accelerator(
        cpu=inputs.device.type == "cpu",
        mixed_precision="fp8" if library else "bf16",
        kwargs_handlers=handlers[library],
        dynamo_backend=backend,
    )
    model = make_model(width)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def step() -> None:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Callable[[], None], device: torch.device) -> float:
    """The time of one step."""
    begin = time.perf_counter()
    step()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - begin


def alternate(steps: Sequence[Callable[[], None]], device: torch.device, rounds: int) -> list[list[float]]:
    """The times of all steps; each round begins with another one."""
    for _ in range(3):
        for step in steps:
            step()
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(rounds):
        for index in range(len(steps)):
            at = (turn + index) % len(steps)
            times[at].append(seconds(steps[at], device))
    return times


def peak(make: Callable[[], Callable[[], None]], device: torch.device) -> float:
    """The most memory of two steps in GB; on a GPU alone."""
    if device.type != "cuda":
        return 0.0
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    step = make()
    step()
    step()
    return torch.cuda.max_memory_allocated() / 1e9


def compare_compiled(width: int, inputs: torch.Tensor, rounds: int, *, small: bool) -> bool:
    """Print the time of FP8 over bfloat16 for each recipe, all compiled; say whether the claim holds."""
    float8 = import_module("torchao.float8")
    backend, holds = ("aot_eager" if small else "inductor"), True
    for name in RECIPES:
        config = float8.Float8LinearConfig.from_recipe_name(name)
        if inputs.device.type == "cpu":
            config = replace(config, emulate=True)
        makers = (partial(with_accel, None), partial(with_accel, "AO", recipe=config))
        steps = [make(width=width, inputs=inputs, backend=backend) for make in makers]
        bf16, fp8 = alternate(steps, inputs.device, rounds)
        ratio = statistics.median(ours / other for ours, other in zip(fp8, bf16, strict=True))
        times = f"FP8 {1e3 * min(fp8):.2f} ms, bf16 {1e3 * min(bf16):.2f} ms"
        print(f"compiled, {name}: {times}, ratio {ratio:.3f}", flush=True)
        holds = holds and (name != "tensorwise" or ratio <= COMPILED_CLAIM)
    return holds


def main() -> int:
    """Print a row for each library; fail where accel misses the claim."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true", help="large matrices on a GPU")
    parser.add_argument("--compile", action="store_true", help="also FP8 over bfloat16, compiled")
    parser.add_argument("--small", action="store_true", help="two steps of each, on the CPU")
    parser.add_argument("--rounds", type=int, default=30, help="pairs of steps to compare")
    options = parser.parse_args()
    if options.small:
        options.gpu, options.rounds = False, 2
    device = torch.device("cuda" if options.gpu else "cpu")
    width, rows = (8192, 8192) if options.gpu else (256, 512)
    torch.set_num_threads(1)
    inputs = torch.randn(rows, width, device=device)
    libraries = [None, "AO", *(["TE"] if options.gpu and is_installed("transformer_engine") else [])]
    missed = 0
    for library in libraries:
        makers = (by_hand, with_accel, by_hand)
        plain, ours, again = alternate(
            [make(library, width, inputs) for make in makers], device, options.rounds
        )
        ratio, noise = (
            statistics.median(one / other for one, other in zip(times, plain, strict=True))
            for times in (ours, again)
        )
        memory = [peak(partial(make, library, width, inputs), device) for make in (by_hand, with_accel)]
        print(
            f"{library or 'bf16':5} by hand {1e3 * min(plain):8.2f} ms, accel {1e3 * min(ours):8.2f} ms, "
            f"ratio {ratio:.3f} (median of pairs; by hand to by hand {noise:.3f}); "
            f"memory {memory[0]:.2f} and {memory[1]:.2f} GB"
        )
        missed += ratio > CLAIM
    if options.compile and not compare_compiled(width, inputs, options.rounds, small=options.small):
        missed += 1
    return int(missed > 0 and not options.small)


if __name__ == "__main__":
    sys.exit(main())
