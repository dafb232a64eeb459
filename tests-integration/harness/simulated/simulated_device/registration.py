"""Register the simulated device with torch: its type, `torch.<type>`, and its collectives.

Variables, which `harness.simulated.environment` sets:
    SIMULATED_DEVICE: The type, such as "sim" or "npu".
    SIMULATED_DEVICES: How many devices a process sees, unless the type's variable (`VISIBLE`) lists fewer.
    SIMULATED_MEMORY: Bytes of each device.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from simulated_device import build

if TYPE_CHECKING:
    from types import ModuleType

BACKENDS = {"npu": "hccl", "mlu": "cncl", "musa": "mccl", "sdaa": "tccl", "neuron": "neuron"}
"""Collectives of vendors' devices, by type; those of other types are "simccl"."""

VISIBLE = {
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
    "sdaa": "SDAA_VISIBLE_DEVICES",
    "neuron": "NEURON_RT_VISIBLE_CORES",
}

library: Any = build.load()
NAME = os.environ["SIMULATED_DEVICE"]
BACKEND = BACKENDS.get(NAME, "simccl")


def register() -> None:
    """Make torch know the device. Once per process, before a tensor or a name of the type exists."""
    if not faulthandler.is_enabled():
        faulthandler.enable()  # host code that reads device memory crashes
    library.set_device_count(_device_count())
    library.configure(int(os.environ.get("SIMULATED_MEMORY", 1 << 30)), NAME.upper())
    torch.utils.rename_privateuse1_backend(NAME)
    from simulated_device import device  # it asks for the name

    torch._register_device_module(NAME, device)
    modules: dict[str, ModuleType] = {f"torch.{NAME}.amp": device.amp, f"torch.{NAME}.random": device.random}
    sys.modules.update(modules)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    if dist.is_available():
        dist.Backend.register_backend(BACKEND, _create_backend, extended_api=True, devices=[NAME])
    # A thread of autograd may still hold the graph of the last backward pass, and needs the GIL to drop it.
    # Until Python 3.14, one that asks for it while the interpreter ends is unwound through torch's frames,
    # and the process aborts, on every accelerator ("terminate called without an active exception").
    if sys.version_info < (3, 14):
        atexit.register(time.sleep, 0.05)


def _device_count() -> int:
    count = int(os.environ.get("SIMULATED_DEVICES", "2"))
    visible = os.environ.get(VISIBLE.get(NAME, f"{NAME.upper()}_VISIBLE_DEVICES"))
    if visible is None:
        return count
    return len([index for index in visible.split(",") if index.strip().isdigit() and int(index) < count])


def _create_backend(options: Any, _: Any) -> Any:
    gloo = dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timeout=options.timeout
    )
    return library.make_backend(gloo, options.group_rank, options.group_size, BACKEND)
