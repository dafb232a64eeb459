"""Tensor parallelism by the plan of a model: the strategy, and the first stage of FSDP2."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from accel_ops.modules import model_has_dtensor, replaced_attributes, size_at_load, wrap_forward
from accel_plugins.parallelism.config import axes_of
from accel_plugins.parallelism.experts import experts_of, find_problem, local_experts
from accel_plugins.sharding.wrap import ShardedStrategy
from accel_state.errors import SettingsError, did_you_mean
from accel_state.frozen import frozen
from accel_state.torch_private import StridedShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class TensorParallelStrategy(ShardedStrategy):
    """Shard models by their tensor-parallel plans."""

    name = "tp"
    keeps_sharded = True

    def setup(self) -> None:
        super().setup()
        axes = axes_of(self.runtime, self.handlers)
        if axes.config.ep_enabled:
            raise SettingsError(
                f"ParallelismConfig(ep_size={axes.config.ep_size!r}): FSDP2 shards the experts, but another "
                "strategy was selected. Remove one of them."
            )
        if axes.tensor is None:
            raise SettingsError(
                "strategy='tp' was selected, but the tensor-parallel size is 1: pass "
                "ParallelismConfig(tp_size=…) with 2 or more."
            )
        stage = TensorParallel(mesh=axes.tensor)
        self.stages, self.validators = [stage], [stage.validate]
        self.mesh, self.sharding = axes.mesh, axes.sharding
        self.may_be_loaded_later = True


def _with_summed_gradient(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a replicated tensor whose gradient is summed over the ranks, each of which computes a part."""
    shared = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return shared.to_local(grad_placements=[Partial()])


class SummedGradients(ParallelStyle):
    """Sum the gradients of a replicated module, such as a norm that each rank applies to some heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def summed(forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            parameters = {
                name: _with_summed_gradient(parameter, device_mesh)
                for name, parameter in module.named_parameters(recurse=False)
            }
            with replaced_attributes(module, parameters):
                return forward(module, *args, **kwargs)

        wrap_forward(module, summed)
        return module


class ShardedExperts(ParallelStyle):
    """Shard the matrices inside of all experts of a layer: each rank computes a part of every output.

    Args:
        placements: How each parameter of the module is sharded, by name.
    """

    def __init__(self, placements: Mapping[str, Shard]) -> None:
        super().__init__()
        self.placements = placements

    def validate(self, name: str, module: nn.Module, size: int) -> None:
        """Check that ranks can share the experts evenly."""
        problem = find_problem(module, 1)
        for leaf, parameter in module.named_parameters(recurse=False):
            placement = self.placements.get(leaf)
            if placement is None:
                problem = problem or f"the plan does not cover its parameter {leaf!r}"
            elif parameter.shape[placement.dim] % (size * getattr(placement, "split_factor", 1)):
                problem = problem or (
                    f"its parameter {leaf!r} has the shape {tuple(parameter.shape)}, whose dim "
                    f"{placement.dim} ranks cannot share evenly"
                )
        if problem:
            raise SettingsError(
                f"ParallelismConfig(tp_size={size}): the experts in {name!r} ({type(module).__name__}) "
                f"cannot be sharded: {problem}."
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self.placements.items():
            parameter = module.get_parameter(name)
            sharded = distribute_tensor(parameter.detach(), device_mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        names = [*inspect.signature(module.forward).parameters][:3]

        def sum_parts(forward: Callable[..., Tensor], module: Any, *args: Any, **kwargs: Any) -> Tensor:
            hidden, indices, weights = (*args, *(kwargs[name] for name in names[len(args) :]))
            hidden, weights = (_with_summed_gradient(part, device_mesh) for part in (hidden, weights))
            with local_experts(module, module.num_experts):
                part = forward(module, hidden, indices, weights)
            partial = DTensor.from_local(part, device_mesh, [Partial()], run_check=False)
            return partial.redistribute(placements=[Replicate()]).to_local()

        wrap_forward(module, sum_parts)
        return module


STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    "replicated_with_grad_allreduce": SummedGradients,
}
"""Parallel styles by the names that a plan may use."""

_EXPERTS = "moe_tp_experts"
"""The style of a module of experts, whose parameters have separate entries in the plan."""
_STYLES_OF_EXPERTS: Mapping[str, Shard] = {
    "colwise": Shard(1),
    "rowwise": Shard(2),
    "packed_colwise": StridedShard(1, split_factor=2),  # of two matrices that are one parameter
    "packed_rowwise": StridedShard(2, split_factor=2),
}


@frozen
class TensorParallel:
    """Apply tensor parallelism to models; with `ignores_experts`, except experts, for expert parallelism."""

    mesh: DeviceMesh
    ignores_experts: bool = False

    def __call__(self, model: nn.Module) -> None:
        """Shard a model's layers in place, unless it has DTensors already."""
        if not model_has_dtensor(model):
            parallelize_module(model, self.mesh, self._plan_of(model))

    def validate(self, model: nn.Module) -> None:
        """Check that a model has a valid plan, unless it has DTensors already, and no DoRA adapters."""
        for name, module in model.named_modules():
            if getattr(module, "lora_magnitude_vector", None):  # set by peft, with an entry for each adapter
                raise SettingsError(
                    f"Module {name!r} has a DoRA adapter, whose norm peft computes from the full weight; "
                    "tensor parallelism shards it. Use LoRA (use_dora=False), or FSDP2 with tp_size=1."
                )
        if not model_has_dtensor(model):
            for name, style in self._plan_of(model).items():
                if isinstance(style, ShardedExperts):
                    style.validate(name, model.get_submodule(name), self.mesh.size())

    def _plan_of(self, model: nn.Module) -> dict[str, ParallelStyle]:
        return plan_of(model, without=experts_of(model) if self.ignores_experts else {})


