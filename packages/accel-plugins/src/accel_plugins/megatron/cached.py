"""Forward passes of a decoder that keep the keys and values of the tokens before, over all stages."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_plugins.megatron.library import core

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from accel_plugins.megatron.engine import MegatronEngine

# What modules of megatron-core decide on when they are made.
_SHARDED_SEQUENCES = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")


class CachedDecoder:
    """A decoder that continues sequences, all by as many tokens at a time.

    The ranks of a replica call the same methods. megatron-core's inference engines need a GPU (they time and
    check CUDA's tensors); this is its static cache, in the stages as they are trained.
    """

    def __init__(self, engine: MegatronEngine, rows: int, length: int) -> None:
        self._engine = engine
        self._rows = rows
        self._context = core("inference.contexts").StaticInferenceContext(rows, length)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token that follows, in float32 and the same on every rank.

        `tokens`, of shape `[rows, tokens]`, follow the ones before; the logits have the shape `[rows,
        vocabulary]`.
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
        found = torch.empty(self._rows, vocabulary, device=tokens.device)
        if groups.is_last_stage:
            found.copy_(output[:, -1, :vocabulary])
        if groups.pipeline > 1:
            dist.broadcast(found, group_src=groups.pipeline - 1, group=pipeline)
        return found

    def select(self, rows: Tensor) -> None:
        """Go on with other sequences: each row takes over the past of the one whose index is given."""
        self._context.swap_key_value_dict(rows)


@contextmanager
def full_sequences(engine: MegatronEngine) -> Generator[None]:
    """Compute in evaluation mode, without gradients and sequence parallelism: tokens come one at a time."""
    changed: list[tuple[Any, str]] = []
    owners = [engine.transformer_config, *engine.chunks.modules()]
    owners += [one.config for one in engine.chunks.modules() if hasattr(one, "config")]
    for owner in owners:
        for name in _SHARDED_SEQUENCES:
            if vars(owner).get(name) is True:
                changed.append((owner, name))
                setattr(owner, name, False)
    modes = [(one, one.training) for one in engine.modules()]
    engine.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for owner, name in changed:
            setattr(owner, name, True)
