"""What XLA devices do not support is refused in one sentence each; torch_xla is not needed for that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.kwargs import GradScalerKwargs, TorchDynamoPlugin
from accel_plugins.precision import build_precision
from accel_plugins.strategy import Strategy
from accel_plugins.xla import refuse_unsupported
from accel_state.errors import UnsupportedError
from accel_state.runtime import Runtime
from accel_state.settings.engines import DeepSpeedSettings, MegatronSettings, ParallelismSettings
from accel_state.settings.model import Settings

HOOKS = ("fp16", "bf16", "power_sgd", "batched_power_sgd")


def refuse(
    settings: Settings | None = None, precision: str = "no", *, debug: bool = False, **handlers: Any
) -> None:
    runtime = replace(Runtime(), debug=debug)
    policy = build_precision(precision, torch.device("cpu"), None, GradScalerKwargs(), shared=False)
    by_type = {type(handler): handler for handler in handlers.values()}
    refuse_unsupported(Strategy(settings or Settings(), runtime, policy, by_type))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"settings": Settings(deepspeed=DeepSpeedSettings())}, "DeepSpeed: "),
        ({"settings": Settings(megatron=MegatronSettings())}, "Megatron-LM: "),
        ({"settings": Settings(parallelism=ParallelismSettings())}, "a ParallelismConfig"),
        ({"precision": "fp16"}, "mixed_precision='fp16'"),
        ({"debug": True}, "debug mode"),
        *(({"ddp": DistributedDataParallelKwargs(comm_hook=hook)}, f"hook {hook!r}") for hook in HOOKS),
        *(
            ({"dynamo": TorchDynamoPlugin(backend=backend)}, "of torch.compile")
            for backend in ("inductor", "cudagraphs", "tensorrt")
        ),
    ],
)
def test_what_xla_devices_do_not_offer_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        refuse(**options)
    text = str(refused.value)
    assert text.startswith("XLA devices do not support ")
    assert named in text
    assert text.endswith("remove it, or pass cpu=True to compute on the CPU.")


@pytest.mark.parametrize("backend", ["no", "eager", "aot_eager", "openxla", "torchxla_trace_once"])
def test_what_xla_devices_offer_is_not_refused(backend: str) -> None:
    refuse(precision="bf16", dynamo=TorchDynamoPlugin(backend=backend), ddp=DistributedDataParallelKwargs())
    refuse(dynamo=TorchDynamoPlugin(backend="inductor", disable=True))
