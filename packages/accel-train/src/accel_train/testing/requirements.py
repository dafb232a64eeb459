"""Skip tests if a device or library is missing: decorators of `unittest` test functions and classes.

They are imported as `accelerate.test_utils`. Tests marked `slow` run if the variable `RUN_SLOW` is true.
"""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from accel_state import libraries
from accel_state.device_kinds import available_kind
from accel_state.devices import (
    check_cuda_fp8_capability,
    is_cuda_available,
    is_fp16_available,
    is_habana_gaudi1,
    is_hpu_available,
    is_mlu_available,
    is_mps_available,
    is_musa_available,
    is_neuron_available,
    is_npu_available,
    is_sdaa_available,
    is_torch_xla_available,
    is_transformer_engine_mxfp8_available,
    is_xpu_available,
)
from accel_state.environ import parse_flag_from_env


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return the device type of this host, its number of devices, and a function for allocated memory.

    Example:
        >>> device_type, count, allocated = get_backend()
        >>> count >= 1, allocated() >= 0
        (True, True)
    """
    kind = available_kind()
    count = getattr(kind.module, "device_count", None)
    allocated = getattr(kind.module, "memory_allocated", None)
    if kind.type == "mps":
        allocated = torch.mps.current_allocated_memory
    return kind.type, count() if count is not None else 1, allocated or _none_allocated


def _none_allocated() -> int:
    return 0


torch_device, device_count, memory_allocated_func = get_backend()
_run_slow_tests = parse_flag_from_env("RUN_SLOW", default=False)


def _has_several(device_type: str) -> bool:
    return torch_device == device_type and device_count > 1


def _has_one(device_type: str) -> bool:
    return torch_device == device_type and device_count == 1


def skip(test_case: Any) -> Any:
    """Skip a test."""
    return unittest.skip("Test was skipped")(test_case)


def slow(test_case: Any) -> Any:
    """Skip a test unless the environment variable `RUN_SLOW` is true."""
    return unittest.skipUnless(_run_slow_tests, "test is slow")(test_case)


def run_first(test_case: Any) -> Any:
    """Mark a test to run first, for pytest with its plugin pytest-order."""
    pytest = sys.modules.get("pytest")
    return test_case if pytest is None else pytest.mark.order(1)(test_case)


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skip a test where torch is older than a version; without a test, return the decorator."""
    if test_case is None:
        return partial(require_torch_min_version, version=version)
    is_enough = version is not None and libraries.is_torch_version(">=", version)
    return unittest.skipUnless(is_enough, f"test requires torch version >= {version}")(test_case)


def require_huggingface_suite(test_case: Any) -> Any:
    """Skip a test where transformers or datasets is not installed."""
    has_both = libraries.is_transformers_available() and libraries.is_datasets_available()
    return unittest.skipUnless(has_both, "test requires the Hugging Face suite")(test_case)


def _require(condition: Callable[[], bool], reason: str) -> Callable[[Any], Any]:
    """Return a decorator that skips a test, with a reason, unless a condition holds."""

    def require(test_case: Any) -> Any:
        """Skip a test if the requirement in the decorator's name is not met."""
        return unittest.skipUnless(condition(), reason)(test_case)

    return require


