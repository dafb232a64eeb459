"""The strategy `pipeline`: stages of a model on different ranks, combined with FSDP2 and all other axes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_ops.modules import model_has_dtensor, replace_forward, without_compiler
from accel_ops.tree import by_device, local_part
from accel_plugins.fsdp.blocks import fsdp2_prepare_auto_wrap_policy, modules_named
from accel_plugins.fsdp.fsdp2 import MeshStrategy, check_version, full_sharding
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin, form_of
from accel_plugins.parallelism.attention import text_config
from accel_plugins.parallelism.config import Axes, TorchPipelineParallelConfig, axes_of
from accel_plugins.pipeline.engine import Pipeline
from accel_plugins.pipeline.stages import lay_out
from accel_plugins.pipeline.state import ModelNames, PipelineStates
from accel_plugins.sharding.shards import gather_full_tensor, shard_like
from accel_plugins.sharding.state import StateForm
from accel_plugins.sharding.step import norm_of
from accel_plugins.strategy import PLAIN_FEATURES, Bundle, Feature, Optimizers, Parameters
from accel_state import hang_monitor
from accel_state.errors import SettingsError


class PipelineStrategy(MeshStrategy):
    """Cut models into stages in place, and record the names of tensors of other ranks."""

    name = "pipeline"
    owns_forward = calls_forward = True
    features = PLAIN_FEATURES - {
        Feature.CUSTOM_DEVICE_PLACEMENT,
        Feature.UNEVEN_INPUTS,
        Feature.ITEM_COUNTS,
        Feature.NO_SYNC,  # gradients are reduced at the end of each schedule
    }

    def setup(self) -> None:
        super().setup()
        runtime, handlers = self.runtime, self.handlers
        # 1. Check the options.
        axes = axes_of(runtime, handlers, sharded=False)
        if axes.pipeline is None or axes.config.pp_handler is None:
            raise SettingsError(
                "strategy='pipeline' was selected, but the pipeline-parallel size is 1: pass "
                "ParallelismConfig(pp_size=…) with 2 or more."
            )
        self.options, self.group = axes.config.pp_handler, axes.pipeline.get_group()
        # 2. Build the stages that shard and cut models.
        plugin = _plugin_of(axes, handlers)
        full = None if plugin is None else full_sharding(plugin, axes, runtime, self.precision)
        self.shard_over(axes, full)
        self.names: Any = weakref.WeakKeyDictionary()
        self.pipelines: weakref.WeakKeyDictionary[nn.Module, Pipeline] = weakref.WeakKeyDictionary()
        self.full = full
        # The ranks with the same stages and other batches.
        self.replicas_group = None if axes.losses is None else axes.losses.get_group()
        self.is_tensor_parallel = axes.tensor is not None
        self.stages = [stage for stage in self.stages if stage is not full]
        check = partial(_check, options=self.options, size=self.group.size(), is_sharded=full is not None)
        self.validators = [check, *self.validators]
        # 3. Set which ranks read which batches, and gather states from all stages.
        micro_batches = self.options.pp_num_microbatches or self.group.size()
        self.sharding = replace(axes.sharding, micro_batches=micro_batches)
        rank, per_stage = runtime.topology.rank, runtime.topology.world_size // self.group.size()
        form = (lambda: StateForm.FULL) if plugin is None else partial(form_of, plugin)
        self.states = PipelineStates(self, form)
        self.states.writer = rank - rank % per_stage  # the first rank of the stage

    def wrap(self, bundle: Bundle, *, evaluation: bool = False, **_: Any) -> Bundle:
        """Cut the models, and keep this rank's part of the optimizers."""
        cut = not evaluation or self.only_main_has_values
        fresh = [model for model in map(without_compiler, bundle.models) if not self.is_prepared(model)]
        for model in fresh if cut else ():
            self.names[model] = ModelNames.of(model, lay_out(model, self.options, self.group.size()))
        for optimizer in bundle.optimizers:
            for model, names in self.names.items():
                names.add_parameters(model)  # cutting, moving or casting a model replaces its parameters
                names.add_optimizer(optimizer, self.group)
        return super().wrap(bundle, evaluation=evaluation)

    def train_step(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        accumulation: int,
        sync: bool,
    ) -> Any:
        """Run the schedule."""
        del forward
        inside = without_compiler(model)
        output = self.pipelines[inside].train(args, kwargs, accumulation=accumulation)
        if sync:
            self._add_shared_gradients(inside)
        return output

    def clip_grad_norm(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2.0, *, optimizers: Optimizers = ()
    ) -> Tensor:
        """Clip gradients to a norm over all stages; parameters of several stages count once.

        Stages may have no gradients, or others' dtypes: all reduce a float64 on the device of the run.
        """
        tensors = self.unscale(parameters, optimizers)
        rank = dist.get_rank(self.group)
        repeated = {
            id(parameter)
            for model in self.pipelines
            for parameter, ranks in self._shared_parameters(model)
            if rank != ranks[0]
        }
        gradients = [p.grad for p in tensors if p.grad is not None]
        counted = [p.grad for p in tensors if p.grad is not None and id(p) not in repeated]
        is_max = norm_type == float("inf")
        with hang_monitor.collective_scope("clip_grad_norm_"):
            norm = norm_of(counted, float(norm_type)).to(self.runtime.device, torch.float64)
            power = norm if is_max else norm**norm_type
            dist.all_reduce(power, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=self.group)
        norm = power if is_max else power ** (1.0 / norm_type)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parts in by_device(gradients):
            torch._foreach_mul_(parts, factor.to(parts[0]))
        return norm

    def release(self) -> None:
        self.pipelines.clear()  # they refer to their models, which would keep their own entries alive
        super().release()

    def shard_in_place(self, model: nn.Module) -> None:
        """Cut a model, and keep this rank's stages, sharded or not; its forward then runs the pipeline."""
        super().shard_in_place(model)
        layout = lay_out(model, self.options, self.group.size())
        shard = None
        if self.full is not None:  # with the options that name modules resolved, which stages do not contain
            plugin = copy(self.full.plugin)
            plugin.ignored_modules = modules_named(plugin.ignored_modules, model)
            plugin.auto_wrap_policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
            shard = replace(self.full, plugin=plugin)
        pipeline = Pipeline(self, model, layout)
        if shard is not None:
            for stage in pipeline.stages:
                shard(stage)
        pipeline.watch()
        replace_forward(model, lambda _, __, *args, **kwargs: pipeline.evaluate(args, kwargs))
        self.pipelines[model] = pipeline
        # Make generation recompute all tokens: no stage has the caches of the others.
        if getattr(model, "generation_config", None) is not None:
            cast("Any", model).generation_config.use_cache = False

    def _shared_parameters(self, model: nn.Module) -> list[tuple[Tensor, Sequence[int]]]:
        """Return this rank's parameters that several stages have, in the same order on all of these ranks."""
        names, own = self.names[model], dict[str, Tensor]()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            own.setdefault(names.first.get(name, name), parameter)
        return [(own[name], ranks) for name, ranks in names.ranks.items() if len(ranks) > 1 and name in own]

    def _add_shared_gradients(self, model: nn.Module) -> None:
        """Sum gradients of parameters that several stages share, such as tied embeddings, on all of them."""
        me, device = dist.get_rank(self.group), self.runtime.device
        for parameter, ranks in self._shared_parameters(model):
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = parameter.grad
            if self.is_tensor_parallel:  # stages may have different shards
                own = gather_full_tensor(own, device)
            own = local_part(own).to(device).contiguous()  # it may be offloaded to the CPU
            parts = {rank: torch.empty_like(own) for rank in ranks if rank != me}
            operations = [
                operation
                for rank, part in parts.items()
                for operation in (
                    dist.P2POp(dist.isend, own, group=self.group, group_peer=rank),
                    dist.P2POp(dist.irecv, part, group=self.group, group_peer=rank),
                )
            ]
            with hang_monitor.collective_scope("gradients of shared parameters"):
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
            parts[me] = own
            total = torch.stack([parts[rank] for rank in ranks]).sum(0)  # in the same order on all ranks
            if self.is_tensor_parallel:
                parameter.grad = shard_like(total, parameter)
            else:
                local_part(parameter.grad).copy_(total)


