"""How `megatron_generate` chooses tokens: its options, checked; by samples, or by beam search."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from accel_plugins.kwargs.base import is_count
from accel_plugins.megatron.rules import is_number
from accel_state.did_you_mean import did_you_mean
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch import Tensor

_DEFAULT_LENGTH = 20  # of transformers, where no configuration has one


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _tokens_of(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


_COUNT = "a whole number above 0"
_WANTED: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("max_length", "max_new_tokens", "num_beams"), (_COUNT, lambda value: is_count(value, least=1))
    ),
    "temperature": ("a number above 0", lambda value: is_number(value) and value > 0),
    "top_k": ("a whole number, 0 or more", lambda value: is_count(value, least=0)),
    "top_p": ("a number from 0 to 1", lambda value: is_number(value, 0, 1)),
    "length_penalty": ("a number", lambda value: is_number(value, -float("inf"))),
    "top_p_decay": ("a number from 0 to 1", lambda value: is_number(value, 0, 1)),
    "top_p_bound": ("a number from 0 to 1", lambda value: is_number(value, 0, 1)),
    "random_seed": ("a whole number of 64 bits", _is_integer),
    "eos_token_id": (
        "the number of a token, or a list",
        lambda value: all(map(_is_integer, _tokens_of(value))),
    ),
    "pad_token_id": ("the number of a token", _is_integer),
    **dict.fromkeys(("do_sample", "add_BOS"), ("True or False", lambda value: isinstance(value, bool))),
}
_SAMPLING = ("temperature", "top_k", "top_p")
"""Options that ask for draws, unless `do_sample` says something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How tokens are chosen and when a sequence ends, as options of `megatron_generate` say it.

    `ends` are the tokens that end a sequence, `pad` follows them, and `start` comes before every prompt.
    """

    num_beams: int
    length_penalty: float
    is_sampled: bool
    temperature: float
    top_k: int
    top_p: float
    top_p_decay: float
    top_p_bound: float
    seed: int | None
    ends: tuple[int, ...]
    pad: int
    start: int | None


def check_options(requested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not `None`."""
    for name, value in requested.items():
        if name not in _WANTED:
            hint = did_you_mean(name, _WANTED, f"it has {', '.join(_WANTED)}.")
            raise UnsupportedError(f"megatron_generate() has no option {name!r}: {hint}")
        wanted, holds = _WANTED[name]
        if value is not None and not holds(value):
            raise SettingsError(f"megatron_generate({name}={value!r}): expected {wanted}.")
    options = {name: value for name, value in requested.items() if value is not None}
    sampling = [name for name in _SAMPLING if name in options]
    if options.get("num_beams", 1) > 1 and options.get("do_sample", bool(sampling)):
        raise UnsupportedError(
            f"megatron_generate(num_beams={options['num_beams']}) searches, and does not draw: leave out "
            f"{', '.join(sampling) or 'do_sample'}."
        )
    _check_effects(options, is_sampled=options.get("do_sample", bool(sampling)))
    return options


def _check_effects(options: Mapping[str, Any], *, is_sampled: bool) -> None:
    """Refuse options that would change nothing beside the others."""
    searches = options.get("num_beams", 1) > 1
    needs = (
        *((name, name in options, is_sampled, "do_sample=True") for name in _SAMPLING),
        ("random_seed", "random_seed" in options, is_sampled, "do_sample=True, temperature, top_k or top_p"),
        ("top_p_decay", options.get("top_p_decay", 0) > 0, options.get("top_p", 0) > 0, "top_p"),
        ("top_p_bound", options.get("top_p_bound", 0) > 0, options.get("top_p_decay", 0) > 0, "top_p_decay"),
        ("length_penalty", options.get("length_penalty", 1) != 1, searches, "num_beams of 2 or more"),
    )
    for name, is_requested, has_effect, needed in needs:
        if is_requested and not has_effect:
            raise UnsupportedError(
                f"megatron_generate({name}={options[name]!r}) has no effect without {needed}: add that, or "
                "leave it out."
            )


