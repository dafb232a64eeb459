"""An error that the user's code raises in a backward pass is the one that arrives, under every strategy."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.accelerator_state import AcceleratorState, GradientState
from accel_train import Accelerator
from harness import distributed
from harness.engines import deepspeed_process

if TYPE_CHECKING:
    from collections.abc import Callable


class QuotaError(RuntimeError):
    """An error of the user's."""


class Failing(torch.autograd.Function):
    """Raise in the backward pass what it was given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: Exception) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise ctx.error


ERRORS: tuple[Exception, ...] = (
    RuntimeError("HTTP request timed out while fetching tokenizer"),
    RuntimeError("Connection reset by peer, says the NCCL guide"),
    QuotaError("timed out"),
    TimeoutError("timed out"),
    KeyError("timed out"),
)
STRATEGIES: dict[str, Callable[[], dict[str, Any]]] = {
    "ddp": dict,
    "fsdp1": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)},
    "fsdp2": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
    "tp": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
    "zero2": lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=2)
def test_the_users_error_arrives_as_it_was_raised(strategy: str) -> None:
    with ExitStack() as stack:
        if strategy == "zero2":
            stack.enter_context(deepspeed_process())
        AcceleratorState._reset_state()
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True, **STRATEGIES[strategy]())
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model.tp_plan = {"0": "colwise", "1": "rowwise"}  # pyright: ignore[reportArgumentType]
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for error in ERRORS:
            loss = Failing.apply(model(torch.ones(2, 4, device=accelerator.device)), error).sum()  # pyright: ignore[reportOptionalMemberAccess]
            with pytest.raises(type(error)) as raised:
                accelerator.backward(loss)
            assert raised.value is error
        assert accelerator.gather(torch.ones(1)).tolist() == [1.0, 1.0]  # nobody has heard of a stall
        accelerator.free_memory()
