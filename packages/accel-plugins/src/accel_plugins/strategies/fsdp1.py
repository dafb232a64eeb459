"""FSDP1: models in `torch.distributed.fsdp.FullyShardedDataParallel`."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.nn.utils import clip_grad_norm_

from accel_ops.modules import unwrap_once, without_compiler
from accel_plugins.dcp.full_state import ShardsPersister
from accel_plugins.dcp.local import LocalFiles
from accel_plugins.fsdp.fields import form_of
from accel_plugins.fsdp.loading import (
    ensure_weights_retied,
    get_parameters_from_modules,
    materialize_from_rank0,
)
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.fsdp.recompute import checkpoint_function
from accel_plugins.fsdp.roots import Fsdp1Shards, FsdpRoots, parameters_by_name, suppress_fsdp1_warnings
from accel_plugins.sharding.master_weights import upcast_flat_parameters, warn_about_master_weights
from accel_plugins.sharding.optimizers import ParamRemap
from accel_plugins.strategies.replicated import check_materialised, move_to_device
from accel_plugins.strategies.torch_step import TorchStepper
from accel_plugins.strategy import BatchSharding, Feature, Strategy
from accel_state import hang_monitor
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from accel_plugins.bundle import Bundle
    from accel_plugins.roles import PrecisionPolicy
    from accel_state.runtime import Runtime
    from accel_state.settings.model import Settings

_HYBRID = {ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2}  # pyright: ignore[reportPrivateUsage] - has no other name
unwrap_once.register(FullyShardedDataParallel, lambda model: model.module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp1Wrapper:
    """Model wrapper that puts models into `FullyShardedDataParallel`.

    `master_weights` names the mixed precision under which trained parameters are put into float32, if any.
    """

    runtime: Runtime
    plugin: FullyShardedDataParallelPlugin
    mesh: DeviceMesh
    roots: FsdpRoots
    book: ParamRemap
    master_weights: str | None = None

    def check(self, bundle: Bundle) -> None:
        """Refuse meta models, classes that a model lacks, and optimizers that have stepped or are foreign."""
        plugin = self.plugin
        if not plugin.cpu_ram_efficient_loading and plugin.param_init_fn is None:
            check_materialised(bundle)
        for model in bundle.models:
            copy.copy(plugin).set_auto_wrap_policy(without_compiler(model))
        models = [without_compiler(model) for model in bundle.models]
        self.book.check(bundle.optimizers, models)
        for optimizer in bundle.optimizers:
            if optimizer.state and not self.book.knows(optimizer):
                raise SettingsError(
                    f"{type(optimizer).__qualname__} has stepped before prepare(), and FSDP1 cannot shard "
                    "its state; prepare it first, or load the state afterwards. fsdp_version=2 can."
                )

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Wrap the models with trainable parameters; move the others to the device."""
        if evaluation:
            return replace(bundle, models=move_to_device(bundle, self.runtime.device))
        models = [
            model if isinstance(without_compiler(model), FullyShardedDataParallel) else self._wrapped(model)
            for model in bundle.models
        ]
        for optimizer in bundle.optimizers:
            self.book.switch(optimizer)
        return replace(bundle, models=models)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside."""
        return model.module if isinstance(model, FullyShardedDataParallel) else model

    def _wrapped(self, model: nn.Module) -> nn.Module:
        plugin, device = copy.copy(self.plugin), self.runtime.device
        plugin.set_auto_wrap_policy(model)
        before = [(one, name) for name, one in model.named_parameters(remove_duplicate=False)]
        if self.master_weights is not None and self.runtime.topology.is_main:
            warn_about_master_weights(model, self.master_weights)
        on_cpu = device.type == "cpu"
        sync = bool(plugin.sync_module_states)
        if on_cpu:  # FSDP1 sends values only between accelerators
            materialize_from_rank0(model, self.runtime, plugin, broadcast=sync)
        init = plugin.param_init_fn
        if (
            not on_cpu
            and init is None
            and plugin.cpu_ram_efficient_loading
            and not self.runtime.topology.is_main
        ):
            init = partial(_emptied, device=device)
        ignored = get_parameters_from_modules(plugin.ignored_modules, model, device)
        with hang_monitor.collective_scope("prepare"), suppress_fsdp1_warnings():
            root = FullyShardedDataParallel(
                model,
                sharding_strategy=plugin.sharding_strategy,  # pyright: ignore[reportArgumentType] - settled by the plugin
                cpu_offload=_offload(plugin, on_cpu=on_cpu),
                auto_wrap_policy=plugin.auto_wrap_policy,  # pyright: ignore[reportArgumentType] - settled above
                backward_prefetch=plugin.backward_prefetch,  # pyright: ignore[reportArgumentType] - settled by the plugin
                mixed_precision=plugin.mixed_precision_policy,  # pyright: ignore[reportArgumentType] - settled by the plugin
                ignored_states=ignored or None,
                param_init_fn=None if init is None or on_cpu else ensure_weights_retied(init, model, device),
                device_id=device,
                sync_module_states=sync and not on_cpu,
                forward_prefetch=bool(plugin.forward_prefetch),
                limit_all_gathers=plugin.limit_all_gathers,
                use_orig_params=bool(plugin.use_orig_params),
                device_mesh=self.mesh,
            )
        if self.master_weights is not None:
            upcast_flat_parameters(root)
        if plugin.activation_checkpointing or plugin.activation_checkpointing_offload:
            _checkpoint_blocks(root, plugin)
        self.roots.add(root)
        self.book.add(root, before, parameters_by_name(root, flat=not plugin.use_orig_params))
        return root


def build(
    settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
) -> Strategy:
    """Make the strategy."""
    del settings
    topology = runtime.topology
    plugin = handlers.get(FullyShardedDataParallelPlugin) or FullyShardedDataParallelPlugin(fsdp_version=1)
    plugin.set_mixed_precision(precision.name)
    roots = FsdpRoots()
    shards = Fsdp1Shards(roots=roots, form_now=partial(form_of, plugin))
    return Strategy(
        name="fsdp1",
        fsdp_version=1,
        wrapper=Fsdp1Wrapper(
            runtime=runtime,
            plugin=plugin,
            mesh=_mesh(plugin, runtime),
            roots=roots,
            book=ParamRemap(),
            master_weights=None if precision.name == "no" else precision.name,
        ),
        stepper=TorchStepper(
            precision=precision,
            no_sync_of=partial(_no_sync, roots),
            join_of=_refuse_join,
            around_backward=partial(hang_monitor.collective_scope, "backward"),
            clip_norm=partial(_clip_norm, roots),
        ),
        persister=ShardsPersister(shards=shards, device=runtime.device),
        shards=shards,
        native=LocalFiles(shards=shards, topology=topology),
        sharding=BatchSharding(num_shards=topology.world_size, shard_index=topology.rank),
        features=frozenset(
            {
                Feature.CLIP_GRAD_VALUE,
                Feature.ITEM_COUNTS,
                Feature.MODEL_WITHOUT_OPTIMIZER,
                Feature.MULTIPLE_MODELS,
                Feature.NO_SYNC,
            }
        ),
    )


def _mesh(plugin: FullyShardedDataParallelPlugin, runtime: Runtime) -> DeviceMesh:
    """Make the mesh of all ranks; under hybrid sharding with one row for each node."""
    topology, kind = runtime.topology, runtime.device.type
    if plugin.sharding_strategy in _HYBRID:
        local = topology.local_world_size
        return init_device_mesh(
            kind, (topology.world_size // local, local), mesh_dim_names=("dp_replicate", "dp_shard")
        )
    return init_device_mesh(kind, (topology.world_size,), mesh_dim_names=("dp_shard",))


def _offload(plugin: FullyShardedDataParallelPlugin, *, on_cpu: bool) -> CPUOffload | None:
    # On the CPU everything is there already, and FSDP1 would want to pin it, which needs a driver.
    return None if on_cpu or not isinstance(plugin.cpu_offload, CPUOffload) else plugin.cpu_offload


def _emptied(module: nn.Module, *, device: Any) -> None:
    module.to_empty(device=device, recurse=False)


def _checkpoint_blocks(root: FullyShardedDataParallel, plugin: FullyShardedDataParallelPlugin) -> None:
    blocks = {id(one.module) for one in FullyShardedDataParallel.fsdp_modules(root) if one is not root}
    recompute, offload = plugin.activation_checkpointing, plugin.activation_checkpointing_offload
    if not blocks:
        raise SettingsError(
            f"FullyShardedDataParallelPlugin(activation_checkpointing={recompute!r}, "
            f"activation_checkpointing_offload={offload!r}): no block of the model is wrapped on its own, so "
            "that there is nothing to compute again; choose an auto_wrap_policy."
        )

    def around(module: nn.Module) -> nn.Module:
        if recompute:
            module = checkpoint_wrapper(module, checkpoint_fn=checkpoint_function(module))
        return offload_wrapper(module) if offload else module

    apply_activation_checkpointing(
        root, checkpoint_wrapper_fn=around, check_fn=lambda module: id(module) in blocks
    )


def _no_sync(roots: FsdpRoots, model: nn.Module) -> Any:
    root = roots.of_model(model)
    return nullcontext() if root is None else root.no_sync()


def _refuse_join(*_: Any) -> NoReturn:
    raise UnsupportedError("FSDP1 cannot train on batches that run out earlier on some ranks.")


def _clip_norm(
    roots: FsdpRoots, parameters: Tensor | list[Tensor], max_norm: float, norm_type: float
) -> Tensor:
    """Clip the gradients of a model by the norm that FSDP1 computes, over all of its parameters."""
    clipped = parameters if isinstance(parameters, list) else [parameters]
    root = roots.of_parameters(clipped)
    if root is None:
        return clip_grad_norm_(clipped, max_norm, norm_type)
    absent = {id(one) for one in root.parameters() if one.requires_grad} - {id(one) for one in clipped}
    if absent:
        raise SettingsError(
            f"clip_grad_norm_() was given {len(clipped)} parameters, and {len(absent)} more of the same "
            "model are missing. FSDP1 computes the norm over all of them: pass model.parameters() of the "
            "prepared model."
        )
    with hang_monitor.collective_scope("clip_grad_norm_"):
        return root.clip_grad_norm_(max_norm, norm_type)