def _plugin_of(axes: Axes, handlers: Mapping[type, Any]) -> FullyShardedDataParallelPlugin | None:
    """Return the options of the FSDP2 sharding of stages, if there are axes or a plugin for it."""
    plugin: FullyShardedDataParallelPlugin | None = handlers.get(FullyShardedDataParallelPlugin)
    if plugin is not None:
        check_version(plugin)
        return plugin
    sizes = axes.config.sizes
    is_sharded = sizes["dp_shard"] * sizes["cp"] * sizes["sp"] > 1 or axes.config.ep_enabled
    if not is_sharded and sizes["dp_replicate"] == 1:
        return None
    form = "SHARDED_STATE_DICT" if is_sharded else "FULL_STATE_DICT"
    return FullyShardedDataParallelPlugin(  # gathered once for all micro-batches
        fsdp_version=2, reshard_after_forward=False, state_dict_type=form
    )


def _check(model: nn.Module, *, options: TorchPipelineParallelConfig, size: int, is_sharded: bool) -> None:
    """Refuse models that cannot be cut."""
    kind = type(model).__name__
    if model_has_dtensor(model):
        raise SettingsError(
            f"{kind} is already sharded, and pp_size={size} would cut it. Remove one of the two."
        )
    if getattr(text_config(model), "output_router_logits", False):
        raise SettingsError(
            f"{kind} has output_router_logits=True in its config, for an auxiliary loss over the routing of "
            "all layers, and a stage has that of its own: set it to False, or use dp_shard_size and ep_size "
            "instead of pp_size."
        )
    layout = lay_out(model, options, size)
    if not is_sharded:
        return
    # FSDP2 shards each stage separately.
    covered = {id(p) for name in layout.names for p in model.get_submodule(name).parameters()}
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in covered]
    if outside:
        raise SettingsError(
            f"{kind}: the parameter {outside[0]!r} is in no module of a stage, so that FSDP2 "
            "cannot shard it with one: put it into a module, or leave out dp_shard_size and "
            "dp_replicate_size."
        )
    first: dict[int, tuple[int, int]] = {}  # the stage and the rank of each parameter
    for stage, ((start, end), rank) in enumerate(zip(layout.bounds, layout.ranks, strict=True)):
        for name in layout.names[start:end]:
            for leaf, parameter in model.get_submodule(name).named_parameters():
                known, owner = first.setdefault(id(parameter), (stage, rank))
                if known != stage and owner == rank:
                    raise SettingsError(
                        f"{kind}: {name}.{leaf} is tied to a parameter of another stage of "
                        "the same rank, and FSDP2 shards each stage by itself: choose another pp_schedule, "
                        "or leave out dp_shard_size and dp_replicate_size."
                    )
