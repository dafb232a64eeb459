"""Megatron-LM."""

from __future__ import annotations

from typing import Any

from accel_state.settings.option import Answers, Option
from accel_state.settings.parsing import boolean, integer, number, one_of
from accel_state.settings.rows.launch import is_local

_TUNING = "It tunes what runs without it; the reference page lists it."
_GRANULARITIES = ("full", "selective")
_METHODS = ("uniform", "block")
_BACKENDS = ("auto", "flash", "fused", "unfused", "local")
_REFUSED = "It is not supported."


def _attention_backend(text: str) -> str:
    """A name; or a truth value, as in other libraries' files: whether to choose a fused one."""
    try:
        return "auto" if boolean(text) else "unfused"
    except ValueError:
        return one_of(*_BACKENDS)(text)


def _on(answers: Answers) -> bool:
    return bool(answers("megatron"))


def _row(field: str, help: str, **more: Any) -> Option:  # noqa: A002 - as the field is called
    name = f"megatron_lm_{field}"
    rest: dict[str, Any] = {"ask_if": _on if "question" in more else None, **more}
    return Option(
        path=f"megatron.{field}",
        help=help,
        topic="Megatron-LM",
        variable=name.upper(),
        flags=(f"--{name}",),
        key=f"megatron_lm_config.{name}",
        **rest,
    )


MEGATRON = (
    Option(
        path="megatron",
        help="Train with Megatron: tensor, pipeline, sequence and data parallelism by megatron-core.",
        topic="Megatron-LM",
        parse=boolean,
        variable="ACCELERATE_USE_MEGATRON_LM",
        flags=("--use_megatron_lm",),
        const="true",
        question="Train with Megatron?",
        ask_if=lambda answers: (
            is_local(answers)
            and answers("launch.distributed_type") == "MULTI_GPU"
            and not answers("deepspeed")
        ),
    ),
    _row(
        "tp_degree",
        "Tensor-parallel size.",
        parse=integer(1),
        question="Tensor-parallel size?",
    ),
    _row(
        "sequence_parallelism",
        "Shard activations along the sequence dim (sequence parallelism).",
        parse=boolean,
        question="Shard activations along the sequence dim? (sequence parallelism)",
        ask_if=lambda answers: _on(answers) and (answers("megatron.tp_degree") or 1) > 1,
    ),
    _row(
        "pp_degree",
        "Pipeline-parallel size.",
        parse=integer(1),
        question="Pipeline-parallel size?",
    ),
    _row(
        "num_micro_batches",
        "Micro-batches per step.",
        parse=integer(1),
        question="How many micro-batches per step?",
    ),
    _row(
        "recompute_activations",
        "Recompute selected activations in the backward pass.",
        parse=boolean,
        question="Recompute selected activations in the backward pass? (less memory)",
    ),
    _row(
        "use_distributed_optimizer",
        "Shard optimizer state across data-parallel ranks.",
        parse=boolean,
        question="Shard optimizer state across data-parallel ranks?",
    ),
    _row(
        "gradient_clipping",
        "The norm that gradients are clipped to; 0 for none.",
        parse=number(0),
        question="To which norm are gradients clipped? (0: not at all)",
    ),
    _row(
        "use_custom_fsdp",
        "Not supported: use --use_fsdp.",
        parse=boolean,
        skip_reason=_REFUSED,
    ),
    _row(
        "no_load_optim",
        "Read checkpoints without the optimizer.",
        parse=boolean,
        skip_reason=_TUNING,
    ),
    _row(
        "no_save_optim",
        "Write checkpoints without the optimizer.",
        parse=boolean,
        skip_reason=_TUNING,
    ),
    _row(
        "eod_mask_loss",
        "Leave ends of documents out of the loss.",
        parse=boolean,
        skip_reason=_TUNING,
    ),
    _row(
        "optimizer_cpu_offload",
        "Let the optimizer work on the CPU.",
        parse=boolean,
        skip_reason=_TUNING,
    ),
    _row(
        "overlap_cpu_optimizer_d2h_h2d",
        "Copy for an offloaded optimizer while it computes.",
        parse=boolean,
        skip_reason=_TUNING,
    ),
    _row(
        "use_precision_aware_optimizer",
        "Keep the state of the optimizer in fewer bits.",
        parse=boolean,
        skip_reason=_TUNING,
    ),
    _row(
        "decoder_last_pipeline_num_layers",
        "How many layers the last stage has.",
        parse=integer(0),
        skip_reason=_TUNING,
    ),
    _row(
        "recompute_granularity",
        "Granularity of activation recompute.",
        parse=one_of(*_GRANULARITIES),
        choices=_GRANULARITIES,
        skip_reason=_TUNING,
    ),
    _row(
        "recompute_method",
        "Method of activation recompute.",
        parse=one_of(*_METHODS),
        choices=_METHODS,
        skip_reason=_TUNING,
    ),
    _row(
        "recompute_num_layers",
        "Layers per recompute unit.",
        parse=integer(1),
        skip_reason=_TUNING,
    ),
    _row(
        "attention_backend",
        "Attention backend; true stands for auto and false for unfused.",
        parse=_attention_backend,
        choices=_BACKENDS,
        skip_reason=_TUNING,
    ),
    _row(
        "expert_model_parallel_size",
        "Not supported: no supported model has experts.",
        parse=integer(1),
        skip_reason=_REFUSED,
    ),
    _row(
        "context_parallel_size",
        "Context-parallel size.",
        parse=integer(1),
        skip_reason=_TUNING,
    ),
    _row(
        "expert_tensor_parallel_size",
        "Not supported: no supported model has experts.",
        parse=integer(1),
        skip_reason=_REFUSED,
    ),
    _row(
        "attention_dropout",
        "Dropout probability of attention weights.",
        parse=number(0, 1),
        skip_reason=_TUNING,
    ),
    _row(
        "hidden_dropout",
        "Dropout probability of hidden states.",
        parse=number(0, 1),
        skip_reason=_TUNING,
    ),
    _row(
        "attention_softmax_in_fp32",
        "Compute the softmax of attention in float32.",
        parse=boolean,
        skip_reason=_TUNING,
    ),
    _row(
        "calculate_per_token_loss",
        "Average the loss over tokens.",
        parse=boolean,
        skip_reason=_TUNING,
    ),
    _row(
        "use_rotary_position_embeddings",
        "Use rotary positions.",
        parse=boolean,
        skip_reason=_TUNING,
    ),
)
"""Rows of `MegatronSettings`."""
