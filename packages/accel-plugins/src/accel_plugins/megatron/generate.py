"""Generate text with Megatron's decoders: greedily, by sampling or beam search."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib import import_module
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from accel_plugins.kwargs import Effect, find_ineffective, is_count
from accel_plugins.megatron.library import core, without_core_warnings
from accel_plugins.megatron.plugin import is_number
from accel_state import hang_monitor
from accel_state.errors import SettingsError, UnsupportedError, did_you_mean
from accel_state.frozen import frozen

if TYPE_CHECKING:
    from accel_plugins.megatron.engine import MegatronEngine


def generate(
    engine: MegatronEngine, inputs: Tensor, attention_mask: Tensor | None, requested: Mapping[str, Any]
) -> Tensor:
    """Continue prompts; see `MegatronEngine.megatron_generate`."""
    if engine.family is None or engine.family.kind != "gpt":
        raise UnsupportedError(
            f"{type(engine.source).__name__} does not generate with Megatron, which continues prompts by "
            "decoders (GPT-2, Llama): load the weights of get_state_dict() into a model of transformers."
        )
    if engine.groups.context > 1:
        raise UnsupportedError(
            "megatron_generate() computes whole sequences, but ranks have chunks of them with "
            f"context_parallel_size={engine.groups.context}: generate from saved weights in a run without it."
        )
    options = check_options(requested)
    config: Any = getattr(engine.source, "generation_config", None)
    choice = choice_of(options, config, engine.config)
    check_prompts(inputs, attention_mask, engine.config.vocab_size)  # pyright: ignore[reportOptionalMemberAccess]
    if choice.start is not None:
        inputs, attention_mask = with_start(inputs, attention_mask, choice.start)
    prompts = aligned(inputs, attention_mask, steps_of(options, config, inputs.shape[1]))
    inner, longest = core("utils").unwrap_model(engine.chunks[0]), int(prompts.limits.max())
    if inner.position_embedding_type == "learned_absolute" and longest > inner.max_sequence_length:
        raise SettingsError(
            f"megatron_generate(): a prompt and its continuation have {longest} tokens, but the model has "
            f"{inner.max_sequence_length} positions; make max_new_tokens or max_length smaller."
        )
    scope = hang_monitor.collective_scope("generation")
    with without_core_warnings(), scope, full_sequences(engine):
        return (_search if choice.num_beams > 1 else _continue)(engine, prompts, choice)


def _continue(engine: MegatronEngine, prompts: Prompts, choice: GenerationOptions) -> Tensor:
    """Continue all prompts in one batch: from the end of the shortest; longer ones join where they end."""
    start, end = int(prompts.lengths.min()), int(prompts.limits.max())
    tokens = functional.pad(prompts.tokens, (0, end - prompts.tokens.shape[1]))
    ends = torch.tensor(choice.ends, dtype=tokens.dtype, device=tokens.device)
    sampler = None
    if choice.is_sampled:  # the same tokens on all ranks of a replica
        state = core("parallel_state")
        seed = torch.tensor(
            torch.randint(2**31, (), device="cpu").item()
            if choice.random_seed is None
            else choice.random_seed,
            device="cpu",
        )
        seed = seed.to(tokens.device)
        dist.broadcast(seed, state.get_model_parallel_src_rank(), state.get_model_parallel_group())
        sampler = Sampler(choice, torch.Generator(tokens.device).manual_seed(int(seed)))
    stops = prompts.limits.clone()
    decoder = CachedDecoder(engine, len(tokens), end)
    logits = decoder.logits(tokens[:, :start])
    for position in range(start, end):
        is_new = position >= prompts.lengths
        runs = is_new & (position < stops)
        chosen = logits.argmax(-1) if sampler is None else sampler(logits)
        token = torch.where(runs, chosen, 0)  # The tokens after an end are cut off.
        tokens[:, position] = torch.where(is_new, token, tokens[:, position])
        stops = torch.where(runs & torch.isin(token, ends), position + 1, stops)
        if bool((stops <= position + 1).all()):
            break
        logits = decoder.logits(tokens[:, position : position + 1])
    rows = [row[:stop] for row, stop in zip(tokens, stops.tolist(), strict=True)]
    return in_layout(prompts, rows, choice.pad)


def _search(engine: MegatronEngine, prompts: Prompts, choice: GenerationOptions) -> Tensor:
    """Continue one prompt after another by beam search."""
    rows: list[Tensor] = []
    sizes = zip(prompts.lengths.tolist(), prompts.limits.tolist(), strict=True)
    for tokens, (length, limit) in zip(prompts.tokens, sizes, strict=True):
        decoder = CachedDecoder(engine, choice.num_beams, limit)

        def advance(beams: Tensor, last: Tensor, decoder: CachedDecoder = decoder) -> Tensor:
            decoder.select(beams)
            return decoder.logits(last[:, None])

        best = beam_search(
            decoder.logits(tokens[:length].expand(choice.num_beams, -1)),
            advance,
            beams=choice.num_beams,
            steps=limit - length,
            ends=choice.ends,
            length_penalty=choice.length_penalty,
        )
        rows.append(torch.cat([tokens[:length], tokens.new_tensor(best)]))
    return in_layout(prompts, rows, choice.pad)


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
"""Options that request sampling, unless `do_sample` is set."""


@frozen
class GenerationOptions:
    """Decoding method and end of sequences, from options of `megatron_generate`.

    `ends` are the tokens that end a sequence, `pad` follows them, and `start` comes before every prompt.
    """

    is_sampled: bool
    ends: tuple[int, ...]
    pad: int
    start: int | None
    num_beams: int = 1
    length_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    random_seed: int | None = None


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
    values = options | {"is_sampled": options.get("do_sample", bool(sampling))}
    for (name, *_), sentence in find_ineffective(_EFFECTS, values):
        raise UnsupportedError(
            f"megatron_generate({name}={options[name]!r}) {sentence}: add it, or remove this option."
        )
    return options


_EFFECTS = (
    Effect(_SAMPLING, "without do_sample=True", itemgetter("is_sampled")),
    Effect(("random_seed",), "without do_sample=True, temperature, top_k or top_p", itemgetter("is_sampled")),
    Effect(("top_p_decay",), "without top_p", lambda values: values.get("top_p", 0) > 0, 0),
    Effect(("top_p_bound",), "without top_p_decay", lambda values: values.get("top_p_decay", 0) > 0, 0),
    Effect(
        ("length_penalty",),
        "without num_beams of 2 or more",
        lambda values: values.get("num_beams", 1) > 1,
        1,
    ),
)


def choice_of(options: Mapping[str, Any], config: Any, model: Any) -> GenerationOptions:
    """Resolve the decoding options.

    Example:
        >>> choice = choice_of({"top_k": 3}, None, None)
        >>> choice.is_sampled, choice.num_beams, choice.ends
        (True, 1, ())
    """

    def token(name: str) -> Any:
        values = (options.get(name), getattr(config, name, None), getattr(model, name, None))
        return next((value for value in values if value is not None), None)

    start = token("bos_token_id") if options.get("add_BOS") else None
    if options.get("add_BOS") and start is None:
        raise SettingsError("megatron_generate(add_BOS=True): the model's configuration has no bos_token_id.")
    ends = token("eos_token_id")
    ends = () if ends is None else _tokens_of(ends)
    pad = token("pad_token_id")
    return GenerationOptions(
        is_sampled=options.get("do_sample", not options.keys().isdisjoint(_SAMPLING)),
        ends=ends,
        pad=pad if pad is not None else (*ends, 0)[0],
        start=start,
        **{
            option.name: options[option.name]
            for option in fields(GenerationOptions)
            if option.name in options
        },
    )


def steps_of(options: Mapping[str, Any], config: Any, width: int) -> int:
    """Return the maximum number of new tokens.

    Example:
        >>> steps_of({"max_length": 8}, None, 5)
        3
    """
    names = ("max_new_tokens", "max_length")
    has_own = not options.keys().isdisjoint(names)
    new, length = (options.get(name) if has_own else getattr(config, name, None) for name in names)
    length = length or 20  # The default of transformers, where no configuration has one.
    if new is None and length <= width:
        raise SettingsError(
            f"megatron_generate(): prompts of {width} tokens leave none of max_length={length} to generate; "
            "give max_new_tokens, or a larger max_length."
        )
    return length - width if new is None else new


@dataclass(slots=True)
class Sampler:
    """Sample tokens from logits."""

    choice: GenerationOptions
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
    """Return the best continuation of one prompt by transformers' beam search.

    The score of a continuation is its summed log-probability divided by its length to the power of the
    penalty. The search ends when as many continuations have ended as there are beams and the best unfinished
    one scores no more than the worst of them.

    Args:
        logits: Logits of the token after the prompt, of shape `[beams, vocabulary]`, with equal rows.
        advance: Called with the beams that each beam continues and the token of each: returns the next
            logits.
        beams: Number of beams.
        steps: Maximum number of tokens.
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
        wanted = beams * max(2, 1 + len(ends))  # At least `beams` of them do not end.
        best, indices = totals.flatten().topk(min(wanted, totals.numel()))
        following: list[tuple[float, int, int]] = []
        for rank, (score, index) in enumerate(zip(best.tolist(), indices.tolist(), strict=True)):
            beam, token = divmod(index, vocabulary)
            if token in ends or step == steps:
                if rank < beams:
                    ended.append((score / step**length_penalty, [*running[beam], token]))
            elif len(following) < beams:
                following.append((score, beam, token))
        ended = sorted(ended, key=lambda candidate: -candidate[0])[:beams]
        worst = ended[-1][0] if len(ended) == beams else -math.inf
        if not following or following[0][0] / step**length_penalty <= worst:
            break
        running = [[*running[beam], token] for _, beam, token in following]
        scores = torch.tensor([score for score, _, _ in following], device=logits.device)
        rows, tokens = (torch.tensor([item[i] for item in following], device=logits.device) for i in (1, 2))
        logits = advance(rows, tokens)
    return ended[0][1]


