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
    "runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": ("scaled_global_norm",),
    "runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": ("_get_norm_groups",),
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
    "accelerator": ("get_accelerator",),
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


FLAT = """\
import torch
from accel_plugins.deepspeed.library import plain_masters
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

first, second = (torch.nn.Linear(3, 2, dtype=torch.bfloat16) for _ in range(2))
first.bias.requires_grad = False
groups = [[*first.parameters()], [*second.parameters()]]
inner = torch.optim.AdamW([{"params": group} for group in groups])
outer = FP16_Optimizer(inner, low_precision_dtype=torch.bfloat16)
pairs = [*plain_masters(outer, groups)]
assert [id(small) for small, _ in pairs] == [id(p) for p in (first.weight, second.weight, second.bias)]
for number, (small, master) in enumerate(pairs):
    assert master.shape == small.shape
    master.fill_(number)
flat = [value for group in inner.param_groups for value in group["params"][0].tolist()]
assert flat == [0.0] * 6 + [1.0] * 6 + [2.0] * 2
"""


@pytest.mark.skipif(not is_installed("deepspeed"), reason="needs deepspeed")
def test_master_weights_of_a_fused_optimizer_are_parts_of_its_flat_tensor():
    subprocess.run([sys.executable, "-c", FLAT], env={**os.environ, "DS_ACCELERATOR": "cpu"}, check=True)
