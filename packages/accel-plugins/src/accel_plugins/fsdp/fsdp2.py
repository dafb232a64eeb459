"""The strategy FSDP2: shard models by `fully_shard`, alone or with tensor, context, sequence parallelism."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)

from accel_plugins.fsdp.blocks import (
    blocks,
    checkpoint_activations,
    compute_in_float32,
    fsdp2_prepare_auto_wrap_policy,
    has_te_modules,
    modules_by_pattern,
    modules_named,
    recomputed,
)
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin, form_of
from accel_plugins.parallelism.config import Axes, axes_of
from accel_plugins.parallelism.context import ContextParallel
from accel_plugins.parallelism.experts import ExpertParallel, experts_of
from accel_plugins.parallelism.sequence import Ulysses
from accel_plugins.parallelism.tensor import TensorParallel
from accel_plugins.sharding.quantised import check_quantised
from accel_plugins.sharding.shards import ShardedStates
from accel_plugins.sharding.wrap import ShardedStrategy, dtype_to_train, hook_of
from accel_plugins.strategy import PrecisionPolicy
from accel_state import hang_monitor
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.frozen import frozen
from accel_state.libraries import is_torch_version
from accel_state.runtime import Runtime
from accel_state.torch_private import DefaultAllGather

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class MeshStrategy(ShardedStrategy):
    """Shards models over the axes of the run's mesh."""

    def shard_over(self, axes: Axes, full: FullSharding | None) -> None:
        """Shard layers, experts and sequences over their axes, and parameters by FSDP2 if `full`."""
        experts, tensor = None if full is None else full.experts, None
        if axes.tensor is not None:
            tensor = TensorParallel(mesh=axes.tensor, ignores_experts=experts is not None)
        context = self.ulysses = None
        if axes.context is not None and axes.config.cp_handler is not None:
            # torch has a ring for the fused kernels of CUDA, and `parallelism.context` for the CPU's.
            if axes.context.device_type not in {"cuda", "cpu"}:
                raise UnsupportedError(
                    f"ParallelismConfig(cp_size={axes.context.size()}): PyTorch has no ring of fused "
                    f"attention for {axes.context.device_type!r} devices. Use sp_size instead."
                )
            rotation = axes.config.cp_handler.cp_comm_strategy or "allgather"
            context = ContextParallel(mesh=axes.context, rotation=rotation)
        if axes.sequence is not None:
            axes.config.use_torch_sequences()
            in_stages = axes.config.pp_enabled
            self.ulysses = Ulysses(axes.sequence, axes.config.sizes["tp"], in_stages=in_stages)
            self.shard_sequences = self.ulysses.shard
        self.split_sequences, self.mesh = context, axes.mesh
        self.sequences = [stage for stage in (context, self.ulysses) if stage is not None]
        stages = [stage for stage in (tensor, experts, full) if stage is not None]
        self.stages, self.validators = stages, [stage.validate for stage in (*stages, *self.sequences)]
        if full is not None:
            if isinstance(full.plugin.cpu_offload, CPUOffloadPolicy):
                self.parameters_on = torch.device("cpu")
            self.master_weights = None if self.precision.name == "no" else self.precision.name
            self.only_main_has_values = bool(full.plugin.cpu_ram_efficient_loading)

    def prepare_sequences(self, model: nn.Module) -> None:
        for sequences in self.sequences:
            sequences.prepare(model)

    def release(self) -> None:
        if self.ulysses is not None:
            self.ulysses.release()


class Fsdp2Strategy(MeshStrategy):
    """Shard models by FSDP2, and over the axes of the run."""

    name = "fsdp2"
    keeps_sharded = True
    fsdp_version = 2

    def setup(self) -> None:
        super().setup()
        runtime, handlers = self.runtime, self.handlers
        plugin = handlers.get(FullyShardedDataParallelPlugin) or FullyShardedDataParallelPlugin(
            fsdp_version=2
        )
        check_version(plugin)
        sharded = FullyShardedDataParallelPlugin in handlers
        axes = axes_of(runtime, handlers, sharded=sharded, fully_shard=True)
        self.shard_over(axes, full_sharding(plugin, axes, runtime, self.precision))
        self.shards_quantised = len(self.stages) == 1  # neither layers nor experts are cut
        self.may_be_loaded_later = True
        self.sharding, self.states = axes.sharding, ShardedStates(runtime.device, partial(form_of, plugin))


def check_version(plugin: FullyShardedDataParallelPlugin) -> None:
    """Refuse a plugin of FSDP1."""
    if plugin.version != 2:
        raise SettingsError(
            f"FullyShardedDataParallelPlugin(fsdp_version={plugin.version}) with a ParallelismConfig or "
            "replica groups: they go with fsdp_version=2 only."
        )


