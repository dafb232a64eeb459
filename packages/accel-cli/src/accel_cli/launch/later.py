"""Documented flags of `accel launch` that belong to what this release cannot run yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

LATER: Mapping[str, tuple[str, ...]] = {
    "FSDP": ("use_fsdp", "fsdp_"),
    "DeepSpeed": (
        "use_deepspeed",
        "deepspeed_",
        "zero_stage",
        "zero3_",
        "offload_optimizer_",
        "offload_param_",
        "gradient_clipping",
    ),
    "Megatron-LM": ("use_megatron_lm", "megatron_lm_"),
    "Tensor, context and sequence parallelism": ("use_parallelism_config", "parallelism_config_"),
    "An FP8 recipe": ("fp8_",),
    "TPU training": (
        "tpu",
        "tpu_",
        "no_tpu_cluster",
        "vm",
        "env",
        "main_training_function",
        "downcast_bf16",
    ),
    "Amazon SageMaker": ("aws_",),
    "Starting with mpirun": ("mpirun_",),
}
"""What the flags ask for, and their names without dashes; one that ends in `_` begins several."""


def later(flag: str) -> str | None:
    """What a documented flag asks for that is not available yet, or None.

    Args:
        flag: With two dashes, spelled with underscores.

    Example:
        >>> later("--fsdp_version"), later("--num_processes")
        ('FSDP', None)
    """
    name = flag.removeprefix("--")
    return next(
        (
            what
            for what, names in LATER.items()
            if any(name == known or (known.endswith("_") and name.startswith(known)) for known in names)
        ),
        None,
    )
