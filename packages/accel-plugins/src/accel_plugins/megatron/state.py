"""State dicts of Megatron's engines: weights and optimizer state under the names of transformers.

megatron-core runs PyTorch's optimizer on the parameters; on float32 copies of them; or, with the distributed
optimizer, on a slice of each parameter's flat float32 copy, one slice per data-parallel rank.

The layout is independent of the sizes of Megatron's groups, so that any run and any strategy reads it.
Tensors are gathered, and read, one parameter at a time. megatron-core's `dist_checkpointing` is not used: it
names weights as megatron-core does, and unpickles its metadata.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from accel_plugins.full_parameters import ParameterSource
from accel_plugins.megatron.engine import MegatronEngine
from accel_plugins.megatron.families import Packing, Weight
from accel_plugins.megatron.library import core
from accel_plugins.sharding.shards import ShardedStates, group_tied_names, source_of
from accel_plugins.sharding.state import StateAllocator, StateForm, check_groups, state_by_name
from accel_plugins.strategy import StateDict
from accel_state.errors import CheckpointError, SettingsError, UnsupportedError
from accel_state.frozen import frozen
from accel_state.runtime import Runtime

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.megatron.strategy import Groups


class MegatronStates(ShardedStates):
    """State dicts of engines under the names of transformers, as DTensors or gathered from all stages."""

    def form(self) -> StateForm:
        return StateForm.SHARDED

    def model_tensors(self, model: nn.Module) -> StateDict:
        """Return the sharded state dict of a model, in float32 if it is trained."""
        if not isinstance(model, MegatronEngine):
            return super().model_tensors(model)
        check_names(model)
        aliases, mesh = find_aliases(model.source), self._mesh()
        state: StateDict = dict(list_buffers(model.source))
        for part in iter_masters(model):
            for name, value in part.items():
                state |= dict.fromkeys(aliases[name], _shard(value, mesh))
        return state

    def load_model(self, model: nn.Module, state: StateDict, **options: Any) -> Any:
        """Load a state dict, full or sharded; with `strict=False` weights may be missing."""
        if not isinstance(model, MegatronEngine):
            return super().load_model(model, state, **options)
        check_names(model)
        aliases = find_aliases(model.source)
        weights = {name: state[key] for name, names in aliases.items() for key in names if key in state}
        known = {*chain.from_iterable(aliases.values()), *dict(list_buffers(model.source))}
        missing, unexpected = sorted(aliases.keys() - weights.keys()), sorted(state.keys() - known)
        if options.get("strict", True) and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(model.source).__name__}: missing keys {missing}, "
                f"unexpected keys {unexpected}."
            )
        load_weights(model, weights)
        result = torch.nn.Module().load_state_dict({})
        return result._replace(missing_keys=missing, unexpected_keys=unexpected)

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        return self.load_model(model, dict(state), **options)

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        engine, mesh = find_engine(optimizer, models), self._mesh()
        return named_optimizer_state(engine, optimizer, lambda value: _shard(value, mesh))

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        """Return an allocator of even shards; scalars are replicated."""
        del optimizer, models
        mesh = self._mesh()

        def allocate(name: str, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            del name, key
            if not shape:
                return torch.empty(shape, dtype=dtype, device="cpu")
            return _shard(torch.empty(shape, dtype=dtype, device=self._device.type), mesh)

        return allocate

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        engine = find_engine(optimizer, models)
        if engine.plugin.no_load_optim:
            return
        check_groups([group["params"] for group in state["param_groups"]], engine.optimizer_names)
        _load_optimizer(engine, optimizer, state["param_groups"], state["state"])

    def group_names(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> Sequence[Sequence[str]]:
        return find_engine(optimizer, models).optimizer_names

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        self.load_optimizer(optimizer, models, state_by_name(state, self.group_names(optimizer, models)))

    def _mesh(self) -> DeviceMesh:
        group: Any = dist.group.WORLD
        return DeviceMesh.from_group(group, self._device.type)

    def sources(self, model: nn.Module) -> Sequence[ParameterSource]:
        if not isinstance(model, MegatronEngine):
            return super().sources(model)
        known = dict(model.source.named_parameters(remove_duplicate=False))
        tensors = {name: value for name, value in self.model_tensors(model).items() if name in known}
        return [source_of(names, value) for names, value in group_tied_names(tensors)]


def find_engine(optimizer: Optimizer, models: Sequence[nn.Module]) -> MegatronEngine:
    """Return the engine that was prepared with an optimizer."""
    for model in models:
        if isinstance(model, MegatronEngine) and model.optimizer is not None:
            check_names(model)
            return model
    raise CheckpointError(f"{type(optimizer).__name__} was not prepared with a model by Megatron.")


def check_names(engine: MegatronEngine) -> None:
    """Refuse a model whose weights have no names in transformers."""
    if engine.family is None:
        raise UnsupportedError(
            "The model was made by custom_model_provider_function: Megatron does not know what its weights "
            "are called in transformers. Read its own, model.chunks[i].module.state_dict()."
        )


def find_aliases(source: nn.Module) -> dict[str, tuple[str, ...]]:
    """Map the first name of every weight to all its names: tied weights have several."""
    weights = dict(source.named_parameters(remove_duplicate=False))
    return {names[0]: names for names, _ in group_tied_names(weights)}


def list_buffers(source: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers in the state dict of a model."""
    weights = {name for name, _ in source.named_parameters(remove_duplicate=False)}
    return [(name, value) for name, value in source.state_dict().items() if name not in weights]