def full_sharding(
    plugin: FullyShardedDataParallelPlugin, axes: Axes, runtime: Runtime, precision: PrecisionPolicy
) -> FullSharding:
    """Return the FSDP2 sharding of a plugin over the axes of a mesh."""
    plugin.set_mixed_precision(precision.name)
    mesh, experts_mesh = axes.fully_sharded(runtime), axes.experts(runtime)
    experts = None
    if experts_mesh is not None:
        experts = ExpertParallel(mesh=experts_mesh, num_batches=mesh.size(), tensor=axes.tensor)
    return FullSharding(plugin=plugin, mesh=mesh, master_weights=precision.name != "no", experts=experts)


@frozen
class FullSharding:
    """Shard models over a mesh, with a shard axis after any replicate axis, by FSDP2.

    `master_weights`: whether trained parameters will be cast to float32; `experts` shards experts over their
    own mesh.
    """

    plugin: FullyShardedDataParallelPlugin
    mesh: DeviceMesh
    master_weights: bool = False
    experts: ExpertParallel | None = None

    def __call__(self, model: nn.Module) -> None:
        """Shard a model in place."""
        # 1. Find the blocks, and let them recompute or offload activations.
        plugin = self.plugin
        ignored = modules_named(plugin.ignored_modules, model)
        policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
        experts = [] if self.experts is None else [*experts_of(model).values()]
        separate = {id(module) for part in (*ignored, *experts) for module in part.modules()}
        units = blocks(model, policy, separate)
        inner = units[:-1]
        if plugin.activation_checkpointing and not inner and has_te_modules(model):
            raise SettingsError(
                "FullyShardedDataParallelPlugin(activation_checkpointing=True): no block of "
                f"{type(model).__name__} is wrapped on its own, and layers of TransformerEngine are "
                "recomputed within its autocast, around the whole model; choose an auto_wrap_policy."
            )
        if plugin.activation_checkpointing or plugin.activation_checkpointing_offload:
            for module in recomputed(model, plugin, inner or units):
                checkpoint_activations(
                    module,
                    recompute=bool(plugin.activation_checkpointing),
                    offload=bool(plugin.activation_checkpointing_offload),
                )
        # 2. Shard the experts, the blocks, and then the root.
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
            "offload_policy": plugin.cpu_offload,
        }
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy) and self.mesh.device_type == "cpu":
            options["offload_policy"] = replace(plugin.cpu_offload, pin_memory=False)
        if ignored:
            options["ignored_params"] = {parameter for part in ignored for parameter in part.parameters()}
        reshard = cast("bool | int", plugin.reshard_after_forward)
        norms: list[nn.Module] = []  # their weights must have the dtype of their statistics
        if options["mp_policy"].param_dtype is not None:
            known = {id(module) for part in ignored for module in part.modules()} | {*map(id, units)}
            norms = [
                part
                for part in model.modules()
                if _has_statistics(part) and cast("Any", part).affine and id(part) not in known
            ]
        named = modules_by_pattern(plugin.float32_modules or (), model).values()
        precise = {id(module): module for modules in named for module in modules}.values()
        if precise:
            kept = {id(parameter) for module in precise for parameter in module.parameters()}
            options["mp_policy"] = replace(
                options["mp_policy"],
                param_dtype_override_fn=lambda parameter: parameter.dtype if id(parameter) in kept else None,
            )
        for module in precise:
            compute_in_float32(module)
        if self.experts is not None:
            self.experts.fully_shard(model, reshard, **options)
        for unit in (*norms, *inner):
            fully_shard(unit, reshard_after_forward=reshard, **options | _precision(unit, options))
        # By default torch keeps the root's parameters gathered, since the backward pass begins with them.
        root_reshard = {} if inner and reshard is True else {"reshard_after_forward": reshard}
        fully_shard(model, **root_reshard, **options | _precision(model, options))
        # 3. Monitor collectives, refuse copies, and prefetch.
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_custom_all_gather(MonitoredAllGather())
        for unit in units:
            cast("Any", type(unit)).__deepcopy__ = _refuse_copy
        if plugin.forward_prefetch:
            sharded = [cast("Any", module) for module in model.modules() if isinstance(module, FSDPModule)]
            for unit, following in itertools.pairwise(sharded):
                unit.set_modules_to_forward_prefetch([following])

    def validate(self, model: nn.Module) -> None:
        """Check that torch can shard a model, and that the trained parameters of a block have one dtype."""
        policy = cast("MixedPrecisionPolicy | None", self.plugin.mixed_precision_policy)
        check_quantised(model, None if policy is None else policy.param_dtype)
        modules = modules_named(self.plugin.ignored_modules, model)
        unsharded = {id(module) for part in modules for module in part.modules()}
        for name, module in (experts_of(model) if self.experts is not None else {}).items():
            if id(module) in unsharded:
                raise SettingsError(
                    f"{type(model).__name__}: the experts in {name!r} are sharded (ep_size), but belong "
                    "to ignored_modules. Remove the module from ignored_modules."
                )
        ignored = {id(parameter) for part in modules for parameter in part.parameters()}
        for name, parameter in model.named_parameters():
            if id(parameter) in ignored:
                continue
            if parameter.numel() == 0 or parameter.dim() == 0:
                raise SettingsError(
                    f"{type(model).__name__}: the parameter {name!r} of shape {tuple(parameter.shape)} has "
                    "no dim or no elements to shard. Give it the shape (1,), or add its module to "
                    "ignored_modules."
                )
            if hook_of(parameter) == "register_hook":
                raise SettingsError(
                    f"{type(model).__name__}: the parameter {name!r} has a hook (register_hook), which FSDP2 "
                    "would never call. Use register_post_accumulate_grad_hook, which gets this rank's shard "
                    "with the reduced gradient, or change the gradients between backward() and step()."
                )
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._check_float32(model, names, None if policy is None else policy.param_dtype)
        seen = {*ignored}
        for unit in blocks(model, fsdp2_prepare_auto_wrap_policy(self.plugin, model), unsharded):
            first: dict[torch.dtype, str] = {}
            for parameter in unit.parameters():
                if parameter.requires_grad and id(parameter) not in seen:
                    dtype = dtype_to_train(parameter) if self.master_weights else parameter.dtype
                    first.setdefault(dtype, names[id(parameter)])
            seen |= {id(parameter) for parameter in unit.parameters()}
            if len(first) > 1:
                listed = ", ".join(f"{name!r} in {dtype}" for dtype, name in first.items())
                raise SettingsError(
                    f"{type(model).__name__} has trained parameters of several dtypes in one block: "
                    f"{listed}. FSDP2 shards a block in one dtype. Cast them to one dtype, freeze the "
                    "others, or give them separate blocks with auto_wrap_policy."
                )

    def _check_float32(
        self, model: nn.Module, names: dict[int, str], param_dtype: torch.dtype | None
    ) -> None:
        """Check that the modules to compute in float32 exist, and that their weights will be in float32."""
        wanted = self.plugin.float32_modules
        where = f"FullyShardedDataParallelPlugin(float32_modules={wanted!r})"
        if not wanted:
            return
        if is_torch_version("<", "2.15"):
            raise UnsupportedError(
                f"{where}: it needs torch 2.15 or newer, and {torch.__version__} is installed."
            )
        if param_dtype is None:
            raise SettingsError(
                f"{where} has no effect, since the model computes in its own dtype. Set mixed_precision, or "
                "remove it."
            )
        for pattern, modules in modules_by_pattern(wanted, model).items():
            if not modules:
                raise SettingsError(
                    f"{where}: {type(model).__name__} has no module whose class or full name is {pattern!r}. "
                    "model.named_modules() lists the names."
                )
            for parameter in (parameter for module in modules for parameter in module.parameters()):
                dtype = dtype_to_train(parameter) if self.master_weights else parameter.dtype
                if parameter.is_floating_point() and dtype is not torch.float32:
                    raise SettingsError(
                        f"{where}: the parameter {names[id(parameter)]!r} is in {dtype}, and stays so. Load "
                        "it in float32."
                    )


def _has_statistics(module: nn.Module) -> bool:
    """Return whether a module is a norm with running statistics, whose dtype its weights must have."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None


def _precision(unit: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Return the precision policy of a unit, if it differs from the model's."""
    policy = options["mp_policy"]
    return {"mp_policy": replace(policy, param_dtype=None)} if _has_statistics(unit) else {}


class MonitoredAllGather(DefaultAllGather):
    """FSDP2's all-gather of parameters, monitored as a collective, including in the forward pass."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with hang_monitor.collective_scope("all_gather of parameters"):
            return super().__call__(*args, **kwargs)


def _refuse_copy(model: nn.Module, _: Any) -> NoReturn:
    raise UnsupportedError(
        f"{type(model).__name__} is sharded by FSDP2 and cannot be copied. Make the copy, or the "
        "torch.optim.swa_utils.AveragedModel, before prepare(), and pass both to prepare()."
    )