def choice_of(options: Mapping[str, Any], config: Any, model: Any) -> Choice:
    """Return how tokens are chosen.

    Example:
        >>> choice = choice_of({"top_k": 3}, None, None)
        >>> choice.is_sampled, choice.num_beams, choice.ends
        (True, 1, ())
    """

    def token(name: str) -> Any:
        found = (options.get(name), getattr(config, name, None), getattr(model, name, None))
        return next((one for one in found if one is not None), None)

    start = token("bos_token_id") if options.get("add_BOS") else None
    if options.get("add_BOS") and start is None:
        raise SettingsError("megatron_generate(add_BOS=True): the model's configuration has no bos_token_id.")
    ends = token("eos_token_id")
    ends = () if ends is None else _tokens_of(ends)
    pad = token("pad_token_id")
    is_sampled = options.get("do_sample", not options.keys().isdisjoint(_SAMPLING))
    return Choice(
        num_beams=options.get("num_beams", 1),
        length_penalty=options.get("length_penalty", 1.0),
        is_sampled=is_sampled,
        temperature=options.get("temperature", 1.0),
        top_k=options.get("top_k", 0),
        top_p=options.get("top_p", 0.0),
        top_p_decay=options.get("top_p_decay", 0.0),
        top_p_bound=options.get("top_p_bound", 0.0),
        seed=options.get("random_seed"),
        ends=ends,
        pad=pad if pad is not None else (*ends, 0)[0],
        start=start,
    )


def steps_of(options: Mapping[str, Any], config: Any, width: int) -> int:
    """Return how many tokens may follow prompts.

    Example:
        >>> steps_of({"max_length": 8}, None, 5)
        3
    """
    own = {name: getattr(config, name, None) for name in ("max_new_tokens", "max_length")}
    found = options if {"max_new_tokens", "max_length"} & options.keys() else own
    new, length = found.get("max_new_tokens"), found.get("max_length") or _DEFAULT_LENGTH
    if new is None and length <= width:
        raise SettingsError(
            f"megatron_generate(): prompts of {width} tokens leave none of max_length={length} to generate; "
            "give max_new_tokens, or a larger max_length."
        )
    return length - width if new is None else new


@dataclass(slots=True)
class Sampler:
    """Draw tokens by logits."""

    choice: Choice
    generator: torch.Generator
    _top_p: float = field(init=False)

    def __post_init__(self) -> None:
        self._top_p = self.choice.top_p

    def __call__(self, logits: Tensor) -> Tensor:
        """Return a token for each row of logits of shape `[rows, vocabulary]`."""
        processors = import_module("transformers.generation.logits_process")
        choice = self.choice
        scores = logits / choice.temperature
        if 0 < choice.top_k < logits.shape[-1]:
            scores = processors.TopKLogitsWarper(choice.top_k)(None, scores)
        if 0 < self._top_p < 1:
            scores = processors.TopPLogitsWarper(self._top_p)(None, scores)
        if choice.top_p_decay > 0:
            self._top_p = max(self._top_p * choice.top_p_decay, choice.top_p_bound)
        return torch.multinomial(scores.softmax(-1), 1, generator=self.generator).squeeze(1)


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

    Example:
        >>> table = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.3, 0.2], [0.05, 0.9, 0.05]]).log()
        >>> advance = lambda rows, tokens: table[tokens]
        >>> beam_search(table[:1], advance, beams=1, steps=2, ends=(), length_penalty=1.0)
        [1, 0]
    """
    scores = torch.full((beams,), -1e9, device=logits.device)
    scores[0] = 0.0
    running: list[list[int]] = [[] for _ in range(beams)]
    ended: list[tuple[float, list[int]]] = []
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
                    ended.append((score / step**length_penalty, [*running[beam], token]))
            elif len(following) < beams:
                following.append((score, beam, token))
        ended = sorted(ended, key=lambda one: -one[0])[:beams]
        worst = ended[-1][0] if len(ended) == beams else -math.inf
        if not following or following[0][0] / step**length_penalty <= worst:
            break
        running = [[*running[beam], token] for _, beam, token in following]
        scores = torch.tensor([score for score, _, _ in following], device=logits.device)
        rows, tokens = (torch.tensor([one[i] for one in following], device=logits.device) for i in (1, 2))
        logits = advance(rows, tokens)
    return ended[0][1]
