"""The axes of parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel_state.settings.option import Answers, documented, rows_of, setting, spelled, switch
from accel_state.settings.sections.launch import is_local

_COMMUNICATION = ("allgather", "alltoall")
_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3")


def _on(answers: Answers) -> bool:
    return bool(answers("parallelism"))


def _context(answers: Answers) -> bool:
    return _on(answers) and (answers("parallelism.cp_size") or 1) > 1


def _sequence(answers: Answers) -> bool:
    return _on(answers) and (answers("parallelism.sp_size") or 1) > 1


def _with_deepspeed(answers: Answers) -> bool:
    return _on(answers) and bool(answers("deepspeed"))


def _with_torch(answers: Answers) -> bool:
    return _on(answers) and not answers("deepspeed")


def _row(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    def derive(field: str) -> dict[str, Any]:
        aliases = (f"parallelism_config.{field}",)
        name = f"parallelism_config_{field}"
        return spelled(name, "parallelism_config", key_aliases=aliases, ask_if=_on)

    return setting(derive, help=help, **more)


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismSettings:
    """The sizes of the axes of parallelism; the fields of `ParallelismConfig` and of its handlers."""

    dp_replicate_size: int | None = _row(
        "Replicated data-parallel size: number of replicas of the model.",
        question="How many replicas of the model? (replicated data-parallel size)",
        ask_if=_with_torch,
    )
    dp_shard_size: int | None = _row(
        "Sharded data-parallel size: number of ranks that shard each replica (FSDP).",
        question="How many ranks shard each replica? (sharded data-parallel size)",
        ask_if=_with_torch,
    )
    tp_size: int | None = _row("Tensor-parallel size.", question="Tensor-parallel size?", ask_if=_with_torch)
    cp_size: int | None = _row(
        "Context-parallel size (PyTorch).",
        question="Context-parallel size?",
        ask_if=_with_torch,
    )
    cp_backend: str | None = _row(
        "Implementation of context parallelism.",
        choices=("torch",),
        skip_reason="There is one.",
        ask_if=None,
    )
    cp_comm_strategy: str | None = _row(
        "Collective that exchanges keys and values.",
        choices=_COMMUNICATION,
        question="Which collective exchanges keys and values?",
        ask_if=_context,
    )
    sp_size: int | None = _row(
        "Sequence-parallel size (DeepSpeed).",
        question="Sequence-parallel size?",
        ask_if=_with_deepspeed,
    )
    sp_backend: str | None = _row(
        "Implementation of sequence parallelism.",
        choices=("deepspeed",),
        skip_reason="There is one.",
        ask_if=None,
    )
    sp_seq_length_is_variable: bool | None = _row(
        "Whether sequence lengths vary between batches.",
        question="Do sequence lengths vary between batches?",
        ask_if=_sequence,
    )
    sp_seq_length: int | None = _row(
        "Sequence length in tokens.",
        question="Sequence length in tokens? (empty: taken from the first batch)",
        ask_if=_sequence,
    )
    sp_attn_implementation: str | None = _row(
        "Attention implementation.",
        choices=_ATTENTION,
        question="Which attention implementation?",
        ask_if=_sequence,
    )


PARALLELISM = (
    switch(
        "parallelism",
        "parallelism_config",
        help="Use tensor, context or sequence parallelism, with the sizes of the axes below.",
        topic="tensor, context and sequence parallelism",
        question="Use tensor, context or sequence parallelism?",
        ask_if=lambda answers: (
            is_local(answers) and (bool(answers("deepspeed")) or answers("fsdp.fsdp_version") == 2)
        ),
    ),
    *rows_of("parallelism", ParallelismSettings, topic="tensor, context and sequence parallelism"),
)
