"""What a save in the background writes is, byte for byte, what a blocking one of the same step writes."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.accelerator_state import AcceleratorState, GradientState
from accel_train import Accelerator
from accel_train.checkpoint import files
from harness import distributed
from harness.engines import deepspeed_process

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

WIDTH = 130  # weights of more than 64 KiB, biases of less


class Net(nn.Module):
    """Large and small weights, a buffer, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.tp_plan = {"up": "colwise", "down": "rowwise"}
        self.scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x)))) * self.scale.sum().to(x.dtype)


class Average:
    """An average of weights, with a list that grows: what a user may register."""

    def __init__(self) -> None:
        self.weights = {"a": torch.ones(7), "b": torch.ones(40_000, dtype=torch.float64)}
        self.weights["view"] = self.weights["b"][10:20]
        self.history: list[Any] = [1, "two", self.weights["a"]]

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.history = state["weights"], state["history"]

    def change(self) -> None:
        for value in self.weights.values():
            value.fill_(9)
        self.history.append(3)
        self.weights["c"] = torch.zeros(1)


def arguments_of(strategy: str) -> dict[str, Any]:
    if strategy in {"single", "ddp"}:
        return {}
    if strategy == "tp":
        return {"parallelism_config": ParallelismConfig(tp_size=2)}
    if strategy.startswith("zero"):
        plugin = DeepSpeedPlugin(zero_stage=int(strategy[4]))
        return {"deepspeed_plugin": plugin, "mixed_precision": "bf16"}
    form = {"fsdp1": "FULL", "fsdp1-local": "LOCAL"}.get(strategy, "SHARDED")
    chosen = {"fsdp_version": int(strategy[4]), "state_dict_type": f"{form}_STATE_DICT"}
    chosen["cpu_offload"] = strategy.endswith("-offload")
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(**chosen)}


class Run:
    """A step of training; the count of steps is float32, and moments are bfloat16 where that can be."""

    def __init__(self, strategy: str, *, cpu: bool) -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=cpu, **arguments_of(strategy))
        torch.manual_seed(0)
        self.dtype = torch.float32 if strategy.startswith("zero") else torch.bfloat16
        model = Net().to(self.dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=strategy != "tp")
        data = torch.utils.data.DataLoader(torch.arange(16), batch_size=2, shuffle=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, data, schedule
        )
        self.average = Average()
        self.accelerator.register_for_checkpointing(self.average)
        self.train()

    def train(self) -> None:
        inputs = torch.ones(4, WIDTH, dtype=self.dtype, device=self.accelerator.device)
        loss = self.model(inputs).float().square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        self.accelerator.free_memory()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def tensor_files(folder: Path, complete: set[str]) -> list[Path]:
    """The files with tensors that are there, but for those of complete checkpoints."""
    found = [path.relative_to(folder) for path in folder.rglob("*")]
    return [
        path for path in found if path.suffix in {".bin", ".pt", ".pkl"} and path.parts[0] not in complete
    ]


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Compare trees of tensors and objects."""
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, where
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key, value in left.items():
            assert_same(value, right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{where}.{index}")
    elif hasattr(left, "__dict__"):
        assert_same(vars(left), vars(right), where)
    else:
        assert left == right, where


@contextmanager
def writing_waits() -> Generator[threading.Event]:
    """Within it, no file is begun before the event."""
    gate, original = threading.Event(), files.FileWriter.__init__

    def begin(self: Any, *args: Any, **options: Any) -> None:
        assert gate.wait(60)
        original(self, *args, **options)

    files.FileWriter.__init__ = begin  # type: ignore[method-assign]
    try:
        yield gate
    finally:
        gate.set()
        files.FileWriter.__init__ = original  # type: ignore[method-assign]


def check_equal(strategy: str, folder: Path, *, cpu: bool = True) -> None:
    """Save in the background while training goes on."""
    with ExitStack() as stack:
        if strategy.startswith("zero"):
            stack.enter_context(deepspeed_process())
        run = Run(strategy, cpu=cpu)
        run.accelerator.save_state(str(folder / "blocking"))
        for name in ("first", "second"):  # the second reuses the buffers of the first
            with writing_waits() as gate:
                saving = run.accelerator.save_state(str(folder / name), blocking=False)
                run.accelerator.wait_for_everyone()
                assert not tensor_files(folder, {"blocking", "first"} - {name})
                run.accelerator.wait_for_everyone()
                if name == "second":
                    run.train()
                    run.average.change()
                gate.set()
                saving.wait()
        run.accelerator.wait_for_everyone()
        expected = contents(folder / "blocking")
        for name in ("first", "second"):
            found = contents(folder / name)
            assert found.keys() == expected.keys()
            different = [key for key in expected if found[key] != expected[key]]
            assert not different, different
        run.close()


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_the_bytes_are_those_of_a_blocking_save_on_one_rank(tmp_path: Path) -> None:
    check_equal("single", tmp_path)
    assert torch.load(tmp_path / "first" / "optimizer.bin")["state"][0]["exp_avg"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    "strategy", ["ddp", "tp", "fsdp1", "fsdp2", "fsdp1-local", "zero1", "zero2", "zero3"]
)
@distributed(world_size=2)
def test_the_bytes_are_those_of_a_blocking_save(strategy: str, tmp_path: Path) -> None:
    check_equal(strategy, Path(tmp_path))


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@distributed(world_size=2)
def test_the_files_of_an_engine_are_what_it_would_write_itself(strategy: str, tmp_path: Path) -> None:
    folder = Path(tmp_path)
    with deepspeed_process():
        run = Run(strategy, cpu=True)
        run.model.save_checkpoint(str(folder / "direct"), tag="pytorch_model")
        run.accelerator.save_state(str(folder / "ours"), blocking=False).wait()
        run.accelerator.wait_for_everyone()
        names = [path.relative_to(folder / "direct") for path in (folder / "direct").rglob("*.pt")]
        assert names
        for name in names:
            direct, ours = (
                torch.load(folder / kind / name, weights_only=False) for kind in ("direct", "ours")
            )
            assert_same(ours, direct, str(name))
        run.close()