def plan_of(
    model: nn.Module, without: Mapping[str, nn.Module] = MappingProxyType({})
) -> dict[str, ParallelStyle]:
    """Return a model's `tp_plan` as `parallelize_module` takes it, with the full names of modules.

    Args:
        model: A model whose `tp_plan` maps patterns of module names (`*` matches anything) to a
            `ParallelStyle` or a name of `STYLES`.
        without: Names of modules that are left unchanged, with their parameters.
    """
    tp_plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(tp_plan, Mapping) or not tp_plan:
        raise SettingsError(
            f"{type(model).__name__} has no tp_plan, by which tensor parallelism shards its layers; set it, "
            "as in model.tp_plan = {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}, or call "
            "torch.distributed.tensor.parallel.parallelize_module before prepare()."
        )
    names = [name for name, _ in model.named_modules() if name]
    ignored = {
        *without,
        *(f"{name}.{leaf}" for name in without for leaf, _ in without[name].named_parameters()),
    }
    of_family: Any = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    experts = {name: module for name, module in experts_of(model).items() if name not in without}
    placements: dict[str, dict[str, Shard]] = {name: {} for name in experts}
    plan: dict[str, ParallelStyle] = {}
    for pattern, style in cast("Mapping[str, Any]", tp_plan).items():
        matches = [name for name in names if fnmatchcase(name, pattern) and name not in ignored]
        of_experts = [
            (name, leaf)
            for name, module in experts.items()
            for leaf, _ in module.named_parameters(recurse=False)
            if fnmatchcase(f"{name}.{leaf}", pattern)
        ]
        if of_experts and not matches and style in _STYLES_OF_EXPERTS:
            for name, leaf in of_experts:
                placements[name][leaf] = _STYLES_OF_EXPERTS[style]
            continue
        if style == _EXPERTS and matches and {*matches} <= experts.keys():
            plan |= {name: ShardedExperts(placements[name]) for name in matches}
            continue
        # Not all models of a family of transformers match its plan.
        if not matches and (
            any(fnmatchcase(name, pattern) for name in ignored) or any(map(pattern.endswith, of_family))
        ):
            continue
        if not matches:
            hint = did_you_mean(pattern, names, f"it has {', '.join(names[:20])}.", cutoff=0.4)
            raise SettingsError(
                f"{type(model).__name__}.tp_plan names {pattern!r}, which matches no module; {hint}"
            )
        if not isinstance(style, ParallelStyle) and style not in STYLES:
            hint = did_you_mean(style, STYLES, f"there are {[*STYLES]}.")
            raise SettingsError(
                f"tp_plan[{pattern!r}]={style!r}: expected a ParallelStyle or its name; {hint}"
            )
        # torch's `*` is within one level of names.
        plan |= dict.fromkeys(matches, style if isinstance(style, ParallelStyle) else STYLES[style]())
    for name in experts:
        if placements[name] and name not in plan:
            raise SettingsError(
                f"{type(model).__name__}.tp_plan shards parameters of the experts in {name!r}; give the "
                f"module the style {_EXPERTS!r}, too."
            )
    return plan


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return the tensor-parallel size of a model, as set by transformers or from its mesh.

    Returns:
        The size, or `None` if the layers are not sharded.

    Example:
        >>> import torch
        >>> get_model_tp_size(torch.nn.Linear(1, 1)) is None
        True
    """
    size = getattr(model, "tp_size", None)
    size = size_at_load(model, "tp_size") if size is None else size
    if size is not None:
        return size
    for parameter in getattr(model, "parameters", tuple)():
        if isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ()):
            return parameter.device_mesh["tp"].size()
    return None
