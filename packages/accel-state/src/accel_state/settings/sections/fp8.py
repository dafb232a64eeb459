"""FP8 recipes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel_state.settings.option import Answers, documented, rows_of, setting
from accel_state.settings.parsing import booleans, integer

_BACKENDS = ("AO", "TE", "MSAMP")
_FORMATS = ("HYBRID", "E4M3", "E5M2")
_ALGORITHMS = ("max", "most_recent")
_LEVELS = ("O1", "O2")


def _on(answers: Answers) -> bool:
    return answers("precision.mixed_precision") == "fp8"


def _with(*backends: str) -> Any:
    return lambda answers: _on(answers) and answers("fp8.backend") in backends


def _row(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    def derive(field: str) -> dict[str, Any]:
        name = field.removeprefix("fp8_")
        return {
            "variable": f"ACCELERATE_FP8_{name.upper()}",
            "flags": () if field == "use_mxfp8_block_scaling" else (f"--fp8_{name}",),
            "key": f"fp8_config.{field}",
            "key_aliases": (f"fp8_config.fp8_{field}",) if field == name else (),
        }

    return setting(derive, help=help, **more)


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Settings:
    """How matrices are multiplied in eight bits; the fields of the FP8 recipes."""

    backend: str | None = _row(
        "What multiplies matrices in eight bits: torchao, transformer-engine or MS-AMP.",
        choices=_BACKENDS,
        question="What multiplies matrices in eight bits? (AO: torchao, TE: transformer-engine)",
        ask_if=_on,
    )
    use_autocast_during_eval: bool | None = _row(
        "TE: use FP8 in evaluation, too.",
        const="true",
        question="Use FP8 in evaluation, too?",
        ask_if=_with("TE"),
    )
    margin: int | None = _row(
        "TE: margin of the scaling factors.",
        parse=integer(0),
        question="Which margin do scaling factors have?",
        ask_if=_with("TE"),
    )
    interval: int | None = _row(
        "TE: steps between two computations of the scaling factors.",
        question="How many steps between two computations of the scaling factors?",
        ask_if=_with("TE"),
    )
    fp8_format: str | None = _row(
        "TE: the format of numbers; HYBRID: E4M3 forward and E5M2 backward.",
        choices=_FORMATS,
        question="In which format? (HYBRID: E4M3 forward and E5M2 backward)",
        ask_if=_with("TE"),
    )
    amax_history_len: int | None = _row(
        "TE: steps that are looked back on for the scaling factors.",
        key_aliases=("fp8_config.fp8_amax_history_len", "fp8_config.amax_history_length"),
        question="How many steps are looked back on for the scaling factors?",
        ask_if=_with("TE"),
    )
    amax_compute_algo: str | None = _row(
        "TE: which of them counts.",
        choices=_ALGORITHMS,
        key_aliases=("fp8_config.fp8_amax_compute_algo", "fp8_config.amax_compute_algorithm"),
        question="Which of them counts?",
        ask_if=_with("TE"),
    )
    override_linear_precision: tuple[bool, bool, bool] | None = _row(
        "TE: whether fprop, dgrad and wgrad compute in higher precision, as false,false,true; in the"
        " environment also as ACCELERATE_FP8_OVERRIDE_FPROP, _DGRAD and _WGRAD.",
        parse=booleans(3),
        question="Do fprop, dgrad and wgrad compute in higher precision, as false,false,true?",
        ask_if=_with("TE"),
    )
    use_mxfp8_block_scaling: bool | None = _row(
        "TE: give every block of 32 values a scale of its own.",
        question="Give every block of 32 values a scale of its own?",
        ask_if=_with("TE"),
    )
    opt_level: str | None = _row(
        "MS-AMP: what is in eight bits; O2: optimizer state as well.",
        choices=_LEVELS,
        question="What is in eight bits? (O2: optimizer state as well)",
        ask_if=_with("MSAMP"),
    )
    enable_fsdp_float8_all_gather: bool | None = _row(
        "AO: let FSDP gather parameters in eight bits.",
        question="Let FSDP gather parameters in eight bits?",
        ask_if=lambda answers: _with("AO")(answers) and bool(answers("fsdp")),
    )
    pad_inner_dim: bool | None = _row(
        "AO: pad the inner dim of matrices to a multiple of 16.",
        question="Pad the inner dim of matrices to a multiple of 16?",
        ask_if=_with("AO"),
    )


FP8 = rows_of("fp8", Fp8Settings, topic="FP8")