@frozen
class Prompts:
    """Prompts of shape `[rows, width]` without padding on their left; tokens beyond `lengths` do not count.

    `limits` includes the continuation, `shifts` is the left padding that each prompt had.
    """

    tokens: Tensor
    lengths: Tensor
    limits: Tensor
    shifts: Tensor


def check_prompts(inputs: Tensor, mask: Tensor | None, vocabulary: int) -> None:
    """Refuse prompts that cannot be embedded: the rank with the embedding must not fail alone.

    `inputs` has the shape `[rows, width]`; padding, where the mask is 0, may be any number.
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
    """Move prompts of shape `[rows, width]` to the left.

    A prompt padded on the left gets `steps` tokens; one padded on the right is continued in place of its
    padding, to the same width as the others.

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
    """Return sequences with the left padding of their prompts, padded to the longest."""
    shifts = prompts.shifts.tolist()
    width = max(shift + len(row) for shift, row in zip(shifts, rows, strict=True))
    return torch.stack(
        [
            functional.pad(row, (shift, width - shift - len(row)), value=pad)
            for shift, row in zip(shifts, rows, strict=True)
        ]
    )


# Modules of megatron-core read these when they are built.
_SHARDED_SEQUENCES = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")


class CachedDecoder:
    """A decoder with a key-value cache that continues all sequences by the same number of tokens at a time.

    All ranks of a replica call the same methods. megatron-core's inference engines need a GPU (they time and
    check CUDA tensors); this uses its static cache, in the stages of training.
    """

    def __init__(self, engine: MegatronEngine, rows: int, length: int) -> None:
        self._engine = engine
        self._rows = rows
        self._context = core("inference.contexts").StaticInferenceContext(rows, length)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token, in float32 and the same on every rank.

        `tokens`, of shape `[rows, tokens]`, follow those already cached; the logits have the shape
        `[rows, vocabulary]`.
        """
        engine, groups = self._engine, self._engine.groups
        transfer = core("inference.communication_utils")
        pipeline = core("parallel_state").get_pipeline_model_parallel_group()
        start, length = self._context.sequence_len_offset, tokens.shape[1]
        positions = torch.arange(start, start + length, device=tokens.device).expand_as(tokens)
        config = engine.transformer_config
        output: Any = None
        last = len(engine.chunks) - 1
        for index, chunk in enumerate(engine.chunks):
            received = None
            if index or groups.pipeline_rank:
                size = (length, self._rows, config.hidden_size)
                received = torch.empty(size, dtype=config.pipeline_dtype, device=tokens.device)
                transfer.recv_from_prev_pipeline_rank_(received, pipeline)
            core("utils").get_attr_wrapped_model(chunk, "set_input_tensor")(received)
            output = chunk(
                tokens, positions, None, inference_context=self._context, runtime_gather_output=True
            )
            if index < last or not groups.is_last_stage:
                transfer.send_to_next_pipeline_rank(output.contiguous(), pipeline)
        self._context.increment_sequence_len_offset(length)
        vocabulary: int = engine.config.vocab_size  # pyright: ignore[reportOptionalMemberAccess]
        logits = torch.empty(self._rows, vocabulary, device=tokens.device)
        if groups.is_last_stage:
            logits.copy_(output[:, -1, :vocabulary])
        if groups.pipeline > 1:
            dist.broadcast(logits, group_src=groups.pipeline - 1, group=pipeline)
        return logits

    def select(self, rows: Tensor) -> None:
        """Reorder the cache: row `i` takes over the cache of row `rows[i]`."""
        self._context.swap_key_value_dict(rows)


@contextmanager
def full_sequences(engine: MegatronEngine) -> Generator[None]:
    """Compute in evaluation mode, without gradients and sequence parallelism: tokens come one at a time."""
    changed: list[tuple[Any, str]] = []
    owners = [engine.transformer_config, *engine.chunks.modules()]
    owners += [module.config for module in engine.chunks.modules() if hasattr(module, "config")]
    for owner in owners:
        for name in _SHARDED_SEQUENCES:
            if vars(owner).get(name) is True:
                changed.append((owner, name))
                setattr(owner, name, False)
    modes = [(module, module.training) for module in engine.modules()]
    engine.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for owner, name in changed:
            setattr(owner, name, True)
