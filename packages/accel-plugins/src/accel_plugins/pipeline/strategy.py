"""The strategy `pipeline`: stages of a model on different ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from accel_ops.modules import model_has_dtensor, replace_forward, without_compiler
from accel_ops.tree import by_device
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import TorchPipelineParallelConfig, axes_of
from accel_plugins.pipeline.engine import Pipeline
from accel_plugins.pipeline.stages import lay_out
from accel_plugins.pipeline.state import ModelNames, PipelinePersister
from accel_plugins.sharding.step import norm_of, sharded_stepper
from accel_plugins.sharding.wrap import ParamRemap
from accel_plugins.strategy import PLAIN_FEATURES, Bundle, Feature, PrecisionPolicy, Strategy
from accel_plugins.unsharded import check_materialised, move_to_device
from accel_state import hang_monitor
from accel_state.errors import SettingsError
from accel_state.frozen import frozen
from accel_state.runtime import Runtime
from accel_state.settings.model import Settings
from accel_state.torch_private import foreach_mul_


def build(
    settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
) -> Strategy:
    """Make the strategy of a run with pipelines."""
    del settings
    axes = axes_of(runtime, handlers, sharded=False)
    if axes.pipeline is None or axes.config.pp_handler is None:
        raise SettingsError(
            "strategy='pipeline' was selected, and the pipeline-parallel size is 1: pass "
            "ParallelismConfig(pp_size=…) with 2 or more."
        )
    options, group = axes.config.pp_handler, axes.pipeline.get_group()
    plugin = handlers.get(FullyShardedDataParallelPlugin)
    if plugin is not None:
        raise SettingsError(
            f"{plugin!r} cannot be combined with pp_size={group.size()}: leave the plugin out."
        )
    models: PreparedPipelines = weakref.WeakKeyDictionary()
    names: Any = weakref.WeakKeyDictionary()
    stepper = replace(
        sharded_stepper(precision, "pipeline"), clip_norm=partial(clip_over_stages, models, group)
    )
    return Strategy(
        name="pipeline",
        fsdp_version=None,
        wrapper=PipelineWrapper(
            runtime=runtime,
            precision=precision,
            options=options,
            group=group,
            models=models,
            names=names,
        ),
        stepper=stepper,
        persister=PipelinePersister(models=names, group=group, device=runtime.device),
        sharding=replace(axes.sharding, micro_batches=options.pp_num_microbatches or group.size()),
        features=PLAIN_FEATURES
        - {Feature.CUSTOM_DEVICE_PLACEMENT, Feature.UNEVEN_INPUTS, Feature.ITEM_COUNTS},
        mesh=axes.mesh,
        train_step=partial(train_step, models),
    )


PreparedPipelines = weakref.WeakKeyDictionary[nn.Module, "PreparedPipeline"]


@frozen
class PreparedPipeline:
    """A pipeline, and the names of parameters that several stages have, with the ranks that have them."""

    pipeline: Pipeline
    shared: Sequence[tuple[Sequence[str], Sequence[int]]]
    model: Callable[[], nn.Module | None]

    def shared_parameters(self) -> list[tuple[Tensor, Sequence[int]]]:
        """Return the shared parameters of this rank, in the order of all ranks."""
        model = self.model()
        own = {} if model is None else dict(model.named_parameters(remove_duplicate=False))
        return [
            (next(own[name] for name in names if name in own), ranks)
            for names, ranks in self.shared
            if any(name in own for name in names)
        ]


def train_step(
    models: PreparedPipelines,
    model: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    accumulation: int,
    sync: bool,
) -> Any:
    """Run the schedule; see `accel_plugins.strategy.TrainStep`."""
    del forward
    prepared = models[without_compiler(model)]
    output = prepared.pipeline.train(args, kwargs, accumulation=accumulation)
    if sync:
        add_shared_gradients(prepared)
    return output


def add_shared_gradients(prepared: PreparedPipeline) -> None:
    """Add the gradients of parameters that several stages have, such as tied embeddings, on all of them."""
    pipeline = prepared.pipeline
    for parameter, ranks in prepared.shared_parameters():
        if not parameter.requires_grad or len(ranks) < 2:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        own = parameter.grad
        parts = {rank: torch.empty_like(own) for rank in ranks if rank != pipeline.rank}
        operations = [
            operation
            for rank, part in parts.items()
            for operation in (
                dist.P2POp(dist.isend, own.contiguous(), group=pipeline.group, group_peer=rank),
                dist.P2POp(dist.irecv, part, group=pipeline.group, group_peer=rank),
            )
        ]
        with hang_monitor.collective_scope("gradients of shared parameters"):
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        parts[pipeline.rank] = own.clone()
        own.copy_(torch.stack([parts[rank] for rank in ranks]).sum(0))  # in one order on all ranks


def clip_over_stages(
    models: PreparedPipelines,
    group: dist.ProcessGroup,
    parameters: Tensor | Sequence[Tensor],
    max_norm: float,
    norm_type: float,
) -> Tensor:
    """Clip gradients to a norm over all stages; what several stages have counts once."""
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
    rank = dist.get_rank(group)
    repeated = {
        id(parameter)
        for prepared in models.values()
        for parameter, ranks in prepared.shared_parameters()
        if rank != ranks[0]
    }
    gradients = [p.grad for p in tensors if p.grad is not None]
    counted = [p.grad for p in tensors if p.grad is not None and id(p) not in repeated]
    is_max = norm_type == float("inf")
    device = gradients[0].device if gradients else torch.device("cpu")
    with hang_monitor.collective_scope("clip_grad_norm_"):
        norm = norm_of(counted, float(norm_type)).to(device)
        power = norm if is_max else norm**norm_type
        dist.all_reduce(power, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
    norm = power if is_max else power ** (1.0 / norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parts in by_device(gradients):
        foreach_mul_(parts, factor.to(parts[0].device))
    return norm


@frozen
class PipelineWrapper:
    """Model wrapper that keeps this rank's stages of a model in place, and their parameters in optimizers."""

    runtime: Runtime
    precision: PrecisionPolicy
    options: TorchPipelineParallelConfig
    group: dist.ProcessGroup
    models: PreparedPipelines
    names: Any
    gone: Any = field(default_factory=WeakIdKeyDictionary)

    def check(self, bundle: Bundle) -> None:
        """Refuse models that cannot be cut."""
        fresh = [model for model in map(without_compiler, bundle.models) if model not in self.models]
        check_materialised(replace(bundle, models=fresh))
        for model in fresh:
            if model_has_dtensor(model):
                raise SettingsError(
                    f"{type(model).__name__} is sharded already, and pp_size={self.group.size()} would cut "
                    "it: leave one of the two out."
                )
            lay_out(model, self.options, self.group.size())
        gone = nn.ParameterList(self.gone.keys())
        ParamRemap().check(bundle.optimizers, (gone, *self.models, *map(without_compiler, bundle.models)))

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Cut the models, and keep this rank's part of the optimizers."""
        if evaluation:
            return replace(bundle, models=move_to_device(bundle, self.runtime.device))
        for model in map(without_compiler, bundle.models):
            if model not in self.models:
                self._cut(model)
        for optimizer in bundle.optimizers:
            for model, names in self.names.items():
                names.add_optimizer(optimizer, model, self.gone, self.group)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in self.gone:
                        optimizer.state.pop(parameter, None)
                group["params"][:] = [p for p in group["params"] if p not in self.gone]
        return bundle

    def unwrap(self, model: nn.Module) -> nn.Module:
        return without_compiler(model)

    def _cut(self, model: nn.Module) -> None:
        # 1. Note the names of the whole model.
        layout = lay_out(model, self.options, self.group.size())
        self.names[model] = names = ModelNames.of(model, layout)
        named = [*model.named_parameters(remove_duplicate=False)]  # tied parameters have several names
        before = {p: name for name, p in reversed(named)}
        tensors = [*before, *dict.fromkeys(model.buffers())]
        # 2. Cut the model, whose forward runs the pipeline from now on.
        pipeline = Pipeline(model, layout, self.options, self.group, self.runtime.device, self.precision)
        replace_forward(model, lambda _: lambda _, *args, **kwargs: pipeline.evaluate(args, kwargs))
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._share_values(tensors, own)
        self.gone.update((p, (names, name)) for p, name in before.items() if id(p) not in own)
        shared = names.shared(dist.get_rank(self.group))
        self.models[model] = PreparedPipeline(pipeline=pipeline, shared=[*shared], model=weakref.ref(model))
        _without_cache(model)

    def _share_values(self, tensors: Sequence[Tensor], own: set[int]) -> None:
        """Give every rank the values of rank 0, and move those of this rank to the device."""
        for tensor in tensors:
            full = tensor.detach().to(self.runtime.device, copy=id(tensor) not in own).contiguous()
            self.runtime.collectives.broadcast(full, src=0)
            if id(tensor) in own:
                tensor.data = full


def _without_cache(model: Any) -> None:
    """Let generation compute all tokens anew: no stage has the caches of the others."""
    config = getattr(model, "generation_config", None)
    if config is not None:
        config.use_cache = False
