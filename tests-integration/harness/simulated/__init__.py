"""A simulated accelerator for tests: devices that are not the CPU, on machines that have none.

The device is a backend of torch on its key PrivateUse1, in C++ (`simulated_device/csrc`), which is compiled
once for a version of torch, in about a minute, and kept in the user's cache. Device memory is host memory
at a shifted address, so that host code which reads it crashes; operators run on the CPU, so that results
equal the CPU's to the last digit.

- It is called "sim", or as a vendor's device ("npu", "mlu", "musa", "sdaa", "neuron"), with that vendor's
  name of its collectives; not "xpu" and "hpu", which torch reserves.
- A process sees two devices of 1 GiB. Memory is counted as CUDA's, and `torch.OutOfMemoryError` raised.
- Tensors of two devices, or of a device and the CPU, do not mix, except as on a GPU.
- Copies between pinned memory and the device with `non_blocking=True` run late, only when something waits
  for them. Fresh memory holds NaN: who does not wait reads NaN, always.
- Reads and writes that no event, wait or synchronisation orders are reported as races, and so is memory
  which is freed without `record_stream` while another stream uses it (vector clocks, as in a race detector
  of threads: nothing depends on when an operator runs). A test on it fails if there was a race.
- Synchronisations of the host, copies and collectives are counted.

A test runs on it by an argument of `harness.distributed`, on one rank or several. Each rank has its own
device, and a process group for both the device and the CPU:

    from harness import distributed

    @distributed(world_size=2, device="npu")
    def test_reducing_waits_for_nothing():
        accelerator = Accelerator()
        value = torch.ones(3, device=accelerator.device)
        with torch.npu.counting() as counted:
            accelerator.reduce(value)
        assert not counted.synchronisations
        assert counted.collectives == {"allreduce": 1}

What only the device has is in `simulated_device/device.py`: `counting`, `capacity` and `pinned_capacity`
(limits, for a block), `late_copies`, `take_races`, `touched`. `torch.get_device_module(device)` returns the
module of any name.

A program, or pytest itself, runs on it by its environment:

    subprocess.run([sys.executable, "program.py"], env=environment("npu", devices=2, memory=1 << 20))

Every process that inherits the environment has the device once it imports torch: also the workers of `accel
launch`. Tests that do so call `require()` first: it skips them where no C++ compiler is, and compiles.

What is not simulated: speed; numerics of an accelerator; fused attention, recurrent layers (`nn.LSTM`),
sparse and quantised tensors, inductor, graphs, peer access; fragmentation; timeouts and deadlocks of NCCL.
Each process has memory of its own, so that two ranks of a group cannot share a device (as with NCCL).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.simulated.simulated_device import build

FOLDER = Path(__file__).resolve().parent


def require() -> None:
    """Skip the test where the device cannot be compiled; compile it where it is not yet."""
    reason = build.why_not()
    if reason is not None:
        pytest.skip(reason)
    build.build()


def environment(device: str, *, devices: int = 2, memory: int = 1 << 30) -> dict[str, str]:
    """The environment of a program that sees the simulated device.

    Args:
        device: The type, such as "sim" or "npu".
        devices: How many devices a process sees.
        memory: Bytes of each.
    """
    path = [str(FOLDER), str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "SIMULATED_DEVICE": device,
        "SIMULATED_DEVICES": str(devices),
        "SIMULATED_MEMORY": str(memory),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
