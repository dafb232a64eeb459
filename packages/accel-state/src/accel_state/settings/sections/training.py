"""Precision, accumulation and compilation."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.labels import DynamoBackend, PrecisionType
from accel_state.settings.option import Answers, documented, rows_of, setting
from accel_state.settings.parsing import boolean, integer, one_of, optional, precision

_PRECISIONS = tuple(member.value for member in PrecisionType)
_BACKENDS = tuple(member.value for member in DynamoBackend)
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def _compiles(answers: Answers) -> bool:
    return answers("dynamo.backend") != "NO"


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSettings:
    """In which precision the forward and backward passes compute."""

    mixed_precision: str = setting(
        help="The precision of forward and backward passes.",
        default="no",
        parse=precision(*_PRECISIONS),
        choices=_PRECISIONS,
        variable="ACCELERATE_MIXED_PRECISION",
        flags=("--mixed_precision",),
        key="mixed_precision",
        question="In which precision do forward and backward passes compute?",
    )


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """How the training loop steps."""

    gradient_accumulation_steps: int = setting(
        help="Micro-batches per optimizer step; auto leaves it to the script.",
        default=1,
        parse=optional(integer(1), "auto"),
        variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        flags=("--gradient_accumulation_steps",),
        key="gradient_accumulation_steps",
        key_aliases=("deepspeed_config.gradient_accumulation_steps",),
        question="How many micro-batches per optimizer step?",
        ask_if=lambda answers: bool(answers("deepspeed")) and not answers("deepspeed.hf_ds_config"),
    )
    strategy: str | None = setting(
        help="The strategy that trains, by its name; auto chooses the first that applies.",
        parse=optional(str, "auto", ""),
        variable="ACCELERATE_STRATEGY",
        flags=("--strategy",),
        key="strategy",
        skip_reason="The questions about DeepSpeed, FSDP and parallelism choose it.",
    )


TRAINING = (
    *rows_of("precision", PrecisionSettings, topic="training"),
    *rows_of("training", TrainingSettings, topic="training"),
)


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoSettings:
    """How `torch.compile` compiles the model."""

    backend: str = setting(
        help="The compiler behind torch.compile; no compiles nothing.",
        default="NO",
        parse=one_of(*_BACKENDS),
        choices=_BACKENDS,
        variable="ACCELERATE_DYNAMO_BACKEND",
        flags=("--dynamo_backend",),
        key="dynamo_config.dynamo_backend",
        question="What compiles the model? (NO: nothing does)",
    )
    mode: str = setting(
        help="The mode of torch.compile.",
        default="default",
        parse=one_of(*_MODES),
        choices=_MODES,
        variable="ACCELERATE_DYNAMO_MODE",
        flags=("--dynamo_mode",),
        key="dynamo_config.dynamo_mode",
        question="In which mode?",
        ask_if=_compiles,
    )
    use_fullgraph: bool = setting(
        help="Fail rather than break the model into several graphs.",
        default=False,
        parse=boolean,
        variable="ACCELERATE_DYNAMO_USE_FULLGRAPH",
        flags=("--dynamo_use_fullgraph",),
        const="true",
        key="dynamo_config.dynamo_use_fullgraph",
        question="Fail rather than break the model into several graphs?",
        ask_if=_compiles,
    )
    use_dynamic: bool = setting(
        help="Trace with dynamic shapes.",
        default=False,
        parse=boolean,
        variable="ACCELERATE_DYNAMO_USE_DYNAMIC",
        flags=("--dynamo_use_dynamic",),
        const="true",
        key="dynamo_config.dynamo_use_dynamic",
        question="Trace with dynamic shapes?",
        ask_if=_compiles,
    )
    use_regional_compilation: bool = setting(
        help="Compile each repeated block once instead of the whole model.",
        default=False,
        parse=boolean,
        variable="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        flags=("--dynamo_use_regional_compilation",),
        const="true",
        key="dynamo_config.dynamo_use_regional_compilation",
        question="Compile each repeated block once instead of the whole model?",
        ask_if=_compiles,
    )


DYNAMO = (*rows_of("dynamo", DynamoSettings, topic="compilation"),)
