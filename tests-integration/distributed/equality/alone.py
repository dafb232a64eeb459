"""The small transformer of the table of equality, its data, and what one process finds in plain PyTorch.

In bfloat16 a run differs from another one by where it rounds. So one process rounds where the strategy that
it is compared with does: it computes the gradients of the rows of every process by themselves, with weights
in float32 under autocast or with weights in bfloat16, and adds them up in the format in which they travel.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

from distributed.equality.model import LanguageModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    Fresh = Callable[[str | None], tuple[nn.Module, torch.optim.Optimizer]]

ROWS, LENGTH = 8, 16
CLIP = 0.2
"""Below the norm of the gradients in every step, so that all are clipped."""
RATE, EPSILON, DECAY = 1e-2, 1e-2, 1e-3
"""Of AdamW. With an epsilon as large as gradients are, a step is the longer the larger they are: with the
usual one, it would hardly depend on their size, and gradients that are twice too large would not show."""

FAULTS: Mapping[str, str] = {
    "twice": "gradients twice too large",
    "undivided": "gradients not divided by the number of micro-batches",
    "unclipped": "gradients not clipped",
    "rate": "a learning rate 10 % too large",
}
"""Errors that are made on purpose, to see that the table would show them."""


def is_clipped(fault: str) -> bool:
    """Whether an error is made where gradients are clipped, after which nobody sees how large they were."""
    return fault == "unclipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Where a strategy rounds.

    Args:
        shards: Number of shards of the rows of a batch.
        autocast: Whether operations run under autocast to bfloat16.
        small_weights: Whether the model computes with bfloat16 copies of its weights, so that gradients are
            bfloat16, too.
        small_start: Whether the weights that are updated begin with the values of these copies.
        small_sums: Whether gradients are added up in bfloat16, those of processes and those of micro-batches.
        processes_first: Whether processes add up their gradients in every micro-batch, not once in a step.
        recipe: The name of torchao's recipe by which matrices of the blocks are multiplied in 8 bits, if any.
    """

    shards: int = 1
    autocast: bool = False
    small_weights: bool = False
    small_start: bool = False
    small_sums: bool = False
    processes_first: bool = False
    recipe: str | None = None


def fresh(fault: str | None = None, *, experts: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer, at the beginning."""
    torch.manual_seed(0)
    model = LanguageModel(experts=experts)
    rate = RATE * 1.1 if fault == "rate" else RATE
    return model, torch.optim.AdamW(model.parameters(), lr=rate, eps=EPSILON, weight_decay=DECAY)


def _convert(model: nn.Module, recipe: str) -> None:
    """Let torchao multiply the matrices of a model, but for the first and the last one, in emulated FP8."""
    float8 = importlib.import_module("torchao.float8")
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True, pad_inner_dim=True)
    linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    inner = {*linear[1:-1]}
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in inner)


def batches_of(number: int) -> Tensor:
    """The rows of so many batches."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (number * ROWS, LENGTH + 1), generator=generator)


def factor(fault: str | None, accumulation: int) -> int:
    """What the loss is multiplied with."""
    return {"twice": 2, "undivided": accumulation}.get(fault or "", 1)


def train_alone(
    rows: Tensor,
    *,
    accumulation: int,
    clip: bool,
    how: Arithmetic,
    fault: str | None = None,
    begin_with: Fresh = fresh,
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Train in one process.

    Args:
        rows: Of all batches.
        accumulation: Micro-batches of a step.
        clip: Whether gradients are clipped.
        how: Where to round.
        fault: An error to make, one of `FAULTS`.
        begin_with: Makes the model and its optimizer.

    Returns:
        The weights, in float32, at the end and at the beginning.
    """
    model, optimizer = begin_with(fault)
    if how.small_start:
        model.bfloat16().float()
    begin = {name: value.clone() for name, value in model.state_dict().items()}
    small = copy.deepcopy(model).bfloat16() if how.small_weights else model
    if how.recipe is not None:
        _convert(small, how.recipe)
    for window in rows.split(ROWS * accumulation):
        losses = _losses(small, window.split(ROWS), how, factor(fault, accumulation) / accumulation)
        for parameter, gradient in zip(model.parameters(), _summed(small, losses, how), strict=True):
            parameter.grad = gradient.float()
        if clip and fault != "unclipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if small is not model:
            with torch.no_grad():
                for copied, parameter in zip(small.parameters(), model.parameters(), strict=True):
                    copied.copy_(parameter)
    return model.state_dict(), begin


def _losses(
    model: nn.Module, batches: Sequence[Tensor], how: Arithmetic, scale: float
) -> Iterator[Iterator[Tensor]]:
    """For every micro-batch, the loss of every process."""

    def loss(rows: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=how.autocast):
            logits = model(rows[:, :-1])
            logits = getattr(logits, "logits", logits)
        return cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten()) * scale

    for batch in batches:
        yield (loss(rows) for rows in batch.chunk(how.shards))


def _summed(model: nn.Module, losses: Iterator[Iterator[Tensor]], how: Arithmetic) -> list[Tensor]:
    """The mean over processes of the sums over micro-batches."""
    micro = [[_gradients(model, loss, how) for loss in of_processes] for of_processes in losses]
    if how.processes_first:
        return _add([_mean(of_processes) for of_processes in micro])
    return _mean([_add(of_one) for of_one in zip(*micro, strict=True)])


def _gradients(model: nn.Module, loss: Tensor, how: Arithmetic) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    dtype = torch.bfloat16 if how.small_sums else torch.float32
    return [torch.zeros(()) if p.grad is None else p.grad.to(dtype, copy=True) for p in model.parameters()]


def _mean(several: Sequence[list[Tensor]]) -> list[Tensor]:
    return _add([[tensor / len(several) for tensor in one] for one in several])


def _add(several: Sequence[Any]) -> list[Tensor]:
    total = several[0]
    for one in several[1:]:
        total = [a + b for a, b in zip(total, one, strict=True)]
    return total
