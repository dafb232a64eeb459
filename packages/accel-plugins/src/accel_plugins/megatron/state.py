"""Weights and optimizer state, both ways.

megatron-core keeps one of three: PyTorch's optimizer on the parameters; on float32 copies of them; or, with
the distributed optimizer, on a slice of each parameter's flat float32 copy, one slice per data-parallel rank.

The layout is independent of the sizes of Megatron's groups, so that any run and any strategy reads it.
Tensors are gathered, and read, one parameter at a time. megatron-core's `dist_checkpointing` is not used: it
names weights as megatron-core does, and unpickles its metadata.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from accel_plugins.megatron.engine import MegatronEngine
from accel_plugins.megatron.families import Packing, Weight
from accel_plugins.megatron.library import core
from accel_plugins.sharding.shards import group_tied_names
from accel_plugins.sharding.state import (
    StateAllocator,
    StateForm,
    TensorShards,
    check_groups,
    names_to_indices,
    state_by_name,
)
from accel_plugins.strategy import StateDict
from accel_plugins.unsharded import ReplicatedPersister
from accel_state.errors import CheckpointError, SettingsError, UnsupportedError
from accel_state.runtime import Runtime

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.megatron.strategy import Groups


_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
# TransformerEngine's linear layers have the norm before them.
_FUSED = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWeight:
    """A parameter of this rank, and the weights of transformers that it holds a part of."""

    name: str
    parameter: nn.Parameter
    names: tuple[str, ...]
    packing: Packing


def find_rows(stages: Sequence[nn.Module], weights: Sequence[Weight]) -> list[PlacedWeight]:
    """Find the row of every parameter of this rank."""
    rows = {row.parameter: row for row in weights}
    found: list[PlacedWeight] = []
    for stage in stages:
        for name, parameter in stage.named_parameters():
            full, layer = _full_name(stage, name)
            row = rows.get(_LAYER.sub("{layer}", full))
            if row is None:
                raise SettingsError(
                    f"The parameter {full!r} of Megatron's model has no row in its family: add one."
                )
            names = tuple(one.format(layer=layer) for one in row.names)
            if (
                row.packing.dim is not None
            ):  # megatron-core says so when it initialises weights, which it does not
                vars(parameter).setdefault("tensor_model_parallel", True)
            found.append(PlacedWeight(name=full, parameter=parameter, names=names, packing=row.packing))
    return found


def check_covered(model: nn.Module, weights: Sequence[Weight]) -> None:
    """Refuse a model with weights that no row carries over."""
    patterns = {re.escape(name).replace(r"\{layer\}", r"\d+") for row in weights for name in row.names}
    known = re.compile("|".join(patterns))
    missing = [name for name, _ in model.named_parameters() if not known.fullmatch(name)]
    if missing:
        raise SettingsError(
            f"{type(model).__name__} has weights without a row in its family, which Megatron would not train "
            f"or save: {', '.join(missing)}. Add rows for them, or leave out what makes them."
        )


def _full_name(stage: nn.Module, name: str) -> tuple[str, int | None]:
    """Return the name of a parameter in the full model, and its layer; a stage counts layers from 0."""
    for fused, plain in _FUSED.items():
        name = name.replace(fused, plain)
    match = _LAYER.search(name)
    if match is None:
        return name, None
    layers = stage.get_submodule(name[: match.start() - 1])
    layer = layers[int(match[0])].layer_number - 1  # pyright: ignore[reportIndexIssue, reportOperatorIssue]
    return f"{name[: match.start()]}{layer}{name[match.end() :]}", layer


@torch.no_grad()
def share_values(model: nn.Module, runtime: Runtime) -> None:
    """Give every rank the values that rank 0 has.

    Ranks that seeded differently would otherwise train a model that is put together of several.
    """
    for value in (*model.parameters(), *model.buffers()):
        before = value.detach().to(runtime.device)
        values = before.clone(memory_format=torch.contiguous_format)
        runtime.collectives.broadcast(values, 0)
        if not torch.equal(values, before):  # else a file that is mapped stays shared
            value.detach().copy_(values)


@torch.no_grad()
def load(placed: Sequence[PlacedWeight], state: Mapping[str, Tensor], groups: Groups) -> None:
    """Copy the parts of weights of transformers that this rank has."""
    for one in placed:
        packed = one.packing.pack([state[name] for name in one.names])
        own = one.packing.shard(packed, groups.tensor_rank, groups.tensor)
        one.parameter.copy_(own)


@torch.no_grad()
def gather(
    placed: Sequence[PlacedWeight],
    weights: Sequence[Weight],
    groups: Groups,
    tensor_of: Callable[[PlacedWeight], Tensor],
    dtype_of: Callable[[PlacedWeight], torch.dtype],
) -> Iterator[dict[str, Tensor]]:
    """Yield weights of transformers, gathered from all stages and tensor-parallel ranks.

    Every rank iterates over all. A tied weight comes once.

    `tensor_of` returns what is gathered, of the shape of the parameter: it is called when the turn comes, on
    all ranks that have a part of it. `dtype_of` returns the dtype beforehand.
    """
    state = core("parallel_state")
    pipeline = state.get_pipeline_model_parallel_group()
    shape_of = partial(_joined_shape, groups)
    plans = gather_plan([(row.name, row.names, shape_of(row), dtype_of(row)) for row in placed], groups)
    rows = {row.parameter: row.packing for row in weights}
    known = {row.name: row for row in placed}
    done: set[tuple[str, ...]] = set()
    for stage, plan in enumerate(plans):
        for name, names, shape, dtype in plan:
            if names in done:  # the last stage has a copy of a tied weight
                continue
            done.add(names)
            if stage == groups.pipeline_rank:
                row = known[name]
                packed = _join(row, tensor_of(row), groups).contiguous()
            else:
                packed = torch.empty(shape, dtype=dtype, device=placed[0].parameter.device)
            if groups.pipeline > 1:
                dist.broadcast(packed, group_src=stage, group=pipeline)
            packing = rows[_LAYER.sub("{layer}", name)]
            yield dict(zip(names, packing.unpack(packed), strict=True))
            del packed


def _joined_shape(groups: Groups, row: PlacedWeight) -> tuple[int, ...]:
    return tuple(row.packing.joined_shape(row.parameter.shape, groups.tensor))


def gather_plan(own: Any, groups: Groups) -> list[Any]:
    """Return what every pipeline stage has, in their order."""
    if groups.pipeline == 1:
        return [own]
    plans: list[Any] = [None] * groups.pipeline
    dist.all_gather_object(plans, own, group=core("parallel_state").get_pipeline_model_parallel_group())
    return plans


def _join(one: PlacedWeight, value: Tensor, groups: Groups) -> Tensor:
    if one.packing.dim is None or groups.tensor == 1:
        return one.packing.join([value])
    shards = [torch.empty_like(value) for _ in range(groups.tensor)]
    group = core("parallel_state").get_tensor_model_parallel_group()
    dist.all_gather(shards, value.contiguous(), group=group)
    return one.packing.join(shards)


def drop_values(model: nn.Module) -> None:
    """Move the parameters of a model to the meta device, in place; tied ones stay tied."""
    dropped: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty_like(parameter, device="meta")
            new = dropped.setdefault(id(parameter), torch.nn.Parameter(empty, parameter.requires_grad))
            dropped[id(new)] = new
            setattr(module, name, new)


def aliases_of(source: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of every weight, by its first: tied weights have several."""
    weights = dict(source.named_parameters(remove_duplicate=False))
    return {names[0]: names for names, _ in group_tied_names(weights)}


