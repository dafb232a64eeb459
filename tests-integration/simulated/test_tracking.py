"""Values on a device are logged without waiting for it, as they were, in order, at every end of a program."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from accel_state.errors import UnsupportedError
from accel_trackers.general import GeneralTracker
from accel_trackers.session import TrackerSession
from harness import cases, distributed, simulated


class Memory(GeneralTracker):
    name = "memory"
    requires_logging_directory = False

    def __init__(self) -> None:
        self.tracker: list[tuple[dict[str, Any], int | None]] = []
        super().__init__()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.tracker.append((values, step))


def started() -> tuple[TrackerSession, list[tuple[dict[str, Any], int | None]]]:
    memory = Memory()
    session = TrackerSession(memory)
    session.start("project")
    return session, memory.tracker


@distributed(world_size=1, device="npu")
def test_values_are_those_of_the_time_of_the_call_and_arrive_in_order() -> None:
    session, logged = started()
    loss = torch.zeros((), device="npu")
    expected, value = [], 0.0
    with torch.get_device_module("npu").counting() as counted:
        for step in range(5):
            loss += 1.5
            session.log({"loss": loss, "nested": {"twice": loss * 2}, "lr": 0.1}, step=step)
            loss *= 2
    assert not counted.synchronisations
    for step in range(5):
        value += 1.5
        expected.append(({"loss": value, "nested": {"twice": value * 2}, "lr": 0.1}, step))
        value *= 2
    session.write()
    assert logged == expected


@distributed(world_size=1, device="npu")
def test_plain_values_wait_for_their_turn_and_the_end_writes_everything() -> None:
    session, logged = started()
    session.log({"loss": torch.ones((), device="npu") * 3}, step=7)
    session.log({"note": "in its turn"}, step=8)
    session.finish()
    assert logged == [({"loss": 3.0}, 7), ({"note": "in its turn"}, 8)]


@distributed(world_size=1, device="npu")
def test_vectors_and_every_dtype_are_copied_as_they_were() -> None:
    session, logged = started()
    dtypes = (torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float64)
    vector = torch.arange(6.0, device="npu").reshape(2, 3)
    session.log({"inner": {"columns": vector.T, "none": vector[:0]}, "one": vector[1, 2]}, step=1)
    session.log({str(dtype): torch.ones((1, 1), dtype=dtype, device="npu") for dtype in dtypes})
    vector.zero_()
    session.finish()
    (values, step), (ones, _) = logged
    assert values["inner"]["columns"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert (values["inner"]["none"].shape, values["one"], step) == ((0, 3), 5.0, 1)
    assert ones == {str(dtype): 1 for dtype in dtypes}


@distributed(world_size=1, device="npu")
def test_where_no_more_memory_can_be_pinned_values_are_logged_all_the_same() -> None:
    session, logged = started()
    with torch.get_device_module("npu").pinned_capacity(0):
        session.log({"loss": torch.ones((), device="npu"), "vector": torch.ones(1000, device="npu")})
    session.finish()
    ((values, _),) = logged
    assert (values["loss"], values["vector"].tolist()) == (1.0, [1.0] * 1000)


@distributed(world_size=2, device="npu")
def test_a_dtensor_is_logged_where_it_is_complete_and_refused_by_name_elsewhere() -> None:
    """In plain FSDP2 the norm of gradients is a DTensor, a part of it on each rank."""
    session, logged = started()
    mesh = DeviceMesh("npu", [0, 1])
    full = distribute_tensor(torch.arange(4.0, device="npu"), mesh, [Replicate()])
    session.log({"full": full, "norm": full.sum()}, step=1)
    session.write()
    assert [(values["full"].tolist(), values["norm"]) for values, _ in logged] == (
        [([0.0, 1.0, 2.0, 3.0], 6.0)] if dist.get_rank() == 0 else []
    )
    if dist.get_rank() == 0:
        for placement in (Shard(0), Partial()):
            part = DTensor.from_local(torch.ones(2, device="npu"), mesh, [placement], run_check=False)
            with pytest.raises(
                UnsupportedError, match=r"'grad_norm', a DTensor .* pass its `full_tensor\(\)`"
            ):
                session.log({"grad_norm": part})
    session.finish()


PROGRAM = """\
import json, os, signal, sys
import torch
from accel_train import Accelerator
from accel_trackers.general import GeneralTracker

class Lines(GeneralTracker):
    name, requires_logging_directory = "lines", False

    def __init__(self):
        self.tracker = open("lines.jsonl", "w")
        super().__init__()

    def log(self, values, step=None, **kwargs):
        print(json.dumps([step, values]), file=self.tracker)

    def flush(self):
        self.tracker.flush()

accelerator = Accelerator(log_with=Lines())
accelerator.init_trackers("run")
for step in range(3):
    accelerator.log({"loss": torch.ones((), device=accelerator.device) * step}, step=step)
END
"""
ENDS = {
    "exception": ("raise ArithmeticError('the loss is not finite')", 1),
    "sigterm_that_exits": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); os.kill(os.getpid(), signal.SIGTERM)",
        128 + signal.SIGTERM,
    ),
    "sys_exit": ("sys.exit(3)", 3),
    "end_training": ("accelerator.end_training()", 0),
    "save_state": ("accelerator.save_state('here', flush=False); os._exit(0)", 0),
}


@pytest.mark.parametrize("name", cases(ENDS, always={"end_training"}))
def test_what_waited_for_the_device_is_written_however_the_program_ends(tmp_path: Path, name: str) -> None:
    simulated.require()
    code, expected = ENDS[name]
    program = [sys.executable, "-c", PROGRAM.replace("END", code)]
    done = subprocess.run(
        program, cwd=tmp_path, env=simulated.environment("npu"), capture_output=True, text=True, check=False
    )
    assert done.returncode == expected, done.stderr
    written = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert written == [[step, {"loss": float(step)}] for step in range(3)]
