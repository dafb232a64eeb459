"""FP8 recipes."""

from __future__ import annotations

from typing import Any

from accel_state.settings.option import Answers, Option
from accel_state.settings.parsing import boolean, booleans, integer, one_of

_BACKENDS = ("AO", "TE", "MSAMP")
_FORMATS = ("HYBRID", "E4M3", "E5M2")
_ALGORITHMS = ("max", "most_recent")
_LEVELS = ("O1", "O2")


def _on(answers: Answers) -> bool:
    return answers("precision.mixed_precision") == "fp8"


def _with(*backends: str) -> Any:
    return lambda answers: _on(answers) and answers("fp8.backend") in backends


def _row(field: str, help: str, **more: Any) -> Option:  # noqa: A002 - as the field is called
    name = field.removeprefix("fp8_")
    rest: dict[str, Any] = {"key_aliases": (f"fp8_config.fp8_{field}",) if field == name else (), **more}
    return Option(
        path=f"fp8.{field}",
        help=help,
        topic="FP8",
        variable=f"ACCELERATE_FP8_{name.upper()}",
        flags=() if field == "use_mxfp8_block_scaling" else (f"--fp8_{name}",),
        key=f"fp8_config.{field}",
        **rest,
    )


FP8 = (
    _row(
        "backend",
        "What multiplies matrices in eight bits: torchao, transformer-engine or MS-AMP.",
        parse=one_of(*_BACKENDS),
        choices=_BACKENDS,
        question="What multiplies matrices in eight bits? (AO: torchao, TE: transformer-engine)",
        ask_if=_on,
    ),
    _row(
        "use_autocast_during_eval",
        "TE: use FP8 in evaluation, too.",
        parse=boolean,
        const="true",
        question="Use FP8 in evaluation, too?",
        ask_if=_with("TE"),
    ),
    _row(
        "margin",
        "TE: margin of the scaling factors.",
        parse=integer(0),
        question="Which margin do scaling factors have?",
        ask_if=_with("TE"),
    ),
    _row(
        "interval",
        "TE: steps between two computations of the scaling factors.",
        parse=integer(1),
        question="How many steps between two computations of the scaling factors?",
        ask_if=_with("TE"),
    ),
    _row(
        "fp8_format",
        "TE: the format of numbers; HYBRID: E4M3 forward and E5M2 backward.",
        parse=one_of(*_FORMATS),
        choices=_FORMATS,
        question="In which format? (HYBRID: E4M3 forward and E5M2 backward)",
        ask_if=_with("TE"),
    ),
    _row(
        "amax_history_len",
        "TE: steps that are looked back on for the scaling factors.",
        parse=integer(1),
        key_aliases=("fp8_config.fp8_amax_history_len", "fp8_config.amax_history_length"),
        question="How many steps are looked back on for the scaling factors?",
        ask_if=_with("TE"),
    ),
    _row(
        "amax_compute_algo",
        "TE: which of them counts.",
        parse=one_of(*_ALGORITHMS),
        choices=_ALGORITHMS,
        key_aliases=("fp8_config.fp8_amax_compute_algo", "fp8_config.amax_compute_algorithm"),
        question="Which of them counts?",
        ask_if=_with("TE"),
    ),
    _row(
        "override_linear_precision",
        "TE: whether fprop, dgrad and wgrad compute in higher precision, as false,false,true; in the"
        " environment also as ACCELERATE_FP8_OVERRIDE_FPROP, _DGRAD and _WGRAD.",
        parse=booleans(3),
        question="Do fprop, dgrad and wgrad compute in higher precision, as false,false,true?",
        ask_if=_with("TE"),
    ),
    _row(
        "use_mxfp8_block_scaling",
        "TE: give every block of 32 values a scale of its own.",
        parse=boolean,
        question="Give every block of 32 values a scale of its own?",
        ask_if=_with("TE"),
    ),
    _row(
        "opt_level",
        "MS-AMP: what is in eight bits; O2: optimizer state as well.",
        parse=one_of(*_LEVELS),
        choices=_LEVELS,
        question="What is in eight bits? (O2: optimizer state as well)",
        ask_if=_with("MSAMP"),
    ),
    _row(
        "enable_fsdp_float8_all_gather",
        "AO: let FSDP gather parameters in eight bits.",
        parse=boolean,
        question="Let FSDP gather parameters in eight bits?",
        ask_if=lambda answers: _with("AO")(answers) and bool(answers("fsdp")),
    ),
    _row(
        "pad_inner_dim",
        "AO: pad the inner dim of matrices to a multiple of 16.",
        parse=boolean,
        question="Pad the inner dim of matrices to a multiple of 16?",
        ask_if=_with("AO"),
    ),
)
"""Rows of `Fp8Settings`."""