def iter_masters(engine: MegatronEngine) -> Iterator[dict[str, Tensor]]:
    """Yield float32 weights under the names of transformers, from the optimizer's master copies.

    Called on every rank; weights that are not trained are the model's.
    """
    slots = {} if engine.optimizer is None else find_slots(engine)
    trained = set[int]() if engine.optimizer is None else {id(weight) for weight in list_trained(engine)}
    yield from gather(
        engine,
        engine.placed,
        lambda row: _in_full_shape(slots, row, None) if id(row) in trained else row.parameter.detach(),
        lambda row: torch.float32 if id(row) in trained else row.parameter.dtype,
    )


def named_optimizer_state(
    engine: MegatronEngine, optimizer: Optimizer, convert: Callable[[Tensor], Any]
) -> StateDict:
    """Return the optimizer's state dict by weight name; each tensor is converted when it is gathered.

    Called on every rank.
    """
    slots = find_slots(engine)
    # 1. Exchange the keys of states and the number of steps; a rank without slots knows neither.
    keys: set[str] = set()
    steps: set[float] = set()
    for slot in slots.values():
        own = slot.optimizer.state.get(slot.master, {})
        keys |= {key for key, value in own.items() if key != _STEP and isinstance(value, torch.Tensor)}
        counts = [own.get(_STEP), *(group.get(_STEP) for group in slot.optimizer.param_groups)]
        steps |= {float(count) for count in counts if count is not None}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (keys, steps))
    all_keys = sorted({key for keys_of_rank, _ in of_ranks for key in keys_of_rank})
    step = max((step for _, steps_of_rank in of_ranks for step in steps_of_rank), default=None)
    # 2. Gather the states.
    trained = list_trained(engine)
    state: dict[str, dict[str, Any]] = {}
    for key in () if engine.plugin.no_save_optim else all_keys:
        parts = gather(engine, trained, partial(_in_full_shape, slots, key=key), lambda _: torch.float32)
        for name, value in chain.from_iterable(part.items() for part in parts):
            entry = state.setdefault(name, {} if step is None else {_STEP: torch.tensor(step, device="cpu")})
            entry[key] = convert(value)
    groups = [
        {**group, "params": [*names]}
        for group, names in zip(optimizer.param_groups, engine.optimizer_names, strict=True)
    ]
    return {"state": state, "param_groups": groups}


