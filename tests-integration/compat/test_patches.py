"""What libraries replace in `accelerate` takes effect under the alias, and ends with the replacement."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from harness.clients import run_client

PROGRAM = Path(__file__).parent / "programs" / "patches.py"


def replay(ranks: int, folder: Path) -> dict[str, Any]:
    """Run the cases of a number of ranks; return what each has seen."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = run_client(sys.executable, PROGRAM, ranks=ranks, on_accel=True, environ=environ, folder=folder)
    seen: dict[str, Any] = {}
    for line in output.splitlines():
        seen |= json.loads(line) if line.startswith("{") else {}
    return seen


ARGUMENTS = ["Sequential", "SGD", "StepLR", "DataLoader"]


def test_replacements_of_functions_and_methods_run_on_two_ranks(tmp_path: Path):
    seen = replay(2, tmp_path)
    assert seen["fsdp2_prepare_model"] == ["Accelerator", "wrapping"]
    assert seen["fsdp2_load_full_state_dict"] == [[["0.bias", "0.weight", "1.bias", "1.weight"], False]]
    prepared = ["FSDPSequential", "AcceleratedOptimizer", "AcceleratedScheduler", "DataLoaderShard"]
    assert seen["prepare_fsdp2"] == [ARGUMENTS, prepared]
    assert seen["prepare_cp"] == [["Sequential"]]
    assert seen["prepare_backend"] == [1, "NO", "gloo", "MULTI_CPU", 2]
    plain = ["MonitoredDDP", "AcceleratedOptimizer"]
    assert seen["distributed_type"] == [["Sequential", "AcceleratedOptimizer"], plain, plain]
    assert seen["parallelism_config"] == [["Accelerator", 2, True], ["dp_shard"], [[["dp_shard"], [2]]]]
    assert seen["distributed_data_parallel"] == ["Sequential"]
    assert seen["properties_of_parallelism_config"] == [
        True,
        ["dp_shard", "own", "own"],
        ["dp_shard", "own"],
        2,
        2,
        [2, 4],
        2,
        8,
        4,
    ]
    assert seen["cp_context"] == [["buffer_seq_dims", "buffers", "no_restore_buffers"]]
    assert seen["init_of_accelerator"] == [["cpu"]]
    assert seen["methods_of_accelerator"] == ["clipped", {"own": True}, "none", True]


OPTIONS_OF_LOADERS = [
    "data_seed",
    "dispatch_batches",
    "even_batches",
    "non_blocking",
    "num_processes",
    "process_index",
    "put_on_device",
    "rng_types",
    "slice_fn_for_dispatch",
    "split_batches",
    "torch_device_mesh",
    "use_seedable_sampler",
    "use_stateful_dataloader",
]
"""With which Accelerate calls `prepare_data_loader`, besides the loader and the device."""


def test_replacements_of_functions_and_methods_run_in_one_process(tmp_path: Path):
    seen = replay(1, tmp_path)
    assert seen["prepare_data_loader"] == [[2, OPTIONS_OF_LOADERS]]
    assert seen["is_bf16_available"] is True
    assert seen["is_wandb_available"] == [True, False]
    assert seen["to_kwargs"] == ["eager"]
    assert seen["clear_device_cache"] == [{"garbage_collection": True}]
    assert seen["attach_align_device_hook_on_blocks"] == ["Sequential"]
    assert seen["init_of_accelerator"] == [["cpu"]]
    assert seen["save_model_by_get_state_dict"] == [["0.weight"], 4]
    assert seen["convert_model_to_fp8_ao"] == [["Float8LinearConfig", None]]
    assert seen["methods_of_accelerator"] == ["clipped", {"own": True}, "none", True]
