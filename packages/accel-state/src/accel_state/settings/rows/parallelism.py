"""The axes of parallelism."""

from __future__ import annotations

from typing import Any

from accel_state.settings.option import Answers, Option
from accel_state.settings.parsing import boolean, integer, one_of
from accel_state.settings.rows.launch import is_local

_TOPIC = "tensor, context and sequence parallelism"
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


def _row(field: str, help: str, **more: Any) -> Option:  # noqa: A002 - as the field is called
    name = f"parallelism_config_{field}"
    rest: dict[str, Any] = {"ask_if": _on, **more}
    return Option(
        path=f"parallelism.{field}",
        help=help,
        topic=_TOPIC,
        variable=name.upper(),
        flags=(f"--{name}",),
        key=f"parallelism_config.{name}",
        key_aliases=(f"parallelism_config.{field}",),
        **rest,
    )


PARALLELISM = (
    Option(
        path="parallelism",
        help="Use tensor, context or sequence parallelism, with the sizes of the axes below.",
        topic=_TOPIC,
        parse=boolean,
        variable="ACCELERATE_USE_PARALLELISM_CONFIG",
        flags=("--use_parallelism_config",),
        const="true",
        question="Use tensor, context or sequence parallelism?",
        ask_if=lambda answers: (
            is_local(answers) and (bool(answers("deepspeed")) or answers("fsdp.fsdp_version") == 2)
        ),
    ),
    _row(
        "dp_replicate_size",
        "Replicated data-parallel size: number of replicas of the model.",
        parse=integer(1),
        question="How many replicas of the model? (replicated data-parallel size)",
        ask_if=_with_torch,
    ),
    _row(
        "dp_shard_size",
        "Sharded data-parallel size: number of ranks that shard each replica (FSDP).",
        parse=integer(1),
        question="How many ranks shard each replica? (sharded data-parallel size)",
        ask_if=_with_torch,
    ),
    _row(
        "tp_size",
        "Tensor-parallel size.",
        parse=integer(1),
        question="Tensor-parallel size?",
        ask_if=_with_torch,
    ),
    _row(
        "cp_size",
        "Context-parallel size (PyTorch).",
        parse=integer(1),
        question="Context-parallel size?",
        ask_if=_with_torch,
    ),
    _row(
        "cp_backend",
        "Implementation of context parallelism.",
        parse=one_of("torch"),
        choices=("torch",),
        skip_reason="There is one.",
        ask_if=None,
    ),
    _row(
        "cp_comm_strategy",
        "Collective that exchanges keys and values.",
        parse=one_of(*_COMMUNICATION),
        choices=_COMMUNICATION,
        question="Which collective exchanges keys and values?",
        ask_if=_context,
    ),
    _row(
        "sp_size",
        "Sequence-parallel size (DeepSpeed).",
        parse=integer(1),
        question="Sequence-parallel size?",
        ask_if=_with_deepspeed,
    ),
    _row(
        "sp_backend",
        "Implementation of sequence parallelism.",
        parse=one_of("deepspeed"),
        choices=("deepspeed",),
        skip_reason="There is one.",
        ask_if=None,
    ),
    _row(
        "sp_seq_length_is_variable",
        "Whether sequence lengths vary between batches.",
        parse=boolean,
        question="Do sequence lengths vary between batches?",
        ask_if=_sequence,
    ),
    _row(
        "sp_seq_length",
        "Sequence length in tokens.",
        parse=integer(1),
        question="Sequence length in tokens? (empty: taken from the first batch)",
        ask_if=_sequence,
    ),
    _row(
        "sp_attn_implementation",
        "Attention implementation.",
        parse=one_of(*_ATTENTION),
        choices=_ATTENTION,
        question="Which attention implementation?",
        ask_if=_sequence,
    ),
)
"""Rows of `ParallelismSettings`."""