_STEP = "step"


def _in_full_shape(
    slots: Mapping[nn.Parameter, OptimizerSlot], weight: PlacedWeight, key: str | None
) -> Tensor:
    """Return a state, or the master weight, in the parameter's shape; slices are all-reduced."""
    slot, parameter = slots.get(weight.parameter), weight.parameter
    value = None if slot is None else slot.master.detach() if key is None else slot.state[key]
    if value is not None and slot is not None and slot.start is None:
        return value.detach().float()
    full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if value is not None and slot is not None and slot.start is not None:
        full[slot.start : slot.start + value.numel()] = value.detach().reshape(-1).float()
    dist.all_reduce(full, group=core("parallel_state").get_data_parallel_group(with_context_parallel=True))
    return full.view_as(parameter)


@torch.no_grad()
def gather(
    engine: MegatronEngine,
    placed: Sequence[PlacedWeight],
    tensor_of: Callable[[PlacedWeight], Tensor],
    dtype_of: Callable[[PlacedWeight], torch.dtype],
) -> Iterator[dict[str, Tensor]]:
    """Yield weights under the names of transformers, gathered from all stages and tensor-parallel ranks.

    Every rank iterates over all. A tied weight is yielded once.

    `tensor_of` returns the tensor to gather, of the parameter's shape: it is called just before, on all ranks
    that have a shard of it. `dtype_of` returns the dtype in advance.
    """
    family: Any = engine.family
    groups = engine.groups
    pipeline = core("parallel_state").get_pipeline_model_parallel_group()
    plans = _gather_plans(
        [
            (
                row.name,
                row.names,
                tuple(row.packing.joined_shape(row.parameter.shape, groups.tensor)),
                dtype_of(row),
            )
            for row in placed
        ],
        groups,
    )
    packings = {row.parameter: row.packing for row in family.weights(engine.config)}
    known = {row.name: row for row in placed}
    done: set[tuple[str, ...]] = set()
    for stage, plan in enumerate(plans):
        for name, names, shape, dtype in plan:
            if names in done:  # The last stage has a copy of a tied weight.
                continue
            done.add(names)
            if stage == groups.pipeline_rank:
                packed = _join(known[name].packing, tensor_of(known[name]), groups).contiguous()
            else:
                packed = torch.empty(shape, dtype=dtype, device=placed[0].parameter.device)
            if groups.pipeline > 1:
                dist.broadcast(packed, group_src=stage, group=pipeline)
            yield dict(zip(names, packings[_LAYER.sub("{layer}", name)].unpack(packed), strict=True))
            del packed


def _gather_plans(own: Any, groups: Groups) -> list[Any]:
    """All-gather the plans of all pipeline stages, in order."""
    if groups.pipeline == 1:
        return [own]
    plans: list[Any] = [None] * groups.pipeline
    dist.all_gather_object(plans, own, group=core("parallel_state").get_pipeline_model_parallel_group())
    return plans


def _join(packing: Packing, value: Tensor, groups: Groups) -> Tensor:
    if packing.dim is None or groups.tensor == 1:
        return packing.join([value])
    shards = [torch.empty_like(value) for _ in range(groups.tensor)]
    group = core("parallel_state").get_tensor_model_parallel_group()
    dist.all_gather(shards, value.contiguous(), group=group)
    return packing.join(shards)


def _shard(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's shard of a tensor that every rank has, as a DTensor."""
    chunks = value.chunk(mesh.size(), dim=0)
    rank = mesh.get_local_rank()
    local = chunks[rank].clone() if rank < len(chunks) else value.new_empty((0, *value.shape[1:]))
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.contiguous().stride()
    )


