"""Megatron-LM."""

from __future__ import annotations

from typing import Any

from accel_state.settings.option import Answers, Option
from accel_state.settings.parsing import flag, number, one_of, whole

_TUNING = "It tunes what runs without it; the reference page lists it."
_GRANULARITIES = ("full", "selective")
_METHODS = ("uniform", "block")


def _on(answers: Answers) -> bool:
    return bool(answers("megatron"))


def _row(field: str, help: str, **more: Any) -> Option:  # noqa: A002 - as the field is called
    name = f"megatron_lm_{field}"
    rest: dict[str, Any] = {"when": _on if "question" in more else None, **more}
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
        help="Train with Megatron-LM.",
        topic="Megatron-LM",
        parse=flag,
        variable="ACCELERATE_USE_MEGATRON_LM",
        flags=("--use_megatron_lm",),
        const="true",
        unasked="It is not available in this version.",
    ),
    _row(
        "tp_degree",
        "Among how many processes each layer is divided.",
        parse=whole(1),
        question="Among how many processes is each layer divided?",
    ),
    _row(
        "sequence_parallelism",
        "Divide by sequence what tensor parallelism leaves.",
        parse=flag,
        question="Divide by sequence what tensor parallelism leaves?",
        when=lambda answers: _on(answers) and (answers("megatron.tp_degree") or 1) > 1,
    ),
    _row(
        "pp_degree",
        "Into how many stages the model is divided.",
        parse=whole(1),
        question="Into how many stages is the model divided?",
    ),
    _row(
        "num_micro_batches",
        "Micro-batches per step.",
        parse=whole(1),
        question="How many micro-batches per step?",
        when=lambda answers: _on(answers) and (answers("megatron.pp_degree") or 1) > 1,
    ),
    _row(
        "recompute_activations",
        "Compute selected activations again in the backward pass.",
        parse=flag,
        question="Compute selected activations again in the backward pass? (less memory)",
    ),
    _row(
        "use_distributed_optimizer",
        "Divide optimizer state among data-parallel processes.",
        parse=flag,
        question="Divide optimizer state among data-parallel processes?",
    ),
    _row(
        "gradient_clipping",
        "The norm that gradients are clipped to; 0 for none.",
        parse=number(0),
        question="To which norm are gradients clipped? (0: not at all)",
    ),
    _row(
        "use_custom_fsdp",
        "Shard parameters with Megatron's own FSDP.",
        parse=flag,
        unasked=_TUNING,
    ),
    _row(
        "no_load_optim",
        "Read checkpoints without the optimizer.",
        parse=flag,
        unasked=_TUNING,
    ),
    _row(
        "no_save_optim",
        "Write checkpoints without the optimizer.",
        parse=flag,
        unasked=_TUNING,
    ),
    _row(
        "eod_mask_loss",
        "Leave ends of documents out of the loss.",
        parse=flag,
        unasked=_TUNING,
    ),
    _row(
        "optimizer_cpu_offload",
        "Let the optimizer work on the CPU.",
        parse=flag,
        unasked=_TUNING,
    ),
    _row(
        "overlap_cpu_optimizer_d2h_h2d",
        "Copy for an offloaded optimizer while it computes.",
        parse=flag,
        unasked=_TUNING,
    ),
    _row(
        "use_precision_aware_optimizer",
        "Keep the state of the optimizer in fewer bits.",
        parse=flag,
        unasked=_TUNING,
    ),
    _row(
        "decoder_last_pipeline_num_layers",
        "How many layers the last stage has.",
        parse=whole(0),
        unasked=_TUNING,
    ),
    _row(
        "recompute_granularity",
        "What is computed again.",
        parse=one_of(*_GRANULARITIES),
        choices=_GRANULARITIES,
        unasked=_TUNING,
    ),
    _row(
        "recompute_method",
        "How layers are cut into pieces that are computed again.",
        parse=one_of(*_METHODS),
        choices=_METHODS,
        unasked=_TUNING,
    ),
    _row(
        "recompute_num_layers",
        "Layers per recomputed piece.",
        parse=whole(1),
        unasked=_TUNING,
    ),
    _row(
        "attention_backend",
        "What computes attention.",
        unasked=_TUNING,
    ),
    _row(
        "expert_model_parallel_size",
        "Among how many processes experts are divided.",
        parse=whole(1),
        unasked=_TUNING,
    ),
    _row(
        "context_parallel_size",
        "Among how many processes each sequence is divided.",
        parse=whole(1),
        unasked=_TUNING,
    ),
    _row(
        "expert_tensor_parallel_size",
        "Among how many processes each expert is divided.",
        parse=whole(1),
        unasked=_TUNING,
    ),
    _row(
        "attention_dropout",
        "The share of attention weights that is dropped.",
        parse=number(0, 1),
        unasked=_TUNING,
    ),
    _row(
        "hidden_dropout",
        "The share of hidden values that is dropped.",
        parse=number(0, 1),
        unasked=_TUNING,
    ),
    _row(
        "attention_softmax_in_fp32",
        "Compute the softmax of attention in float32.",
        parse=flag,
        unasked=_TUNING,
    ),
    _row(
        "calculate_per_token_loss",
        "Average the loss over tokens.",
        parse=flag,
        unasked=_TUNING,
    ),
    _row(
        "use_rotary_position_embeddings",
        "Use rotary positions.",
        parse=flag,
        unasked=_TUNING,
    ),
)
"""Rows of `MegatronSettings`."""
