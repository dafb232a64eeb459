"""Full and sharded state dicts of models and optimizers that are split into pipeline stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from accel_ops.modules import without_compiler
from accel_plugins.full_parameters import FullParameters, ParameterSource, named_parameters_of
from accel_plugins.sharding.shards import ShardedStates, gather_full_tensor
from accel_plugins.sharding.state import ABSENT, StateAllocator, StateForm, model_variables, state_by_index
from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.pipeline.stages import Layout
    from accel_plugins.pipeline.strategy import PipelineStrategy
    from accel_plugins.strategy import StateDict


_NAME = "_accel_name_in_full_model"


@dataclass(slots=True)
class ModelNames:
    """The names in a full model, recorded before it is cut.

    `first` maps each name of a parameter or buffer to the first name of the same tensor, and `ranks` these to
    the ranks of the pipeline that have it; tensors `outside` of all stages are on every rank. `groups` has,
    for each optimizer, the first names of the parameters of its groups. The first name is noted with `number`
    on each parameter, original and in the cut model.
    """

    state: tuple[str, ...]
    first: Mapping[str, str]
    ranks: Mapping[str, Sequence[int]]
    outside: frozenset[str]
    number: int = field(default_factory=itertools.count().__next__)
    groups: Any = field(default_factory=WeakKeyDictionary)

    @classmethod
    def of(cls, model: nn.Module, layout: Layout) -> ModelNames:
        """Record the names of a model."""
        owners = {f"{name}.": layout.rank_of(position) for position, name in enumerate(layout.names)}
        everywhere = {*layout.ranks}
        known: dict[int, str] = {}
        first: dict[str, str] = {}
        ranks: dict[str, set[int]] = {}
        outside: set[str] = set()
        parameters = model.named_parameters(remove_duplicate=False)
        for name, tensor in (*parameters, *model.named_buffers(remove_duplicate=False)):
            key = first[name] = known.setdefault(id(tensor), name)
            owner = next((rank for prefix, rank in owners.items() if name.startswith(prefix)), None)
            ranks.setdefault(key, set()).update(everywhere if owner is None else {owner})
            if owner is None:
                outside.add(name)
        order = {rank: index for index, rank in reversed([*enumerate(layout.ranks)])}
        names = cls(
            state=tuple(model.state_dict()),
            first=first,
            ranks={name: sorted(owned, key=lambda rank: order[rank]) for name, owned in ranks.items()},
            outside=frozenset(outside),
        )
        names.add_parameters(model)
        return names

    def add_parameters(self, model: nn.Module) -> None:
        """Record the model's present parameters."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            vars(parameter)[_NAME] = self.number, self.first[name]

    def name_of(self, parameter: Tensor) -> str | None:
        """Return the first name of a parameter of the model, original or in the cut model."""
        number, name = vars(parameter).get(_NAME, (None, None))
        return name if number == self.number else None

    def add_optimizer(self, optimizer: Optimizer, group: dist.ProcessGroup) -> None:
        """Record an optimizer's parameters, including those of other stages; a collective of the pipeline."""
        own = [map(self.name_of, row["params"]) for row in optimizer.param_groups]
        names = [[name for name in row if name is not None] for row in own]
        gathered = all_gather_objects(names, group)
        order = {name: index for index, name in enumerate(self.first)}
        rows = zip(*gathered, strict=True)
        full = [
            parts[0]
            if all(part == parts[0] for part in parts)
            else sorted({name for part in parts for name in part}, key=lambda name: order[name])
            for parts in rows
        ]
        if any(full):
            self.groups[optimizer] = full


def all_gather_objects(obj: Any, group: dist.ProcessGroup) -> list[Any]:
    """All-gather objects over a group, in rank order."""
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, obj, group=group)
    return gathered


