"""Prompts that are padded on one side, and their continuations in the same layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts without padding on their left.

    Args:
        tokens: Of shape `[rows, width]`; tokens beyond a prompt's length do not count.
        lengths: Tokens of each.
        limits: Tokens that each may have together with its continuation.
        shifts: Padding that each had on its left.
    """

    tokens: Tensor
    lengths: Tensor
    limits: Tensor
    shifts: Tensor


def check_prompts(inputs: Tensor, mask: Tensor | None, vocabulary: int) -> None:
    """Refuse prompts that cannot be embedded: the rank that does that must not fail alone.

    Args:
        inputs: Tokens of shape `[rows, width]`.
        mask: Of the same shape, 0 for padding, which may be any number; `None` if there is none.
        vocabulary: Number of tokens.

    Raises:
        SettingsError: They are no table, the mask has another shape, or there is no such token.
    """
    if inputs.ndim != 2 or not inputs.numel() or (mask is not None and mask.shape != inputs.shape):
        own = "" if mask is None else f" and a mask of {[*mask.shape]}"
        raise SettingsError(
            "megatron_generate(): expected prompts of shape [rows, tokens] and a mask of the same shape, "
            f"found {[*inputs.shape]}{own}."
        )
    tokens = inputs if mask is None else inputs[mask.to(inputs.device) != 0]
    if inputs.is_floating_point() or bool(((tokens < 0) | (tokens >= vocabulary)).any()):
        raise SettingsError(
            f"megatron_generate(): expected tokens from 0 to {vocabulary - 1}, found {tokens.min()} to "
            f"{tokens.max()} of {inputs.dtype}."
        )


def with_start(inputs: Tensor, mask: Tensor | None, start: int) -> tuple[Tensor, Tensor | None]:
    """Put a token before every prompt; return the prompts and their mask.

    Args:
        inputs: Tokens of shape `[rows, width]`.
        mask: Of the same shape, 0 for padding; `None` if there is none.
        start: The token.

    Example:
        >>> with_start(torch.tensor([[9, 1]]), torch.tensor([[0, 1]]), 5)[0].tolist()
        [[0, 5, 1]]
    """
    if mask is None:
        return functional.pad(inputs, (1, 0), value=start), None
    wider, mask = functional.pad(inputs, (1, 0)), functional.pad(mask, (1, 0))
    first = mask.int().argmax(dim=1, keepdim=True) - 1
    return wider.scatter(1, first, start), mask.scatter(1, first, 1)


def aligned(inputs: Tensor, attention_mask: Tensor | None, steps: int) -> Prompts:
    """Move prompts to the left.

    A prompt that is padded on the left gets `steps` tokens; one on the right is continued in place of its
    padding, to the same width as the others.

    Args:
        inputs: Tokens of shape `[rows, width]`.
        attention_mask: Of the same shape, 0 for padding.
        steps: How many tokens may follow the width.

    Raises:
        SettingsError: The mask has an empty row, or padding within a prompt.

    Example:
        >>> mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
        >>> prompts = aligned(torch.tensor([[9, 1, 2], [1, 2, 3]]), mask, 2)
        >>> prompts.tokens[0, :2].tolist(), prompts.lengths.tolist(), prompts.limits.tolist()
        ([1, 2], [2, 3], [4, 5])
    """
    mask = torch.ones_like(inputs) if attention_mask is None else attention_mask.to(inputs)
    is_token = mask != 0
    lengths, shifts = is_token.sum(1), is_token.int().argmax(1)
    columns = torch.arange(inputs.shape[1], device=inputs.device)
    inside = (columns >= shifts[:, None]) & (columns < (shifts + lengths)[:, None])
    if not bool((lengths > 0).all()) or not torch.equal(inside, is_token):
        raise SettingsError(
            "megatron_generate(attention_mask=…): every row needs one prompt, with padding only on its left "
            "or on its right."
        )
    moved = inputs.gather(1, (columns + shifts[:, None]).clamp(max=inputs.shape[1] - 1))
    return Prompts(tokens=moved, lengths=lengths, limits=inputs.shape[1] - shifts + steps, shifts=shifts)


def in_layout(prompts: Prompts, rows: Sequence[Tensor], pad: int) -> Tensor:
    """Return sequences with the padding on the left that their prompts had, and as wide as the longest.

    Args:
        prompts: The prompts.
        rows: A prompt and its continuation each.
        pad: Token to pad with.
    """
    shifts = prompts.shifts.tolist()
    width = max(shift + len(row) for shift, row in zip(shifts, rows, strict=True))
    return torch.stack(
        [
            functional.pad(row, (shift, width - shift - len(row)), value=pad)
            for shift, row in zip(shifts, rows, strict=True)
        ]
    )