@torch.no_grad()
def load_weights(engine: MegatronEngine, known: StateDict) -> None:
    """Load weights of transformers, full or sharded, into parameters and the more precise float32 copies."""
    slots = {} if engine.optimizer is None else find_slots(engine)
    for names, placed in _iter_in_order(engine, engine.placed):
        if any(name not in known for name in names):
            continue
        full = {name: _full(known[name]) for name in names}
        load(placed, full, engine.groups)
        for weight in placed:
            if (slot := slots.get(weight.parameter)) is not None:
                part = slot.own(_local_part(engine, weight, [full[name] for name in names]))
                slot.master.copy_(part.reshape(slot.master.shape))


@torch.no_grad()
def _load_optimizer(
    engine: MegatronEngine, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], state: StateDict
) -> None:
    """Load hyperparameters, and the state of weights of transformers, full or sharded."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
    slots = find_slots(engine)
    for names, placed in _iter_in_order(engine, list_trained(engine)):
        if any(name not in state for name in names):
            continue
        entries = [{key: _full(value) for key, value in sorted(state[name].items())} for name in names]
        for weight in placed:
            slot = slots.get(weight.parameter)
            if slot is None:
                continue
            for key, value in entries[0].items():
                if key == _STEP:
                    slot.set_step(float(value))
                elif isinstance(value, torch.Tensor):
                    slot.write(key, _local_part(engine, weight, [entry[key] for entry in entries]))


def _iter_in_order(
    engine: MegatronEngine, placed: Sequence[PlacedWeight]
) -> Iterator[tuple[tuple[str, ...], list[PlacedWeight]]]:
    """Yield names of all stages' parameters, in the same order on all ranks, and this rank's for each."""
    local: dict[tuple[str, ...], list[PlacedWeight]] = {}
    for weight in placed:
        local.setdefault(weight.names, []).append(weight)
    for names in dict.fromkeys(chain.from_iterable(_gather_plans([*local], engine.groups))):
        yield names, local.get(names, [])


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _local_part(engine: MegatronEngine, weight: PlacedWeight, tensors: Sequence[Tensor]) -> Tensor:
    packed = weight.packing.pack(tensors)
    part = weight.packing.shard(packed, engine.groups.tensor_rank, engine.groups.tensor)
    return part.to(device=weight.parameter.device, dtype=torch.float32).reshape(weight.parameter.shape)


@frozen
class OptimizerSlot:
    """The optimizer's part of one parameter, on this rank.

    Args:
        master: The tensor that PyTorch's optimizer steps.
        optimizer: PyTorch's optimizer.
        start: Offset of `master` in the flat parameter, if it is a slice; else `None`.
    """

    master: Tensor
    optimizer: Any
    start: int | None = None

    @property
    def state(self) -> dict[str, Any]:
        """The state that the optimizer has for the tensor."""
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

    def set_step(self, step: float) -> None:
        """Set the number of steps: PyTorch counts them by parameter, fused optimizers by group."""
        kind = type(self.optimizer)
        if issubclass(kind, torch.optim.Optimizer) and kind.__module__.startswith("torch."):
            self.state[_STEP] = torch.tensor(step, device="cpu")
            return
        for group in self.optimizer.param_groups:
            group[_STEP] = int(step)


def find_slots(engine: MegatronEngine) -> dict[nn.Parameter, OptimizerSlot]:
    """Return this rank's slots by parameter; a data-parallel rank may have none for some."""
    distributed = core("optimizer").DistributedOptimizer
    slots: dict[nn.Parameter, OptimizerSlot] = {}
    for optimizer in engine.optimizer.chained_optimizers:
        groups = optimizer.optimizer.param_groups
        if isinstance(optimizer, distributed):
            for parameter, (group, index) in optimizer.model_param_group_index_map.items():
                slots[parameter] = OptimizerSlot(
                    master=groups[group]["params"][index],
                    optimizer=optimizer.optimizer,
                    start=optimizer._get_model_param_range_map(parameter)["param"].start,
                )
            continue
        stepped = {id(tensor) for group in groups for tensor in group["params"]}
        for weight in engine.placed:
            master = getattr(weight.parameter, "main_param", weight.parameter)
            if id(master) in stepped:
                slots[weight.parameter] = OptimizerSlot(master=master, optimizer=optimizer.optimizer)
    return slots