def buffers_of(source: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers in the state dict of a model."""
    weights = {name for name, _ in source.named_parameters(remove_duplicate=False)}
    return [(name, value) for name, value in source.state_dict().items() if name not in weights]


_STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSlot:
    """The optimizer's part of one parameter, on this rank.

    Args:
        master: The tensor that the optimizer of PyTorch steps.
        optimizer: That optimizer.
        start: Where `master` begins in the flat parameter, if it is a slice; else `None`.
        group: Data-parallel ranks that have the other slices.
    """

    master: Tensor
    optimizer: Any
    start: int | None = None
    group: Any = None

    @property
    def state(self) -> dict[str, Any]:
        """What the optimizer keeps for the tensor."""
        return self.optimizer.state[self.master]

    def own(self, value: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the parameter's shape."""
        if self.start is None:
            return value
        return value.reshape(-1)[self.start : self.start + self.master.numel()]

    def write(self, key: str, value: Tensor) -> None:
        """Copy this rank's part of a tensor of the parameter's shape into the state."""
        into = self.state.setdefault(key, torch.zeros_like(self.master))
        into.copy_(self.own(value).reshape(into.shape))


def slots_of(engine: MegatronEngine) -> dict[nn.Parameter, OptimizerSlot]:
    """Return this rank's slots by parameter; a data-parallel rank may have none for some."""
    optimizers = core("optimizer")
    found: dict[nn.Parameter, OptimizerSlot] = {}
    for one in engine.optimizer.chained_optimizers:
        if isinstance(one, optimizers.DistributedOptimizer):
            for parameter, (group, index) in one.model_param_group_index_map.items():
                found[parameter] = OptimizerSlot(
                    master=one.optimizer.param_groups[group]["params"][index],
                    optimizer=one.optimizer,
                    start=one._get_model_param_range_map(parameter)["param"].start,
                    group=one.data_parallel_group,
                )
            continue
        steps = {id(tensor) for group in one.optimizer.param_groups for tensor in group["params"]}
        for placed in engine.placed:
            master = getattr(placed.parameter, "main_param", placed.parameter)
            if id(master) in steps:
                found[placed.parameter] = OptimizerSlot(master=master, optimizer=one.optimizer)
    return found


def trained(engine: MegatronEngine) -> list[PlacedWeight]:
    """Return the parameters that the optimizer steps."""
    return [one for one in engine.placed if one.parameter.requires_grad]


def _full_shape(slots: Mapping[nn.Parameter, OptimizerSlot], one: PlacedWeight, key: str | None) -> Tensor:
    """Return a state, or the master weight, in the shape of the parameter; slices are summed up."""
    slot = slots.get(one.parameter)
    value = None if slot is None else slot.master.detach() if key is None else slot.state[key]
    if value is not None and slot is not None and slot.start is None:
        return value.detach().float()
    full = torch.zeros(one.parameter.numel(), dtype=torch.float32, device=one.parameter.device)
    if value is not None and slot is not None and slot.start is not None:
        full[slot.start : slot.start + value.numel()] = value.detach().reshape(-1).float()
    dist.all_reduce(full, group=core("parallel_state").get_data_parallel_group(with_context_parallel=True))
    return full.view_as(one.parameter)


def iter_masters(engine: MegatronEngine) -> Iterator[dict[str, Tensor]]:
    """Yield float32 weights of transformers, from the copies that the optimizer steps.

    Called on every rank; weights that are not trained come as the model has them.
    """
    slots = {} if engine.optimizer is None else slots_of(engine)
    own = set[int]() if engine.optimizer is None else {id(one) for one in trained(engine)}
    yield from _gathered(
        engine,
        engine.placed,
        lambda row: _full_shape(slots, row, None) if id(row) in own else row.parameter.detach(),
        lambda row: torch.float32 if id(row) in own else row.parameter.dtype,
    )


@torch.no_grad()
def load_master(
    engine: MegatronEngine,
    slots: Mapping[nn.Parameter, OptimizerSlot],
    one: PlacedWeight,
    state: Mapping[str, Tensor],
) -> None:
    """Copy the weights of one parameter to its float32 copy, if this rank has a part of it."""
    slot = slots.get(one.parameter)
    if slot is not None:
        part = slot.own(_local(engine, one, [state[name] for name in one.names]))
        slot.master.copy_(part.reshape(slot.master.shape))


def named_optimizer_state(
    engine: MegatronEngine, optimizer: Optimizer, convert: Callable[[Tensor], Any]
) -> StateDict:
    """Return the optimizer's state dict with weights by name, each tensor converted when it is gathered.

    Called on every rank.
    """
    slots = slots_of(engine)
    keys, step = _agreed(slots)
    placed = trained(engine)
    state: dict[str, dict[str, Any]] = {}
    for key in () if engine.plugin.no_save_optim else keys:
        parts = _gathered(engine, placed, partial(_full_shape, slots, key=key), lambda _: torch.float32)
        for name, value in chain.from_iterable(part.items() for part in parts):
            entry = state.setdefault(name, {} if step is None else {_STEP: torch.tensor(step)})
            entry[key] = convert(value)
    groups = [
        {**group, "params": [*names]}
        for group, names in zip(optimizer.param_groups, engine.optimizer_names, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def restore(engine: MegatronEngine, one: PlacedWeight, slot: OptimizerSlot, entries: Sequence[Any]) -> None:
    """Load the state of one parameter."""
    for key, value in entries[0].items():
        if key == _STEP:
            _set_step(slot, float(value))
        elif isinstance(value, torch.Tensor):
            slot.write(key, _local(engine, one, [entry[key] for entry in entries]))


def _set_step(slot: OptimizerSlot, step: float) -> None:
    if isinstance(slot.optimizer, torch.optim.Optimizer) and type(slot.optimizer).__module__.startswith(
        "torch."
    ):
        slot.state[_STEP] = torch.tensor(step)
        return
    for group in slot.optimizer.param_groups:  # fused optimizers count for the group
        group[_STEP] = int(step)


def _agreed(slots: Mapping[nn.Parameter, OptimizerSlot]) -> tuple[list[str], float | None]:
    """Return the keys of states and the number of steps: a rank may have no slot, and not know."""
    keys: set[str] = set()
    steps: set[float] = set()
    for slot in slots.values():
        state = slot.optimizer.state.get(slot.master, {})
        keys |= {key for key, value in state.items() if key != _STEP and isinstance(value, torch.Tensor)}
        counts = [state.get(_STEP), *(group.get(_STEP) for group in slot.optimizer.param_groups)]
        steps |= {float(count) for count in counts if count is not None}
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, (keys, steps))
    every = {step for _, some in plans for step in some}
    return sorted({key for some, _ in plans for key in some}), max(every, default=None)


def _local(engine: MegatronEngine, one: PlacedWeight, tensors: Sequence[Tensor]) -> Tensor:
    packed = one.packing.pack(tensors)
    own = one.packing.shard(packed, engine.groups.tensor_rank, engine.groups.tensor)
    return own.to(device=one.parameter.device, dtype=torch.float32).reshape(one.parameter.shape)


def _gathered(
    engine: MegatronEngine,
    placed: Sequence[PlacedWeight],
    tensor_of: Callable[[PlacedWeight], Tensor],
    dtype_of: Callable[[PlacedWeight], torch.dtype],
) -> Iterator[dict[str, Tensor]]:
    family: Any = engine.family
    return gather(placed, family.weights(engine.config), engine.groups, tensor_of, dtype_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronShards:
    """Sharded state dicts of engines, as DTensors under the names of transformers."""

    device_type: str
    _plain: TensorShards = field(default_factory=TensorShards, init=False)

    def form(self) -> StateForm:
        """Return `StateForm.SHARDED`."""
        return StateForm.SHARDED

    def model_tensors(self, model: nn.Module) -> StateDict:
        """Return the sharded state dict of a model, in float32 if it is trained."""
        if not isinstance(model, MegatronEngine):
            return self._plain.model_tensors(model)
        check_names(model)
        aliases, mesh = aliases_of(model.source), self._mesh()
        state: StateDict = dict(buffers_of(model.source))
        for part in iter_masters(model):
            for name, value in part.items():
                state |= dict.fromkeys(aliases[name], _sharded(value, mesh))
        return state

    def load_model(self, model: nn.Module, state: StateDict, **options: Any) -> None:
        """Load a sharded state dict; with `strict=False` weights may be missing."""
        if not isinstance(model, MegatronEngine):
            self._plain.load_model(model, state, **options)
            return
        check_names(model)
        aliases = aliases_of(model.source)
        known = {name: state[alias] for name, names in aliases.items() for alias in names if alias in state}
        load_weights(model, known)

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        """Return the sharded state dict of the optimizer, with parameters by name."""
        engine, mesh = engine_of(optimizer, models), self._mesh()
        return named_optimizer_state(engine, optimizer, lambda value: _sharded(value, mesh))

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        """Allocate even parts; numbers are on every rank."""
        del optimizer, models
        mesh = self._mesh()

        def allocate(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            del name
            if not shape:
                return torch.empty(shape, dtype=dtype)
            return _sharded(torch.empty(shape, dtype=dtype, device=self.device_type), mesh)

        return allocate

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        """Load a sharded state dict of the optimizer."""
        engine = engine_of(optimizer, models)
        if engine.plugin.no_load_optim:
            return
        saved, names = state["param_groups"], engine.optimizer_names
        check_groups([group["params"] for group in saved], names)
        for group, before in zip(optimizer.param_groups, saved, strict=True):
            group.update({key: value for key, value in before.items() if key != "params"})
        load_entries(engine, state["state"])

    def _mesh(self) -> DeviceMesh:
        group: Any = dist.group.WORLD
        return DeviceMesh.from_group(group, self.device_type)


def load_weights(engine: MegatronEngine, known: StateDict) -> None:
    """Load weights of transformers, full or sharded, also to the float32 copies, which have more digits."""
    for one, full in _full_weights(engine, engine.placed, known):
        load([one], full, engine.groups)
    if engine.optimizer is None:
        return
    slots = slots_of(engine)
    engine.optimizer.reload_model_params()
    for one, full in _full_weights(engine, trained(engine), known):
        load_master(engine, slots, one, full)


@torch.no_grad()
def load_entries(engine: MegatronEngine, state: StateDict) -> None:
    """Load the optimizer's state of weights of transformers, full or sharded."""
    slots = slots_of(engine)
    for owned, placed in _in_order(engine, trained(engine)):
        if any(name not in state for name in owned):
            continue
        entries = [{key: _full(value) for key, value in sorted(state[name].items())} for name in owned]
        for one in placed:
            if one.parameter in slots:
                restore(engine, one, slots[one.parameter], entries)


def engine_of(optimizer: Optimizer, models: Sequence[nn.Module]) -> MegatronEngine:
    """Return the engine that was prepared with an optimizer."""
    found = [one for one in models if isinstance(one, MegatronEngine) and one.optimizer is not None]
    if not found:
        raise CheckpointError(f"{type(optimizer).__name__} was not prepared with a model by Megatron.")
    check_names(found[0])
    return found[0]


def check_names(engine: MegatronEngine) -> None:
    """Refuse a model whose weights have no names in transformers."""
    if engine.family is None:
        raise UnsupportedError(
            "The model was made by custom_model_provider_function: Megatron does not know what its weights "
            "are called in transformers. Read its own, model.chunks[i].module.state_dict()."
        )


def _sharded(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of a tensor that every rank has."""
    chunks = value.chunk(mesh.size(), dim=0)
    rank = mesh.get_local_rank()
    own = chunks[rank].clone() if rank < len(chunks) else value.new_empty((0, *value.shape[1:]))
    return DTensor.from_local(
        own, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.contiguous().stride()
    )


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _full_weights(
    engine: MegatronEngine, placed: Sequence[PlacedWeight], known: StateDict
) -> Iterator[tuple[PlacedWeight, StateDict]]:
    """Yield the parameters of this rank whose weights are all known, with these in full: a collective."""
    for names, own in _in_order(engine, placed):
        if all(name in known for name in names):
            full = {name: _full(known[name]) for name in names}
            yield from ((one, full) for one in own)


def _in_order(
    engine: MegatronEngine, placed: Sequence[PlacedWeight]
) -> Iterator[tuple[tuple[str, ...], list[PlacedWeight]]]:
    """Yield the names of every parameter of all stages, on every rank alike, and those parameters here."""
    own: dict[tuple[str, ...], list[PlacedWeight]] = {}
    for one in placed:
        own.setdefault(one.names, []).append(one)
    for names in dict.fromkeys(names for plan in gather_plan([*own], engine.groups) for names in plan):
        yield names, own.get(names, [])


class MegatronPersister(ReplicatedPersister):
    """Persister that gathers weights from all stages and tensor-parallel ranks, and shards them again."""

    def full_state_dict(self, model: nn.Module, *, keep: bool = True) -> StateDict:
        """Return the weights of the model of transformers, on the CPU."""
        found: StateDict = {}
        for part in self.iter_full_state_dict(model, keep=keep):
            found |= part
        return found

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        """Yield the same in parts, each gathered when it is requested."""
        if not isinstance(model, MegatronEngine):
            yield from ReplicatedPersister.iter_full_state_dict(self, model, keep=keep)
            return
        check_names(model)
        aliases = aliases_of(model.source)
        yield dict(buffers_of(model.source)) if keep else {}
        for part in iter_masters(model):
            if keep:
                yield {alias: value.cpu() for name, value in part.items() for alias in aliases[name]}

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        """Load weights of a model of transformers."""
        if not isinstance(model, MegatronEngine):
            return ReplicatedPersister.load_full_state_dict(self, model, state, **options)
        check_names(model)
        strict = options.get("strict", True)
        aliases = aliases_of(model.source)
        found: dict[str, Tensor] = {
            name: state[alias] for name, known in aliases.items() for alias in known if alias in state
        }
        known = {alias for names in aliases.values() for alias in names} | {
            name for name, _ in buffers_of(model.source)
        }
        missing = sorted(aliases.keys() - found.keys())
        unexpected = sorted(state.keys() - known)
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(model.source).__name__}: missing keys {missing}, "
                f"unexpected keys {unexpected}."
            )
        load_weights(model, found)
        result = torch.nn.Module().load_state_dict({})
        return result._replace(missing_keys=missing, unexpected_keys=unexpected)

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        """Return the state dict that the optimizer of PyTorch would have in one process."""
        engine = engine_of(optimizer, models)
        state = named_optimizer_state(engine, optimizer, lambda value: value.cpu().clone() if keep else None)
        return names_to_indices(state if keep else {**state, "state": {}}, engine.optimizer_names)

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load such a state dict."""
        engine = engine_of(optimizer, models)
        if engine.plugin.no_load_optim:
            return
        saved, names = state["param_groups"], engine.optimizer_names
        found, own = [len(group["params"]) for group in saved], [len(group) for group in names]
        if found != own:
            raise CheckpointError(
                f"The optimizer was saved with groups of {found} parameters, and has groups of {own} now."
            )
        named = state_by_name(state, names)
        for group, before in zip(optimizer.param_groups, saved, strict=True):
            group.update({name: value for name, value in before.items() if name != "params"})
        load_entries(engine, named["state"])
