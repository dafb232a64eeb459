"""XLA devices: one process, or one per host, whose models the compiler shards over all devices (SPMD)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.tree import recursively_apply
from accel_ops.weights.tensors import tensor_memory
from accel_plugins.dcp.protocol import StateForm
from accel_plugins.dcp.tensors import TensorShards
from accel_plugins.fsdp.autowrap import blocks, fsdp2_prepare_auto_wrap_policy
from accel_plugins.fsdp.fields import form_of
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.strategies.replicated import ReplicatedPersister, check_materialised
from accel_plugins.strategies.torch_step import TorchStepper
from accel_plugins.strategies.xla import move_to_xla
from accel_plugins.strategy import PLAIN_FEATURES, BatchSharding, Strategy
from accel_plugins.xla.checkpoints import SpmdAllocator, SpmdPlanners
from accel_plugins.xla.spmd import (
    BatchSharder,
    checkpoint_blocks,
    quiet_backward,
    shard_model,
    shard_optimizer,
    start_mesh,
)
from accel_plugins.xla.support import SPMD_PLUGIN, refuse_unsupported
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from accel_plugins.bundle import Bundle
    from accel_plugins.roles import PrecisionPolicy, StateDict
    from accel_state.runtime import Runtime
    from accel_state.settings.model import Settings

# What fields of the plugin say that is not done on XLA devices.
_UNSUPPORTED = ("mixed_precision_policy", "ignored_modules", "param_init_fn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedXlaWrapper:
    """Model wrapper that moves models to the devices of a mesh, sharded."""

    device: torch.device
    plugin: FullyShardedDataParallelPlugin
    mesh: Any

    def check(self, bundle: Bundle) -> None:
        """Refuse models on the meta device, and blocks to recompute where there are none."""
        check_materialised(bundle)
        for model in bundle.models:
            if self._recomputes and len(self._blocks(model)) == 1:
                raise SettingsError(
                    f"xla_fsdp_grad_ckpt=True recomputes the activations of blocks, and auto_wrap_policy="
                    f"{self.plugin.auto_wrap_policy!r} selects none of {type(model).__name__}: select some."
                )

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Move the models to the devices and shard them; a model that is evaluated is sharded, too.

        Those that stay elsewhere, as the caller wants it, are left alone.
        """
        del evaluation
        models = move_to_xla(bundle, self.device)
        for model in models:
            if any(parameter.device.type != self.device.type for parameter in model.parameters()):
                continue
            chosen = self._blocks(model)
            shard_model(model, chosen, self.mesh)
            if self._recomputes:
                checkpoint_blocks(chosen[:-1])
        for optimizer in bundle.optimizers:
            shard_optimizer(optimizer, self.mesh)
        return replace(bundle, models=models)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model."""
        return model

    @property
    def _recomputes(self) -> bool:
        return bool(self.plugin.xla_fsdp_grad_ckpt or self.plugin.activation_checkpointing)

    def _blocks(self, model: nn.Module) -> list[nn.Module]:
        return blocks(model, fsdp2_prepare_auto_wrap_policy(self.plugin, model), set())


class CompilerShardedPersister(ReplicatedPersister):
    """Persister of models that the compiler shards: full states are copied to the CPU."""

    def full_state_dict(self, model: nn.Module, *, keep: bool = True) -> StateDict:
        """Copy the state dict of the model to the CPU; tied tensors share memory."""
        state = ReplicatedPersister.full_state_dict(self, model)
        copies = {name: value for part in _iter_copies(state) for name, value in part.items()}
        return {name: copies[name] for name in state} if keep else {}

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        """Copy the state dict to the CPU tensor by tensor; tied names come together."""
        state = ReplicatedPersister.full_state_dict(self, model)
        return (part if keep else {} for part in _iter_copies(state))

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        """Copy the state dict of the optimizer to the CPU."""
        del models
        state = recursively_apply(torch.Tensor.cpu, optimizer.state_dict())
        return state if keep else {}


def _iter_copies(state: StateDict) -> Iterator[StateDict]:
    """Copy tensors to the CPU one by one; names of the same memory get one copy."""
    names: dict[Any, list[str]] = {}
    for name, value in state.items():
        key = tensor_memory(value) if isinstance(value, torch.Tensor) else id(value)
        names.setdefault(key, []).append(name)
    for group in names.values():
        value = state[group[0]]
        yield dict.fromkeys(group, value.detach().cpu() if isinstance(value, torch.Tensor) else value)


def build(
    settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
) -> Strategy:
    """Make the strategy of a run that is sharded over XLA devices."""
    plugin: FullyShardedDataParallelPlugin = handlers[FullyShardedDataParallelPlugin]
    own, topology = runtime.kind.own_runtime, runtime.topology
    if own is None:
        raise UnsupportedError(
            f"FullyShardedDataParallelPlugin(xla=True) shards over XLA devices, and this process computes on "
            f"{str(runtime.device)!r}: leave xla out, or install accel-suite[xla]."
        )
    refuse_unsupported(settings, runtime, precision, handlers)
    _check_plugin(plugin)
    mesh = start_mesh()
    return Strategy(
        name="xla_fsdp",
        wrapper=ShardedXlaWrapper(device=runtime.device, plugin=plugin, mesh=mesh),
        stepper=TorchStepper(precision=precision, around_backward=quiet_backward),
        persister=CompilerShardedPersister(),
        sharding=BatchSharding(num_shards=topology.world_size, shard_index=topology.rank),
        features=PLAIN_FEATURES,
        shards=TensorShards(form_now=partial(form_of, plugin), allocator_like=SpmdAllocator(mesh)),
        planners=SpmdPlanners(),
        shard_sequences=BatchSharder(mesh, runtime.device, topology.world_size),
        after_micro_batch=own.flush,
        after_step=own.flush,
    )


def _check_plugin(plugin: FullyShardedDataParallelPlugin) -> None:
    """Refuse what the compiler does not do."""
    if not (plugin.xla and plugin.xla_fsdp_v2):
        raise UnsupportedError(
            f"FullyShardedDataParallelPlugin(xla={plugin.xla!r}, xla_fsdp_v2={plugin.xla_fsdp_v2!r}): on XLA "
            f"devices the compiler shards models; write {SPMD_PLUGIN}."
        )
    asked = [name for name in _UNSUPPORTED if getattr(plugin, name) is not None]
    asked += ["cpu_offload"] * bool(getattr(plugin.cpu_offload, "offload_params", False))
    if form_of(plugin) is StateForm.NATIVE:
        asked.append("state_dict_type='LOCAL_STATE_DICT'")
    if asked:
        raise UnsupportedError(
            f"{SPMD_PLUGIN} does not go with {', '.join(asked)}: leave it out. mixed_precision='bf16' of "
            "Accelerator computes in bfloat16."
        )
