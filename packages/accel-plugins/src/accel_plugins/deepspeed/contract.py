"""What we use of DeepSpeed that its documentation does not promise, by module and class."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from operator import attrgetter
from typing import TYPE_CHECKING

from accel_state.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Mapping

_OPTIMIZER = "runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_STAGE_3 = "runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_BF16 = "runtime.bf16_optimizer:BF16_Optimizer"

NAMES: Mapping[str, tuple[str, ...]] = {
    "runtime.engine:DeepSpeedEngine": (
        "get_global_grad_norm",
        "gradient_clipping",
        "is_gradient_accumulation_boundary",
        "set_gradient_accumulation_boundary",
        "was_step_applied",
        "zero_grad",
    ),
    _OPTIMIZER: (
        "_lazy_init_hp_params_optimizer_state",
        "_release_preflattened_grad_buffers",
        "_use_compact_grad_partition_buffer",
        "_wait_for_offload_copies",
        "refresh_fp32_params",
        "reset_cpu_buffers",
        "scale_if_loss",
        "scaled_global_norm",
    ),
    _STAGE_3: ("_get_norm_groups", "reset_cpu_buffers", "scale_if_loss"),
    _BF16: (
        "_lazy_init_hp_params_optimizer_state",
        "clear_hp_grads",
        "clear_lp_grads",
        "refresh_fp32_params",
        "scale_if_loss",
    ),
    "runtime.fp16.fused_optimizer:FP16_Optimizer": ("refresh_fp32_params",),
    "runtime.zero:GatheredParameters": ("__enter__", "__exit__"),
    "runtime.zero.config:get_zero_config": (),
    "utils": (
        "safe_get_full_fp32_param",
        "safe_get_full_optimizer_state",
        "safe_set_full_fp32_param",
        "safe_set_full_optimizer_state",
        "safe_set_local_fp32_param",
        "safe_set_local_optimizer_state",
        "set_z3_leaf_modules",
    ),
    "comm.comm": ("cdb", "init_distributed"),
}
"""By `module` or `module:class`, without `deepspeed.` before it."""


def absent_names(names: Mapping[str, tuple[str, ...]] = NAMES) -> list[str]:
    """What the installed DeepSpeed does not have, as `module:class.name`.

    Args:
        names: What to look for.
    """
    absent: list[str] = []
    for owner, attributes in names.items():
        module, _, inner = owner.partition(":")
        try:
            found = import_module(f"deepspeed.{module}")
            found = attrgetter(inner)(found) if inner else found
        except (ImportError, AttributeError):
            absent.append(owner)
        else:
            absent += [f"{owner}.{name}" for name in attributes if not hasattr(found, name)]
    return absent


def check_names(names: Mapping[str, tuple[str, ...]] = NAMES) -> None:
    """Refuse a DeepSpeed that lacks what we use of it, before a run depends on it.

    Args:
        names: What to look for.

    Raises:
        MissingDependencyError: It lacks some of them.
    """
    if absent := absent_names(names):
        raise MissingDependencyError(
            f"deepspeed {version('deepspeed')} does not have {', '.join(absent)}, which this version of "
            "accel uses of it: install another version of deepspeed, such as 0.19, or a newer accel."
        )
