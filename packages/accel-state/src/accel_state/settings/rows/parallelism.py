"""The axes of parallelism."""

from __future__ import annotations

from typing import Any

from accel_state.settings.option import Answers, Option
from accel_state.settings.parsing import flag, one_of, whole
from accel_state.settings.rows.launch import here

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
    rest: dict[str, Any] = {"when": _on, **more}
    return Option(
        path=f"parallelism.{field}",
        help=help,
        topic=_TOPIC,
        variable=name.upper(),
        flags=(f"--{name}",),
        key=f"parallelism_config.{name}",
        more_keys=(f"parallelism_config.{field}",),
        **rest,
    )


PARALLELISM = (
    Option(
        path="parallelism",
        help="Divide the processes among axes of parallelism.",
        topic=_TOPIC,
        parse=flag,
        variable="ACCELERATE_USE_PARALLELISM_CONFIG",
        flags=("--use_parallelism_config",),
        const="true",
        question="Divide layers or sequences among processes, too (tensor, context, sequence parallel)?",
        when=lambda answers: (
            here(answers) and (bool(answers("deepspeed")) or answers("fsdp.fsdp_version") == 2)
        ),
    ),
    _row(
        "dp_replicate_size",
        "How many groups of processes hold a whole copy of the model.",
        parse=whole(1),
        question="How many groups of processes hold a whole copy of the model?",
        when=_with_torch,
    ),
    _row(
        "dp_shard_size",
        "Among how many processes the model is sharded.",
        parse=whole(1),
        question="Among how many processes is the model sharded?",
        when=_with_torch,
    ),
    _row(
        "tp_size",
        "Among how many processes each layer is divided.",
        parse=whole(1),
        question="Among how many processes is each layer divided?",
        when=_with_torch,
    ),
    _row(
        "cp_size",
        "Among how many processes each sequence is divided, by PyTorch.",
        parse=whole(1),
        question="Among how many processes is each sequence divided?",
        when=_with_torch,
    ),
    _row(
        "cp_backend",
        "What does that.",
        parse=one_of("torch"),
        choices=("torch",),
        unasked="There is one.",
        when=None,
    ),
    _row(
        "cp_comm_strategy",
        "How keys and values are exchanged.",
        parse=one_of(*_COMMUNICATION),
        choices=_COMMUNICATION,
        question="How are keys and values exchanged?",
        when=_context,
    ),
    _row(
        "sp_size",
        "Among how many processes each sequence is divided, by DeepSpeed.",
        parse=whole(1),
        question="Among how many processes is each sequence divided?",
        when=_with_deepspeed,
    ),
    _row(
        "sp_backend",
        "What does that.",
        parse=one_of("deepspeed"),
        choices=("deepspeed",),
        unasked="There is one.",
        when=None,
    ),
    _row(
        "sp_seq_length_is_variable",
        "Whether the lengths of sequences differ.",
        parse=flag,
        question="Do the lengths of sequences differ?",
        when=_sequence,
    ),
    _row(
        "sp_seq_length",
        "How long sequences are.",
        parse=whole(1),
        question="How long are sequences? (empty: learn it from the first batch)",
        when=_sequence,
    ),
    _row(
        "sp_attn_implementation",
        "What computes attention.",
        parse=one_of(*_ATTENTION),
        choices=_ATTENTION,
        question="What computes attention?",
        when=_sequence,
    ),
)
"""Rows of `ParallelismSettings`."""