def list_trained(engine: MegatronEngine) -> list[PlacedWeight]:
    """Return the parameters that the optimizer steps."""
    return [weight for weight in engine.placed if weight.parameter.requires_grad]


@frozen
class PlacedWeight:
    """A parameter of this rank, and the weights of transformers of which it is a shard."""

    name: str
    parameter: nn.Parameter
    names: tuple[str, ...]
    packing: Packing


_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
# TransformerEngine's linear layers have the norm before them.
_FUSED = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}


def find_rows(stages: Sequence[nn.Module], weights: Sequence[Weight]) -> list[PlacedWeight]:
    """Find the row of every parameter of this rank."""
    rows = {row.parameter: row for row in weights}
    placed: list[PlacedWeight] = []
    for stage in stages:
        for local_name, parameter in stage.named_parameters():
            name, layer = local_name, None
            for fused, plain in _FUSED.items():
                name = name.replace(fused, plain)
            if match := _LAYER.search(name):  # a stage counts its layers from 0
                modules: Any = stage.get_submodule(name[: match.start() - 1])
                layer = modules[int(match[0])].layer_number - 1
                name = f"{name[: match.start()]}{layer}{name[match.end() :]}"
            row = rows.get(_LAYER.sub("{layer}", name))
            if row is None:
                raise SettingsError(
                    f"The parameter {name!r} of Megatron's model has no row in its family: add one."
                )
            if row.packing.dim is not None:  # megatron-core sets it only if it initialises weights.
                vars(parameter).setdefault("tensor_model_parallel", True)
            names = tuple(pattern.format(layer=layer) for pattern in row.names)
            placed.append(PlacedWeight(name=name, parameter=parameter, names=names, packing=row.packing))
    return placed


def check_covered(model: nn.Module, weights: Sequence[Weight]) -> None:
    """Refuse a model with weights that no row converts."""
    patterns = {re.escape(name).replace(r"\{layer\}", r"\d+") for row in weights for name in row.names}
    known = re.compile("|".join(patterns))
    missing = [name for name, _ in model.named_parameters() if not known.fullmatch(name)]
    if missing:
        raise SettingsError(
            f"{type(model).__name__} has weights without a row in its family, which Megatron would not train "
            f"or save: {', '.join(missing)}. Add rows for them, or leave out what makes them."
        )


@torch.no_grad()
def share_values(model: nn.Module, runtime: Runtime) -> None:
    """Broadcast the parameters and buffers of rank 0.

    Ranks that seeded differently would otherwise train a mixture of several models.
    """
    for value in (*model.parameters(), *model.buffers()):
        before = value.detach().to(runtime.device)
        values = before.clone(memory_format=torch.contiguous_format)
        runtime.collectives.broadcast(values, 0)
        if not torch.equal(values, before):  # Otherwise a mapped file stays shared.
            value.detach().copy_(values)


@torch.no_grad()
def load(placed: Sequence[PlacedWeight], state: Mapping[str, Tensor], groups: Groups) -> None:
    """Copy this rank's shards of weights of transformers into its parameters."""
    for weight in placed:
        packed = weight.packing.pack([state[name] for name in weight.names])
        weight.parameter.copy_(weight.packing.shard(packed, groups.tensor_rank, groups.tensor))


def drop_values(model: nn.Module) -> None:
    """Move the parameters of a model to the meta device, in place; tied ones stay tied."""
    dropped: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty_like(parameter, device="meta")
            new = dropped.setdefault(id(parameter), torch.nn.Parameter(empty, parameter.requires_grad))
            dropped[id(new)] = new
            setattr(module, name, new)
