"""State dicts of Megatron's engines: weights and optimizer state under the names of transformers.

megatron-core runs PyTorch's optimizer on the parameters; on float32 copies of them; or, with the distributed
optimizer, on a slice of each parameter's flat float32 copy, one slice per data-parallel rank.

The layout is independent of the sizes of Megatron's groups, so that any run and any strategy reads it.
Tensors are gathered, and read, one parameter at a time. megatron-core's `dist_checkpointing` is not used: it
names weights as megatron-core does, and unpickles its metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import SGD

from accel_plugins.full_parameters import ParameterSource
from accel_plugins.megatron.engine import MegatronEngine
from accel_plugins.megatron.families import Packing, Weight, plain_name
from accel_plugins.megatron.library import core
from accel_plugins.sharding.shards import ShardedStates, group_tied_names, source_of
from accel_plugins.sharding.state import StateAllocator, check_groups, state_by_name
from accel_plugins.strategy import StateDict
from accel_state.errors import CheckpointError, SettingsError, UnsupportedError
from accel_state.frozen import frozen
from accel_state.runtime import Runtime

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.megatron.strategy import Groups


class MegatronStates(ShardedStates):
    """State dicts of engines under the names of transformers, as DTensors or gathered from all stages."""

    def model_tensors(self, model: nn.Module) -> StateDict:
        """Return the sharded state dict of a model, in float32."""
        if not isinstance(model, MegatronEngine):
            return super().model_tensors(model)
        aliases = find_aliases(model)
        weights = {*chain.from_iterable(aliases.values())}
        state = {name: value for name, value in model.source.state_dict().items() if name not in weights}
        slots = find_slots(model)

        def value_of(row: PlacedWeight) -> Tensor:  # the optimizer's float32 copy, if it steps the weight
            is_stepped = model.optimizer is not None and row.parameter.requires_grad
            return _full_value(slots, row.parameter, None) if is_stepped else row.parameter.detach()

        for part in gather(model, value_of, torch.float32):
            for name, value in part.items():
                state |= dict.fromkeys(aliases[name], self._shard(value))
        return state

    @torch.no_grad()
    def load_model(self, model: nn.Module, state: StateDict, **options: Any) -> Any:
        """Load a state dict, full or sharded; with `strict=False` weights may be missing."""
        if not isinstance(model, MegatronEngine):
            return super().load_model(model, state, **options)
        aliases = find_aliases(model)
        weights = {name: state[key] for name, names in aliases.items() for key in names if key in state}
        missing = sorted(aliases.keys() - weights.keys())
        unexpected = sorted(state.keys() - {*model.source.state_dict(), *chain(*aliases.values())})
        if options.get("strict", True) and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(model.source).__name__}: missing keys {missing}, "
                f"unexpected keys {unexpected}."
            )
        slots = find_slots(model)
        for row, tensors in _iter_known(model, weights):
            value = row.shard(tensors, model.groups)
            row.parameter.copy_(value)
            if (slot := slots.get(row.parameter)) is not None:  # its float32 copy is more precise
                slot.master.copy_(slot.own(value).reshape(slot.master.shape))
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        return self.load_model(model, dict(state), **options)

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        engine = _engine_of(optimizer, models)
        _check_names(engine)
        slots, is_adam = find_slots(engine), not isinstance(optimizer, SGD)
        keys = ("exp_avg", "exp_avg_sq") if is_adam else ("momentum_buffer",)
        has_state = is_adam or any(group["momentum"] for group in optimizer.param_groups)
        state: dict[str, dict[str, Any]] = {}
        for key in keys if engine.steps and has_state and not engine.plugin.no_save_optim else ():
            parts = gather(
                engine,
                lambda row, key=key: _full_value(slots, row.parameter, key),
                torch.float32,
                trained=True,
            )
            for name, value in chain.from_iterable(part.items() for part in parts):
                steps = {_STEP: torch.tensor(float(engine.steps), device="cpu")} if is_adam else {}
                state.setdefault(name, steps)[key] = self._shard(value)
        groups = [
            {**group, "params": [*names]}
            for group, names in zip(optimizer.param_groups, engine.optimizer_names, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        """Return an allocator of even shards; scalars are replicated."""
        del optimizer, models

        def allocate(name: str, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            del name, key
            empty = torch.empty(shape, dtype=dtype, device=self._device.type if shape else "cpu")
            return self._shard(empty) if shape else empty

        return allocate

    @torch.no_grad()
    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        engine = _engine_of(optimizer, models)
        if engine.plugin.no_load_optim:
            return
        # 1. Load the groups and the number of steps.
        check_groups([group["params"] for group in state["param_groups"]], engine.optimizer_names)
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        slots, known = find_slots(engine), state["state"]
        if known:
            engine.steps = max(int(entry.get(_STEP, 1)) for entry in known.values())
        # 2. Load the state of this rank's part of each weight.
        for row, entries in _iter_known(engine, known):
            if (slot := slots.get(row.parameter)) is None:
                continue
            own_state = slot.optimizer.state[slot.master]
            for key in entries[0].keys() - {_STEP}:
                if isinstance(entries[0][key], Tensor):
                    own = slot.own(row.shard([entry[key] for entry in entries], engine.groups))
                    into = own_state.setdefault(key, torch.zeros_like(slot.master))
                    into.copy_(own.reshape(into.shape))
            if (step := entries[0].get(_STEP)) is None:
                continue
            if type(slot.optimizer).__module__.startswith("torch."):
                own_state[_STEP] = torch.tensor(float(step), device="cpu")
                continue
            for group in slot.optimizer.param_groups:  # PyTorch counts steps by parameter.
                group[_STEP] = int(step)

    def group_names(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> Sequence[Sequence[str]]:
        return _engine_of(optimizer, models).optimizer_names

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        self.load_optimizer(optimizer, models, state_by_name(state, self.group_names(optimizer, models)))

    def sources(self, model: nn.Module) -> Sequence[ParameterSource]:
        if not isinstance(model, MegatronEngine):
            return super().sources(model)
        known = dict(model.source.named_parameters(remove_duplicate=False))
        tensors = {name: value for name, value in self.model_tensors(model).items() if name in known}
        return [source_of(names, value) for names, value in group_tied_names(tensors)]

    def _shard(self, value: Tensor) -> Tensor:
        """Return this rank's shard of a tensor that every rank has."""
        group: Any = dist.group.WORLD
        mesh = DeviceMesh.from_group(group, self._device.type)
        return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)


