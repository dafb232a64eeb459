"""Strategies for XLA devices: replicas, and models that the compiler shards (SPMD).

Sharding follows `torch_xla.experimental.spmd_fully_sharded_data_parallel`, without a wrapper module around
each block: names in state dicts are unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType

from accel_ops import broadcast
from accel_ops.modules import replaced_attributes
from accel_ops.tree import recursively_apply, walk
from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.fsdp.blocks import blocks, fsdp2_prepare_auto_wrap_policy
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.full_parameters import FullParameters
from accel_plugins.kwargs import TorchDynamoPlugin
from accel_plugins.sharding.shards import ShardedStates
from accel_plugins.sharding.state import StateAllocator, StateForm
from accel_plugins.strategy import PLAIN_FEATURES, Bundle, Feature, Strategy
from accel_plugins.unsharded import States, check_materialised, move_to_device
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.labels import DDPCommunicationHookType, DynamoBackend
from accel_state.runtime import Runtime
from accel_state.xla_devices import library, start

if TYPE_CHECKING:
    from torch.optim import Optimizer


class XlaStrategy(Strategy):
    """Replicate models on XLA devices, and average their gradients."""

    name = "xla"

    def setup(self) -> None:
        refuse_unsupported(self)
        runtime = self.runtime
        world_size, own = runtime.topology.world_size, runtime.kind.own_runtime
        if world_size > 1 and not own.is_replicated():
            raise UnsupportedError(
                f"PJRT runs {world_size} processes, each of which drives all devices of its host: let "
                f"the compiler shard over them, with {SPMD_PLUGIN}, or start one for every device, with "
                "`accel launch --tpu`."
            )
        own.start(spmd=False)
        # The models whose gradients are averaged, in the same order on all ranks.
        self._models: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self._is_local = world_size == 1
        self.features = PLAIN_FEATURES - {Feature.OFFLOADED_STATES, Feature.STEP_GUARD}
        if world_size > 1:
            self.features -= {Feature.UNEVEN_INPUTS}
        self.after_micro_batch = self.after_step = own.flush

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Move the models to the device, with the values of rank 0 on all ranks."""
        models = move_to_xla(bundle, self.runtime.device)
        for model in () if evaluation or self.runtime.topology.world_size == 1 else models:
            broadcast([*model.parameters(), *model.buffers()])
            self._models[model] = None
        return replace(bundle, models=models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        del model
        return replaced_attributes(self, {"_is_local": True})

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        """Average the gradients after the pass; the average of an average is the same."""
        super().backward(loss, accumulation=accumulation, sync=sync, **kwargs)
        parameters = dict.fromkeys(parameter for model in self._models for parameter in model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients and not self._is_local:
            scale = 1.0 / self.runtime.topology.world_size
            xla_module("core.xla_model").all_reduce("sum", gradients, scale=scale)


AXIS = "fsdp"
"""The axis of the mesh over which parameters and batches are sharded."""


def move_to_xla(bundle: Bundle, device: torch.device) -> list[nn.Module]:
    """Move models to the device, as `move_to_device` does; parameters stay the same objects."""
    future = torch.__future__  # `Module.to` otherwise replaces parameters on XLA devices
    before = future.get_swap_module_params_on_conversion()
    future.set_swap_module_params_on_conversion(True)
    try:
        return move_to_device(bundle, device)
    finally:
        future.set_swap_module_params_on_conversion(before)


_COMPILERS = {
    DynamoBackend.NO,
    DynamoBackend.EAGER,
    DynamoBackend.AOT_EAGER,
    DynamoBackend.TORCHXLA_TRACE_ONCE,
    DynamoBackend.AOT_TORCHXLA_TRACE_ONCE,
}

SPMD_PLUGIN = "FullyShardedDataParallelPlugin(xla=True, xla_fsdp_v2=True)"
"""The plugin with which the compiler shards models, for messages."""


def refuse_unsupported(strategy: Strategy) -> None:
    """Refuse settings and handlers that XLA devices do not support."""
    settings, handlers = strategy.settings, strategy.handlers
    options = handlers.get(DistributedDataParallelKwargs)
    hook = DDPCommunicationHookType.NO if options is None else options.comm_hook
    dynamo: TorchDynamoPlugin | None = handlers.get(TorchDynamoPlugin)
    compiler = DynamoBackend.NO if dynamo is None or dynamo.disable else DynamoBackend(dynamo.backend)
    requested: dict[str, bool] = {
        "DeepSpeed": settings.deepspeed is not None,
        "Megatron-LM": settings.megatron is not None,
        f"a ParallelismConfig (models are sharded with {SPMD_PLUGIN})": settings.parallelism is not None,
        "mixed_precision='fp16', whose loss scaler waits for the device in every step (use 'bf16')": (
            strategy.precision.scaler is not None
        ),
        f"the communication hook {hook.value!r} of DistributedDataParallel": (
            hook is not DDPCommunicationHookType.NO
        ),
        f"the compiler {compiler.value.lower()!r} of torch.compile (use 'openxla')": compiler
        not in _COMPILERS,
        "debug mode (ACCELERATE_DEBUG_MODE), whose comparisons would execute the recorded operations": (
            strategy.runtime.debug
        ),
    }
    for what, is_requested in requested.items():
        if is_requested:
            raise UnsupportedError(
                f"XLA devices do not support {what}: remove it, or pass cpu=True to compute on the CPU."
            )


class SpmdStrategy(Strategy):
    """Move models to the devices of a mesh, over which the compiler shards them."""

    name = "xla_fsdp"

    def setup(self) -> None:
        runtime = self.runtime
        # 1. Refuse unsupported settings and handlers.
        plugin: FullyShardedDataParallelPlugin = self.handlers[FullyShardedDataParallelPlugin]
        own = runtime.kind.own_runtime
        if own is None:
            raise UnsupportedError(
                "FullyShardedDataParallelPlugin(xla=True) shards over XLA devices, but this process "
                f"computes on {str(runtime.device)!r}: remove xla, or install accel-suite[xla]."
            )
        refuse_unsupported(self)
        if not (plugin.xla and plugin.xla_fsdp_v2):
            raise UnsupportedError(
                f"FullyShardedDataParallelPlugin(xla={plugin.xla!r}, xla_fsdp_v2={plugin.xla_fsdp_v2!r}): "
                f"on XLA devices the compiler shards models. Use {SPMD_PLUGIN}."
            )
        names = ("mixed_precision_policy", "ignored_modules", "param_init_fn", "float32_modules")
        unsupported = [name for name in names if getattr(plugin, name) is not None]
        if plugin.state_dict_type is not StateDictType.FULL_STATE_DICT:
            unsupported.append(f"state_dict_type={plugin.state_dict_type!r}")
        unsupported += ["cpu_offload"] * bool(getattr(plugin.cpu_offload, "offload_params", False))
        if unsupported:
            raise UnsupportedError(
                f"{SPMD_PLUGIN} cannot be combined with {', '.join(unsupported)}: remove it. "
                "mixed_precision='bf16' of Accelerator computes in bfloat16."
            )
        # 2. Have the compiler shard: over the caller's mesh if set, else over all devices.
        start(spmd=True)
        spmd = xla_module("distributed.spmd")
        mesh = spmd.get_global_mesh()
        if mesh is None or AXIS not in mesh.axis_names:
            count = xla_module("runtime").global_runtime_device_count()
            mesh = spmd.Mesh([*range(count)], (count, 1), (AXIS, "model"))
            spmd.set_global_mesh(mesh)
        self._plugin, self._xla_mesh = plugin, mesh
        self._recomputes = bool(plugin.xla_fsdp_grad_ckpt or plugin.activation_checkpointing)
        self.states = SpmdStates(runtime.device, lambda: StateForm.FULL)
        self.shard_sequences = partial(recursively_apply, partial(_move_sharded, mesh, runtime))
        self.after_micro_batch = self.after_step = own.flush

    def check(self, bundle: Bundle) -> None:
        """Reject models on the meta device, and activation checkpointing without blocks."""
        check_materialised(bundle)
        for model in bundle.models:
            if self._recomputes and len(self._blocks(model)) == 1:
                raise SettingsError(
                    f"xla_fsdp_grad_ckpt=True recomputes the activations of blocks, and auto_wrap_policy="
                    f"{self._plugin.auto_wrap_policy!r} selects none of {type(model).__name__}: select some."
                )

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Move the models to the devices and shard them; a model that is evaluated is sharded, too.

        Models that the caller keeps on another device are unchanged.
        """
        del evaluation
        models = move_to_xla(bundle, self.runtime.device)
        for model in models:
            if any(parameter.device.type != self.runtime.device.type for parameter in model.parameters()):
                continue
            units = self._blocks(model)
            shard_model(model, units, self._xla_mesh)
            if self._recomputes:
                for block in units[:-1]:
                    xla_module("distributed.fsdp").checkpoint_module(block)
        for optimizer in bundle.optimizers:
            # The state is sharded like the parameters whenever it is loaded or created.
            shard_state = partial(_shard_state, self._xla_mesh)
            optimizer.register_load_state_dict_post_hook(shard_state)
            optimizer.register_step_post_hook(shard_state)
            shard_state(optimizer)
        return replace(bundle, models=models)

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        with warnings.catch_warnings():  # of barriers whose inputs need no gradient
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            super().backward(loss, accumulation=accumulation, sync=sync, **kwargs)

    def _blocks(self, model: nn.Module) -> list[nn.Module]:
        return blocks(model, fsdp2_prepare_auto_wrap_policy(self._plugin, model), set())


def shard_model(model: nn.Module, blocks: Sequence[nn.Module], mesh: Any) -> None:
    """Shard in place the parameters of a model on the device, and the outputs of its blocks.

    Outputs of blocks, the model included, are sharded along the batch, which makes the compiler gather
    parameters block by block.
    """
    spmd = xla_module("distributed.spmd")

    def shard_parameters(model: nn.Module, _: Any = None) -> None:
        for parameter in model.parameters():
            shard(parameter, mesh)

    shard_parameters(model)
    model.register_load_state_dict_post_hook(shard_parameters)

    def shard_output(module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        for _, leaf in walk(output):
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                spmd.mark_sharding(leaf, mesh, first_dim(leaf))

    for block in blocks:
        block.register_forward_hook(shard_output)
        if block is not model:
            spmd.xla_sharding.apply_backward_optimization_barrier(block)


def _shard_state(mesh: Any, optimizer: Optimizer, *_: Any) -> None:
    for parameter, values in optimizer.state.items():
        for value in values.values():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and not value.is_cpu:
                shard(value, mesh)


def shard(tensor: Tensor, mesh: Any) -> None:
    """Shard a tensor along its largest dimension, unless it is sharded or has none."""
    dims = range(tensor.dim())
    if dims and not library()._XLAC._get_xla_sharding_spec(tensor):
        largest = max(dims, key=lambda dim: tensor.shape[dim])
        partition = tuple(AXIS if dim == largest else None for dim in dims)
        xla_module("distributed.spmd").mark_sharding(tensor, mesh, partition)


def first_dim(tensor: Tensor) -> tuple[str | None, ...]:
    """Return the partition of a batch, or of activations: the first dimension is sharded."""
    return (AXIS, *(None for _ in tensor.shape[1:]))


def _move_sharded(mesh: Any, runtime: Runtime, tensor: Tensor) -> Tensor:
    """Move a tensor of a batch to the devices, sharded along its first dimension."""
    if not tensor.dim() or tensor.device.type != "cpu":
        return tensor.to(runtime.device)
    spec = xla_module("distributed.spmd").ShardingSpec(
        mesh, first_dim(tensor), minibatch=runtime.topology.world_size > 1
    )
    return xla_module("core.xla_model").send_cpu_data_to_device([tensor], runtime.device, spec)[0]


class SpmdStates(ShardedStates):
    """States of models that the compiler shards: full states are copied to the CPU."""

    sources = States.sources
    load_full_state_dict = States.load_full_state_dict
    load_full_optimizer_state = States.load_full_optimizer_state

    def iter_full_parameters(self, model: nn.Module, request: FullParameters) -> Iterator[tuple[str, Tensor]]:
        """Copy the parameters to the CPU one by one."""
        parameters = States.iter_full_parameters(self, model, request)
        return ((name, parameter.cpu() if request.values else parameter) for name, parameter in parameters)

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        """Return an allocator of full tensors on the CPU."""
        del optimizer, models
        return lambda *entry: torch.empty(entry[2], dtype=entry[3], device="cpu")


def xla_module(name: str) -> Any:
    """Import a submodule of torch_xla."""
    library()
    return import_module(f"torch_xla.{name}")
