"""Sharded states of models that Megatron trains: every rank has an even part of each weight of transformers.

The layout is independent of the sizes of Megatron's groups, so that any run and any strategy reads it.
Tensors are gathered, and read, one parameter at a time. megatron-core's `dist_checkpointing` is not used: it
names weights as megatron-core does, and unpickles its metadata.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from accel_plugins.dcp.protocol import StateForm
from accel_plugins.dcp.tensors import TensorShards, check_groups
from accel_plugins.megatron.engine import MegatronEngine
from accel_plugins.megatron.optimizer_state import (
    iter_masters,
    load_master,
    named_optimizer_state,
    restore,
    slots_of,
    trained,
)
from accel_plugins.megatron.weights import aliases_of, buffers_of, gather_plan, load
from accel_state.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_plugins.dcp.protocol import StateAllocator
    from accel_plugins.megatron.weights import Placed
    from accel_plugins.roles import StateDict


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
    engine: MegatronEngine, placed: Sequence[Placed], known: StateDict
) -> Iterator[tuple[Placed, StateDict]]:
    """Yield the parameters of this rank whose weights are all known, with these in full: a collective."""
    for names, own in _in_order(engine, placed):
        if all(name in known for name in names):
            full = {name: _full(known[name]) for name in names}
            yield from ((one, full) for one in own)


def _in_order(
    engine: MegatronEngine, placed: Sequence[Placed]
) -> Iterator[tuple[tuple[str, ...], list[Placed]]]:
    """Yield the names of every parameter of all stages, on every rank alike, and those parameters here."""
    own: dict[tuple[str, ...], list[Placed]] = {}
    for one in placed:
        own.setdefault(one.names, []).append(one)
    for names in dict.fromkeys(names for plan in gather_plan([*own], engine.groups) for names in plan):
        yield names, own.get(names, [])