def _engine_of(optimizer: Optimizer, models: Sequence[nn.Module]) -> MegatronEngine:
    for model in models:
        if isinstance(model, MegatronEngine) and model.optimizer is not None:
            return model
    raise CheckpointError(f"{type(optimizer).__name__} was not prepared with a model by Megatron.")


def find_aliases(engine: MegatronEngine) -> dict[str, tuple[str, ...]]:
    """Map the first name of every weight of transformers to all its names: tied weights have several."""
    _check_names(engine)
    weights = dict(engine.source.named_parameters(remove_duplicate=False))
    return {names[0]: names for names, _ in group_tied_names(weights)}


def _check_names(engine: MegatronEngine) -> None:
    if engine.family is None:
        raise UnsupportedError(
            "The model was made by custom_model_provider_function: Megatron does not know what its weights "
            "are called in transformers. Read its own, model.chunks[i].module.state_dict()."
        )


_STEP = "step"


def _full_value(
    slots: Mapping[nn.Parameter, OptimizerSlot], parameter: nn.Parameter, key: str | None
) -> Tensor:
    """Return a state, or the master weight, in the parameter's shape; slices are all-reduced."""
    slot, value = slots.get(parameter), None
    if slot is not None:
        value = slot.master.detach() if key is None else slot.optimizer.state[slot.master].get(key)
        if value is not None and slot.start is None:
            return value
    full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if slot is not None and value is not None:
        slot.own(full).copy_(value.reshape(-1))
    dist.all_reduce(full, group=core("parallel_state").get_data_parallel_group(with_context_parallel=True))
    return full.view_as(parameter)


def _list_weights(engine: MegatronEngine) -> dict[tuple[str, ...], tuple[int, bool, list[PlacedWeight]]]:
    """Return, by names and in the same order on all ranks, a weight's first stage and this rank's rows.

    The number of the stage is followed by whether the weight is trained. The last stage has a copy of a tied
    weight.
    """
    groups = engine.groups
    stages: list[Any] = [[(row.names, row.parameter.requires_grad) for row in engine.placed]]
    if groups.pipeline > 1:
        own, stages = stages[0], [None] * groups.pipeline
        dist.all_gather_object(stages, own, group=core("parallel_state").get_pipeline_model_parallel_group())
    weights: dict[tuple[str, ...], tuple[int, bool, list[PlacedWeight]]] = {}
    for stage, rows in enumerate(stages):
        for names, is_trained in rows:
            weights.setdefault(names, (stage, is_trained, []))
    for row in engine.placed:
        weights[row.names][2].append(row)
    return weights