class PipelineStates(ShardedStates):
    """State dicts of stages, under the names of the full model: this rank's part, or gathered from all.

    Every rank has all tensors of models that were not cut.
    """

    def __init__(self, strategy: PipelineStrategy, form: Callable[[], StateForm]) -> None:
        super().__init__(strategy.runtime.device, form)
        self.models, self.group, self.mesh = strategy.names, strategy.group, cast("Any", strategy.mesh)

    def model_tensors(self, model: nn.Module) -> StateDict:
        """Return the state dict; tensors common to all stages are replicated over all ranks."""
        own = super().model_tensors(model)
        names = self.models.get(without_compiler(model))
        if names is None:
            return own
        for name in names.outside & own.keys():
            value, placements = own[name], [Replicate()] * self.mesh.ndim
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                own[name] = DTensor.from_local(value, self.mesh, placements, run_check=False)
        return {name: own.get(name, ABSENT) for name in names.state}

    def own_names(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> list[list[str]]:
        """Return the first names of the parameters that this rank has."""
        names, own = self._names_of(optimizer), super().own_names(optimizer, models)
        return own if names is None else [[names.first.get(name, name) for name in row] for row in own]

    def group_names(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> Sequence[Sequence[str]]:
        names = self._names_of(optimizer)
        return super().group_names(optimizer, models) if names is None else names.groups[optimizer]

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        """Return the states of parameters whose first rank is this one."""
        own = super().optimizer_tensors(optimizer, models)
        names = self._names_of(optimizer)
        if names is None:
            return own
        rank = dist.get_rank(self.group)
        groups = _with_names(own["param_groups"], names.groups[optimizer]) if rank == 0 else ABSENT
        state = {name: values for name, values in own["state"].items() if names.ranks[name][0] == rank}
        return {**own, "state": state, "param_groups": groups}

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        allocate = super().state_allocator(optimizer, models)
        own = {name for group in self.own_names(optimizer, models) for name in group}
        return lambda name, *about: allocate(name, *about) if name in own else ABSENT

    def iter_full_parameters(self, model: nn.Module, request: FullParameters) -> Iterator[tuple[str, Tensor]]:
        if without_compiler(model) not in self.models:
            yield from super().iter_full_parameters(model, request)
            return
        own = {tied[0]: parameter for tied, parameter in named_parameters_of(model_variables(model))}
        for aliases, full in self._iter_all_stages(model, own, request.selects):
            for name in aliases if request.keep else ():
                yield name, full.to(request.dtype_of(full.dtype))

    def sources(self, model: nn.Module) -> Sequence[ParameterSource]:
        if without_compiler(model) in self.models:
            raise UnsupportedError(
                "weight_source(track_changes=True) with pipeline stages, which have only parts of the model: "
                "send all weights, or train without pp_size."
            )
        return super().sources(model)

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        names = self.models.get(without_compiler(model))
        if names is None:
            return super().load_full_state_dict(model, state, **options)
        by_first = {names.first.get(name, name): value for name, value in state.items()}
        complete = {name: by_first.get(names.first.get(name, name), ABSENT) for name in names.state}
        missing = [name for name, value in complete.items() if value is ABSENT]
        unexpected = [name for name in state if name not in complete]
        if options.get("strict", True) and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(without_compiler(model)).__name__}: missing keys "
                f"{missing}, unexpected keys {unexpected}."
            )
        result = super().load_full_state_dict(model, complete, **{**options, "strict": False})
        return type(result)(missing, unexpected)

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        own, names = self.optimizer_tensors(optimizer, models), self.group_names(optimizer, models)
        values = {(name, key): value for name, row in own["state"].items() for key, value in row.items()}
        merged: StateDict = {}
        for (name, key), owner in self._find_owners(values).items():
            full = self._collect(values.get((name, key)), owner)
            if keep:
                merged.setdefault(name, {})[key] = full.cpu() if isinstance(full, Tensor) else full
        groups = _with_names(optimizer.param_groups, names)
        return state_by_index({**own, "state": merged, "param_groups": groups}, names)

    def _names_of(self, optimizer: Optimizer) -> ModelNames | None:
        """Return the names of the model that an optimizer trains, if it was cut."""
        return next((names for names in self.models.values() if optimizer in names.groups), None)

    def _iter_gathered(self, model: nn.Module, state: StateDict, *, keep: bool) -> Iterator[StateDict]:
        if without_compiler(model) not in self.models:
            yield from super()._iter_gathered(model, state, keep=keep)
            return
        own = {name: value for name, value in state.items() if value is not ABSENT}
        for aliases, full in self._iter_all_stages(model, own):
            yield dict.fromkeys(aliases, full.cpu() if isinstance(full, Tensor) else full) if keep else {}

    def _iter_all_stages(
        self, model: nn.Module, own: Mapping[str, Any], selects: Callable[[str], bool] = lambda _: True
    ) -> Iterator[tuple[list[str], Any]]:
        """Yield the values of all stages in the order of the full model, each with all its names."""
        names = self.models[without_compiler(model)]
        values = {names.first.get(name, name): value for name, value in own.items()}
        owners = self._find_owners(values)
        aliases: dict[str, list[str]] = {}
        for name in names.state:
            aliases.setdefault(names.first.get(name, name), []).append(name)
        for first, tied in aliases.items():
            if first in owners and any(map(selects, tied)):
                yield tied, self._collect(values.get(first), owners[first])

    def _find_owners(self, own: Mapping[Any, Any]) -> dict[Any, tuple[int, Any]]:
        """Return, for each value of any stage, the first pipeline rank that has it and its description.

        A tensor is described by a meta tensor, anything else by itself. A collective of the pipeline.
        """
        described = {
            key: torch.empty(value.shape, dtype=value.dtype, device="meta")
            if isinstance(value, Tensor)
            else value
            for key, value in own.items()
        }
        owners: dict[Any, tuple[int, Any]] = {}
        for rank, part in enumerate(all_gather_objects(described, self.group)):
            for key, about in part.items():
                owners.setdefault(key, (rank, about))
        return owners

    def _collect(self, value: Any, owner: tuple[int, Any]) -> Any:
        """Return the full value of a pipeline rank on all of them."""
        rank, about = owner
        if not isinstance(about, Tensor):
            return about
        if dist.get_rank(self.group) == rank:
            full = gather_full_tensor(value, self._device).to(self._device).contiguous()
        else:
            full = torch.empty(about.shape, dtype=about.dtype, device=self._device)
        dist.broadcast(full, group=self.group, group_src=rank)
        return full


def _with_names(groups: Any, names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    return [{**group, "params": params} for group, params in zip(groups, names, strict=True)]
