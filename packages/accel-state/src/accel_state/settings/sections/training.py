"""Precision, accumulation and compilation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel_state.labels import DynamoBackend, PrecisionType
from accel_state.settings.option import Answers, documented, plain, rows_of, setting, spelled
from accel_state.settings.parsing import integer, optional, precision

_PRECISIONS = tuple(member.value for member in PrecisionType)
_BACKENDS = tuple(member.value for member in DynamoBackend)
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def _compiles(answers: Answers) -> bool:
    return answers("dynamo.backend") != "NO"


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSettings:
    """In which precision the forward and backward passes compute."""

    mixed_precision: str = plain(
        "The precision of forward and backward passes.",
        default="no",
        parse=precision(*_PRECISIONS),
        choices=_PRECISIONS,
        question="In which precision do forward and backward passes compute?",
    )


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """How the training loop steps."""

    gradient_accumulation_steps: int = plain(
        "Micro-batches per optimizer step; auto leaves it to the script.",
        default=1,
        parse=optional(integer(1), "auto"),
        key_aliases=("deepspeed_config.gradient_accumulation_steps",),
        question="How many micro-batches per optimizer step?",
        ask_if=lambda answers: bool(answers("deepspeed")) and not answers("deepspeed.hf_ds_config"),
    )
    strategy: str | None = plain(
        "The strategy that trains, by its name; auto chooses the first that applies.",
        parse=optional(str, "auto", ""),
        skip_reason="The questions about DeepSpeed, FSDP and parallelism choose it.",
    )


TRAINING = (
    *rows_of("precision", PrecisionSettings, topic="training"),
    *rows_of("training", TrainingSettings, topic="training"),
)


def _dynamo(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    def derive(field: str) -> dict[str, Any]:
        name = f"dynamo_{field}"
        return spelled(name, "dynamo_config", variable=f"ACCELERATE_{name.upper()}", ask_if=_compiles)

    return setting(derive, help=help, **more)


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoSettings:
    """How `torch.compile` compiles the model."""

    backend: str = _dynamo(
        "The compiler behind torch.compile; no compiles nothing.",
        default="NO",
        choices=_BACKENDS,
        question="What compiles the model? (NO: nothing does)",
        ask_if=None,
    )
    mode: str = _dynamo(
        "The mode of torch.compile.",
        default="default",
        choices=_MODES,
        question="In which mode?",
    )
    use_fullgraph: bool = _dynamo(
        "Fail rather than break the model into several graphs.",
        default=False,
        question="Fail rather than break the model into several graphs?",
    )
    use_dynamic: bool = _dynamo(
        "Trace with dynamic shapes.",
        default=False,
        question="Trace with dynamic shapes?",
    )
    use_regional_compilation: bool = _dynamo(
        "Compile each repeated block once instead of the whole model.",
        default=False,
        question="Compile each repeated block once instead of the whole model?",
    )


DYNAMO = rows_of("dynamo", DynamoSettings, topic="compilation")
