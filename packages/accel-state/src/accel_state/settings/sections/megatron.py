"""Megatron-LM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel_state.settings.option import Answers, documented, rows_of, setting, spelled, switch
from accel_state.settings.parsing import boolean, integer, number, one_of
from accel_state.settings.sections.launch import is_local

_TUNING = "It tunes what runs without it; the reference page lists it."
_GRANULARITIES = ("full", "selective")
_METHODS = ("uniform", "block")
_BACKENDS = ("auto", "flash", "fused", "unfused", "local")
_REFUSED = "It is not supported."
_NO_EXPERTS = "Not supported: no supported model has experts."


def _attention_backend(text: str) -> str:
    """A name; or a truth value, as in other libraries' files: whether to choose a fused one."""
    try:
        return "auto" if boolean(text) else "unfused"
    except ValueError:
        return one_of(*_BACKENDS)(text)


def _on(answers: Answers) -> bool:
    return bool(answers("megatron"))


def _row(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    asked: dict[str, Any] = {"ask_if": _on} if "question" in more else {"skip_reason": _TUNING}
    return setting(
        lambda field: spelled(f"megatron_lm_{field}", "megatron_lm_config", **asked), help=help, **more
    )


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronSettings:
    """How Megatron-LM trains; the fields of `MegatronLMPlugin` that can be set from outside."""

    tp_degree: int | None = _row("Tensor-parallel size.", question="Tensor-parallel size?")
    sequence_parallelism: bool | None = _row(
        "Shard activations along the sequence dim (sequence parallelism).",
        question="Shard activations along the sequence dim? (sequence parallelism)",
        ask_if=lambda answers: _on(answers) and (answers("megatron.tp_degree") or 1) > 1,
    )
    pp_degree: int | None = _row("Pipeline-parallel size.", question="Pipeline-parallel size?")
    num_micro_batches: int | None = _row(
        "Micro-batches per step.",
        question="How many micro-batches per step?",
    )
    recompute_activations: bool | None = _row(
        "Recompute selected activations in the backward pass.",
        question="Recompute selected activations in the backward pass? (less memory)",
    )
    use_distributed_optimizer: bool | None = _row(
        "Shard optimizer state across data-parallel ranks.",
        question="Shard optimizer state across data-parallel ranks?",
    )
    gradient_clipping: float | None = _row(
        "The norm that gradients are clipped to; 0 for none.",
        parse=number(0),
        question="To which norm are gradients clipped? (0: not at all)",
    )
    use_custom_fsdp: bool | None = _row("Not supported: use --use_fsdp.", skip_reason=_REFUSED)
    no_load_optim: bool | None = _row("Read checkpoints without the optimizer.")
    no_save_optim: bool | None = _row("Write checkpoints without the optimizer.")
    eod_mask_loss: bool | None = _row("Leave ends of documents out of the loss.")
    optimizer_cpu_offload: bool | None = _row("Let the optimizer work on the CPU.")
    overlap_cpu_optimizer_d2h_h2d: bool | None = _row("Copy for an offloaded optimizer while it computes.")
    use_precision_aware_optimizer: bool | None = _row("Keep the state of the optimizer in fewer bits.")
    decoder_last_pipeline_num_layers: int | None = _row(
        "How many layers the last stage has.",
        parse=integer(0),
    )
    recompute_granularity: str | None = _row("Granularity of activation recompute.", choices=_GRANULARITIES)
    recompute_method: str | None = _row("Method of activation recompute.", choices=_METHODS)
    recompute_num_layers: int | None = _row("Layers per recompute unit.")
    attention_backend: str | None = _row(
        "Attention backend; true stands for auto and false for unfused.",
        parse=_attention_backend,
        choices=_BACKENDS,
    )
    expert_model_parallel_size: int | None = _row(_NO_EXPERTS, skip_reason=_REFUSED)
    context_parallel_size: int | None = _row("Context-parallel size.")
    expert_tensor_parallel_size: int | None = _row(_NO_EXPERTS, skip_reason=_REFUSED)
    attention_dropout: float | None = _row("Dropout probability of attention weights.", parse=number(0, 1))
    hidden_dropout: float | None = _row("Dropout probability of hidden states.", parse=number(0, 1))
    attention_softmax_in_fp32: bool | None = _row("Compute the softmax of attention in float32.")
    calculate_per_token_loss: bool | None = _row("Average the loss over tokens.")
    use_rotary_position_embeddings: bool | None = _row("Use rotary positions.")


MEGATRON = (
    switch(
        "megatron",
        "megatron_lm",
        help="Train with Megatron: tensor, pipeline, sequence and data parallelism by megatron-core.",
        topic="Megatron-LM",
        question="Train with Megatron?",
        ask_if=lambda answers: (
            is_local(answers)
            and answers("launch.distributed_type") == "MULTI_GPU"
            and not answers("deepspeed")
        ),
    ),
    *rows_of("megatron", MegatronSettings, topic="Megatron-LM"),
)