require_cpu = _require(lambda: torch_device == "cpu", "test requires only a CPU")
require_non_cpu = _require(lambda: torch_device != "cpu", "test requires a GPU")
require_cuda = _require(lambda: is_cuda_available() and not is_torch_xla_available(), "test requires a GPU")
require_cuda_or_hpu = _require(
    lambda: is_cuda_available() or is_hpu_available(), "test requires a GPU or HPU"
)
require_cuda_or_xpu = _require(
    lambda: is_cuda_available() or is_xpu_available(), "test requires a CUDA GPU or XPU"
)
require_xpu = _require(is_xpu_available, "test requires a XPU")
require_non_xpu = _require(lambda: torch_device != "xpu", "test requires a non-XPU")
require_hpu = _require(is_hpu_available, "test requires a HPU")
require_non_hpu = _require(lambda: torch_device != "hpu", "test requires a non-HPU")
require_npu = _require(is_npu_available, "test require a NPU")
require_mlu = _require(is_mlu_available, "test require a MLU")
require_sdaa = _require(is_sdaa_available, "test require a SDAA")
require_musa = _require(is_musa_available, "test require a MUSA")
require_neuron = _require(is_neuron_available, "test require Neuron Cores")
require_mps = _require(is_mps_available, "test requires a `mps` backend support in `torch`")
require_tpu = _require(partial(is_torch_xla_available, check_is_tpu=True), "test requires TPU")
require_non_torch_xla = _require(
    lambda: not is_torch_xla_available(), "test requires an env without TorchXLA"
)
require_single_device = _require(
    lambda: torch_device != "cpu" and device_count == 1, "test requires a single device accelerator"
)
require_single_gpu = _require(partial(_has_one, "cuda"), "test requires a GPU")
require_single_xpu = _require(partial(_has_one, "xpu"), "test requires a XPU")
require_multi_device = _require(lambda: device_count > 1, "test requires multiple hardware accelerators")
require_multi_gpu = _require(partial(_has_several, "cuda"), "test requires multiple GPUs")
require_multi_xpu = _require(partial(_has_several, "xpu"), "test requires multiple XPUs")
require_multi_gpu_or_xpu = _require(
    lambda: _has_several("cuda") or _has_several("xpu"), "test requires multiple GPUs or XPUs"
)
require_fp16 = _require(is_fp16_available, "test requires FP16 support")
require_fp8 = _require(
    lambda: (
        libraries.is_fp8_available()
        and (not is_cuda_available() or check_cuda_fp8_capability())
        and not is_habana_gaudi1()
    ),
    "test requires FP8 support",
)
require_fsdp2 = _require(
    partial(libraries.is_torch_version, ">=", "2.6.0"), "test requires FSDP2 (torch >= 2.6.0)"
)
require_tp = _require(
    lambda: (
        libraries.is_torch_version(">=", libraries.BETA_TP_AVAILABLE_PYTORCH_VERSION)
        and libraries.is_transformers_available()
        and libraries.compare_versions("transformers", ">=", libraries.BETA_TP_AVAILABLE_TRANSFORMERS_VERSION)
    ),
    "test requires tensor parallelism of torch and transformers",
)
require_bnb = _require(libraries.is_bnb_available, "test requires the bitsandbytes library")
require_deepspeed = _require(libraries.is_deepspeed_available, "test requires DeepSpeed")
require_transformer_engine = _require(
    libraries.is_transformer_engine_available, "test requires transformers engine"
)
require_transformer_engine_mxfp8 = _require(
    is_transformer_engine_mxfp8_available, "test requires transformers engine MXFP8 block scaling"
)
require_torchao = _require(libraries.is_torchao_available, "test requires torchao")
require_pippy = _require(libraries.is_pippy_available, "test requires pippy")
require_peft = _require(libraries.is_peft_available, "test requires PEFT")
require_transformers = _require(libraries.is_transformers_available, "test requires the transformers library")
require_datasets = _require(libraries.is_datasets_available, "test requires the datasets library")
require_timm = _require(libraries.is_timm_available, "test requires the timm library")
require_torchvision = _require(libraries.is_torchvision_available, "test requires the torchvision library")
require_torchdata_stateful_dataloader = _require(
    libraries.is_torchdata_stateful_dataloader_available, "test requires torchdata.stateful_dataloader"
)
require_schedulefree = _require(libraries.is_schedulefree_available, "test requires the schedulefree library")
require_triton = _require(libraries.is_triton_available, "test requires triton")
require_pandas = _require(libraries.is_pandas_available, "test requires pandas")
require_matplotlib = _require(libraries.is_matplotlib_available, "test requires matplotlib")
require_import_timer = _require(libraries.is_import_timer_available, "test requires tuna interpreter")
require_wandb = _require(libraries.is_wandb_available, "test requires wandb")
require_comet_ml = _require(libraries.is_comet_ml_available, "test requires comet_ml")
require_aim = _require(libraries.is_aim_available, "test requires aim")
require_clearml = _require(libraries.is_clearml_available, "test requires clearml")
require_dvclive = _require(libraries.is_dvclive_available, "test requires dvclive")
require_mlflow = _require(libraries.is_mlflow_available, "test requires mlflow")
require_swanlab = _require(libraries.is_swanlab_available, "test requires swanlab")
require_tensorboard = _require(libraries.is_tensorboard_available, "test requires Tensorboard")
require_trackio = _require(libraries.is_trackio_available, "test requires trackio")


_atleast_one_tracker_available = any(
    question() for question in (libraries.is_wandb_available, libraries.is_tensorboard_available)
)
require_trackers = _require(
    lambda: _atleast_one_tracker_available and not libraries.is_comet_ml_available(),
    "test requires at least one tracker to be available and for `comet_ml` to not be installed",
)