@torch.no_grad()
def gather(
    engine: MegatronEngine,
    value_of: Callable[[PlacedWeight], Tensor],
    dtype: torch.dtype,
    *,
    trained: bool = False,
) -> Iterator[dict[str, Tensor]]:
    """Yield weights under the names of transformers, gathered from all stages and tensor-parallel ranks.

    Every rank iterates over all. A tied weight is yielded once. `value_of` returns the tensor to gather, of
    the parameter's shape: it is called just before, on all ranks that have a shard of it. With `trained`,
    weights that are not trained are skipped.
    """
    groups, state = engine.groups, core("parallel_state")
    shapes = {name: parameter.shape for name, parameter in engine.source.named_parameters()}
    for names, (stage, is_trained, rows) in _list_weights(engine).items():
        if trained and not is_trained:
            continue
        if stage == groups.pipeline_rank:
            packing, value = rows[0].packing, value_of(rows[0]).to(dtype).contiguous()
            shards = [value]
            if packing.dim is not None and groups.tensor > 1:
                shards = [torch.empty_like(value) for _ in range(groups.tensor)]
                dist.all_gather(shards, value, group=state.get_tensor_model_parallel_group())
            tensors = [tensor.contiguous() for tensor in packing.unpack(packing.join(shards))]
            del value, shards
        else:
            device = engine.placed[0].parameter.device
            tensors = [torch.empty(shapes[name], dtype=dtype, device=device) for name in names]
        for tensor in tensors if groups.pipeline > 1 else ():
            dist.broadcast(tensor, group_src=stage, group=state.get_pipeline_model_parallel_group())
        yield dict(zip(names, tensors, strict=True))
        del tensors


def _iter_known(engine: MegatronEngine, known: StateDict) -> Iterator[tuple[PlacedWeight, list[Any]]]:
    """Yield this rank's rows, with the full values of their weights; all ranks gather all of them."""
    for names, (_, _, rows) in _list_weights(engine).items():
        if all(name in known for name in names):
            values = [_full(known[name]) for name in names]
            for row in rows:
                yield row, values


def _full(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _full(entry) for key, entry in sorted(value.items())}
    return value.full_tensor() if isinstance(value, DTensor) else value


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

    def own(self, value: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the parameter's shape."""
        if self.start is None:
            return value
        return value.reshape(-1)[self.start : self.start + self.master.numel()]


def find_slots(engine: MegatronEngine) -> dict[nn.Parameter, OptimizerSlot]:
    """Return this rank's slots by parameter; a data-parallel rank may have none for some."""
    slots: dict[nn.Parameter, OptimizerSlot] = {}
    for optimizer in () if engine.optimizer is None else engine.optimizer.chained_optimizers:
        torch_optimizer, groups = optimizer.optimizer, optimizer.optimizer.param_groups
        if isinstance(optimizer, core("optimizer").DistributedOptimizer):
            for parameter, (group, index) in optimizer.model_param_group_index_map.items():
                start = optimizer._get_model_param_range_map(parameter)["param"].start
                master = groups[group]["params"][index]
                slots[parameter] = OptimizerSlot(master=master, optimizer=torch_optimizer, start=start)
            continue
        stepped = {id(tensor) for group in groups for tensor in group["params"]}
        for row in engine.placed:
            master = getattr(row.parameter, "main_param", row.parameter)
            if id(master) in stepped:
                slots[row.parameter] = OptimizerSlot(master=master, optimizer=torch_optimizer)
    return slots


@frozen
class PlacedWeight:
    """A parameter of this rank, and the weights of transformers of which it is a shard."""

    parameter: nn.Parameter
    names: tuple[str, ...]
    packing: Packing

    def shard(self, tensors: Sequence[Tensor], groups: Groups) -> Tensor:
        """Return this rank's shard of weights of transformers."""
        return self.packing.shard(self.packing.pack(tensors), groups.tensor_rank, groups.tensor)


def find_rows(stages: Sequence[nn.Module], weights: Sequence[Weight]) -> list[PlacedWeight]:
    """Find the row of every parameter of this rank."""
    rows = {row.parameter: row for row in weights}
    placed: list[PlacedWeight] = []
    for stage in stages:
        for local_name, parameter in stage.named_parameters():
            name, layer = plain_name(local_name)
            if layer is not None:  # a stage counts its layers from 0
                modules: Any = stage.get_submodule(name.partition(".{layer}")[0])
                layer = modules[layer].layer_number - 1
            row = rows.get(name)
            if row is None:
                raise SettingsError(
                    f"The parameter {local_name!r} of Megatron's model has no row in its family: add one."
                )
            if row.packing.dim is not None:  # megatron-core sets it only if it initialises weights.
                vars(parameter).setdefault("tensor_model_parallel", True)
            names = tuple(pattern.format(layer=layer) for pattern in row.names)
            placed.append(PlacedWeight(parameter=parameter, names=names, packing=row.packing))
    return placed


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
    for row in placed:
        row.parameter.copy_(row.shard([state[name] for name in row.names], groups))


def drop_values(model: nn.Module) -> None:
    """Move the parameters of a model to the meta device, in place; tied ones stay tied."""
    dropped: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty_like(parameter, device="meta")
            new = dropped.setdefault(id(parameter), nn.Parameter(empty, parameter.requires_grad))
            dropped[id(new)] = new
            setattr(module, name, new)
