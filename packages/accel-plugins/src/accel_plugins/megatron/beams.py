"""Beam search over the logits of a decoder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Ended:
    score: float
    tokens: list[int]


def beam_search(
    logits: Tensor,
    advance: Callable[[Tensor, Tensor], Tensor],
    *,
    beams: int,
    steps: int,
    ends: Collection[int],
    length_penalty: float,
) -> list[int]:
    """Return the best continuation of one prompt, as transformers finds it.

    A continuation counts its summed log-probability divided by its length to the power of the penalty. The
    search ends when as many have ended as there are beams and the best that runs counts no more than the
    worst of them.

    Args:
        logits: Those of the token after the prompt, of shape `[beams, vocabulary]`; the rows are equal.
        advance: Called with the beams that each beam continues and the token of each: returns the next
            logits.
        beams: Number of beams.
        steps: The most tokens.
        ends: Tokens that end a sequence.
        length_penalty: Above 0 favours long sequences.

    Returns:
        The tokens.

    Example:
        >>> table = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.3, 0.2], [0.05, 0.9, 0.05]]).log()
        >>> advance = lambda rows, tokens: table[tokens]
        >>> beam_search(table[:1], advance, beams=1, steps=2, ends=(), length_penalty=1.0)
        [1, 0]
    """
    scores = torch.full((beams,), -1e9, device=logits.device)
    scores[0] = 0.0
    running: list[list[int]] = [[] for _ in range(beams)]
    ended: list[_Ended] = []
    vocabulary = logits.shape[-1]
    for step in range(1, steps + 1):
        totals = scores[:, None] + torch.log_softmax(logits.float(), dim=-1)
        wanted = beams * max(2, 1 + len(ends))  # so that as many as there are beams do not end
        best, indices = totals.flatten().topk(min(wanted, totals.numel()))
        following: list[tuple[float, int, int]] = []
        for rank, (score, index) in enumerate(zip(best.tolist(), indices.tolist(), strict=True)):
            beam, token = divmod(index, vocabulary)
            if token in ends or step == steps:
                if rank < beams:
                    ended.append(_Ended(score / step**length_penalty, [*running[beam], token]))
            elif len(following) < beams:
                following.append((score, beam, token))
        ended = sorted(ended, key=lambda one: -one.score)[:beams]
        if not following or _is_settled(ended, beams, following[0][0] / step**length_penalty):
            break
        running = [[*running[beam], token] for _, beam, token in following]
        scores = torch.tensor([score for score, _, _ in following], device=logits.device)
        rows, tokens = (torch.tensor([one[i] for one in following], device=logits.device) for i in (1, 2))
        logits = advance(rows, tokens)
    return ended[0].tokens


def _is_settled(ended: list[_Ended], beams: int, best_running: float) -> bool:
    worst = ended[-1].score if len(ended) == beams else -math.inf
    return best_running <= worst
