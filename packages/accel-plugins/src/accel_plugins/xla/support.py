"""What XLA devices do not offer, refused when an `Accelerator` is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_plugins.kwargs.ddp import DistributedDataParallelKwargs
from accel_plugins.kwargs.dynamo import TorchDynamoPlugin
from accel_state.errors import UnsupportedError
from accel_state.labels import DDPCommunicationHookType, DynamoBackend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_plugins.roles import PrecisionPolicy
    from accel_state.runtime import Runtime
    from accel_state.settings.model import Settings

_COMPILERS = {
    DynamoBackend.NO,
    DynamoBackend.EAGER,
    DynamoBackend.AOT_EAGER,
    DynamoBackend.TORCHXLA_TRACE_ONCE,
    DynamoBackend.AOT_TORCHXLA_TRACE_ONCE,
}
SPMD_PLUGIN = "FullyShardedDataParallelPlugin(xla=True, xla_fsdp_v2=True)"
"""The plugin with which the compiler shards models, for messages."""


def refuse_unsupported(
    settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
) -> None:
    """Refuse what a run on XLA devices asks for and cannot have."""
    options = handlers.get(DistributedDataParallelKwargs)
    hook = DDPCommunicationHookType.NO if options is None else options.comm_hook
    dynamo: TorchDynamoPlugin | None = handlers.get(TorchDynamoPlugin)
    compiler = DynamoBackend.NO if dynamo is None or dynamo.disable else DynamoBackend(dynamo.backend)
    found: dict[str, bool] = {
        "DeepSpeed": settings.deepspeed is not None,
        "Megatron-LM": settings.megatron is not None,
        f"a ParallelismConfig (models are sharded with {SPMD_PLUGIN})": settings.parallelism is not None,
        "mixed_precision='fp16', whose loss scaler waits for the device in every step (use 'bf16')": (
            precision.scaler is not None
        ),
        f"the communication hook {hook.value!r} of DistributedDataParallel": (
            hook is not DDPCommunicationHookType.NO
        ),
        f"the compiler {compiler.value.lower()!r} of torch.compile (use 'openxla')": compiler
        not in _COMPILERS,
        "debug mode (ACCELERATE_DEBUG_MODE), whose comparisons would execute every collective alone": (
            runtime.debug
        ),
    }
    for what, asked in found.items():
        if asked:
            raise UnsupportedError(
                f"XLA devices do not offer {what}: leave it out, or pass cpu=True to compute on the CPU."
            )
