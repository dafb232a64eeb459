"""The installed DeepSpeed has the names that this package uses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from accel_state.libraries import is_installed

NAMES = {
    "runtime.engine:DeepSpeedEngine": (
        "get_global_grad_norm",
        "gradient_clipping",
        "is_gradient_accumulation_boundary",
        "set_gradient_accumulation_boundary",
        "was_step_applied",
        "zero_optimization_stage",
        "zero_use_cpu_optimizer",
    ),
    "runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": ("refresh_fp32_params", "scaled_global_norm"),
    "runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": ("_get_norm_groups", "refresh_fp32_params"),
    "runtime.bf16_optimizer:BF16_Optimizer": ("refresh_fp32_params",),
    "runtime.fp16.fused_optimizer:FP16_Optimizer": ("refresh_fp32_params",),
    "runtime.base_optimizer:ZeROOptimizer": (),
    "runtime.zero:GatheredParameters": ("__enter__", "__exit__"),
    "runtime.zero.config:get_zero_config": (),
    "utils": (
        "lazy_init_hp_params_optimizer_state",
        "safe_get_full_fp32_param",
        "safe_get_full_optimizer_state",
        "safe_set_full_fp32_param",
        "safe_set_full_optimizer_state",
        "safe_set_local_fp32_param",
        "safe_set_local_optimizer_state",
        "set_z3_leaf_modules",
    ),
    "comm": ("init_distributed", "is_initialized"),
}
"""By `module` or `module:class`, without `deepspeed.` before it."""


PROGRAM = """\
import sys
from importlib import import_module
from operator import attrgetter

for row in sys.argv[1:]:
    owner, *names = row.split()
    module, _, inner = owner.partition(":")
    target = import_module(f"deepspeed.{module}")
    target = attrgetter(inner)(target) if inner else target
    for name in names:
        attrgetter(name)(target)
"""


@pytest.mark.skipif(not is_installed("deepspeed"), reason="needs deepspeed")
def test_all_names_exist():
    rows = [" ".join((owner, *names)) for owner, names in NAMES.items()]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-c", PROGRAM, *rows], env=environ, check=True)
