"""Precision, accumulation and compilation."""

from __future__ import annotations

from accel_state.labels import DynamoBackend, PrecisionType
from accel_state.settings.option import Answers, Option
from accel_state.settings.parsing import boolean, integer, one_of, optional, precision

_PRECISIONS = tuple(member.value for member in PrecisionType)
_BACKENDS = tuple(member.value for member in DynamoBackend)
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_COMPILATION = "compilation"


def _compiles(answers: Answers) -> bool:
    return answers("dynamo.backend") != "NO"


TRAINING = (
    Option(
        path="precision.mixed_precision",
        help="The precision of forward and backward passes.",
        topic="training",
        parse=precision(*_PRECISIONS),
        choices=_PRECISIONS,
        variable="ACCELERATE_MIXED_PRECISION",
        flags=("--mixed_precision",),
        key="mixed_precision",
        question="In which precision do forward and backward passes compute?",
    ),
    Option(
        path="training.gradient_accumulation_steps",
        help="Micro-batches per optimizer step; auto leaves it to the script.",
        topic="training",
        parse=optional(integer(1), "auto"),
        variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        flags=("--gradient_accumulation_steps",),
        key="gradient_accumulation_steps",
        key_aliases=("deepspeed_config.gradient_accumulation_steps",),
        question="How many micro-batches per optimizer step?",
        ask_if=lambda answers: bool(answers("deepspeed")) and not answers("deepspeed.hf_ds_config"),
    ),
    Option(
        path="training.strategy",
        help="The strategy that trains, by its name; auto chooses the first that applies.",
        topic="training",
        parse=optional(str, "auto", ""),
        variable="ACCELERATE_STRATEGY",
        flags=("--strategy",),
        key="strategy",
        skip_reason="The questions about DeepSpeed, FSDP and parallelism choose it.",
    ),
)
"""Rows of `PrecisionSettings` and `TrainingSettings`."""

DYNAMO = (
    Option(
        path="dynamo.backend",
        help="The compiler behind torch.compile; no compiles nothing.",
        topic=_COMPILATION,
        parse=one_of(*_BACKENDS),
        choices=_BACKENDS,
        variable="ACCELERATE_DYNAMO_BACKEND",
        flags=("--dynamo_backend",),
        key="dynamo_config.dynamo_backend",
        question="What compiles the model? (NO: nothing does)",
    ),
    Option(
        path="dynamo.mode",
        help="The mode of torch.compile.",
        topic=_COMPILATION,
        parse=one_of(*_MODES),
        choices=_MODES,
        variable="ACCELERATE_DYNAMO_MODE",
        flags=("--dynamo_mode",),
        key="dynamo_config.dynamo_mode",
        question="In which mode?",
        ask_if=_compiles,
    ),
    Option(
        path="dynamo.use_fullgraph",
        help="Fail rather than break the model into several graphs.",
        topic=_COMPILATION,
        parse=boolean,
        variable="ACCELERATE_DYNAMO_USE_FULLGRAPH",
        flags=("--dynamo_use_fullgraph",),
        const="true",
        key="dynamo_config.dynamo_use_fullgraph",
        question="Fail rather than break the model into several graphs?",
        ask_if=_compiles,
    ),
    Option(
        path="dynamo.use_dynamic",
        help="Trace with dynamic shapes.",
        topic=_COMPILATION,
        parse=boolean,
        variable="ACCELERATE_DYNAMO_USE_DYNAMIC",
        flags=("--dynamo_use_dynamic",),
        const="true",
        key="dynamo_config.dynamo_use_dynamic",
        question="Trace with dynamic shapes?",
        ask_if=_compiles,
    ),
    Option(
        path="dynamo.use_regional_compilation",
        help="Compile each repeated block once instead of the whole model.",
        topic=_COMPILATION,
        parse=boolean,
        variable="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        flags=("--dynamo_use_regional_compilation",),
        const="true",
        key="dynamo_config.dynamo_use_regional_compilation",
        question="Compile each repeated block once instead of the whole model?",
        ask_if=_compiles,
    ),
)
"""Rows of `DynamoSettings`."""
