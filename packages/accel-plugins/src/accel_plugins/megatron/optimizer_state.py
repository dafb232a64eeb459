"""Full optimizer states and master weights of models that Megatron trains, under the names of transformers.

megatron-core keeps one of three: PyTorch's optimizer on the parameters; on float32 copies of them; or, with
the distributed optimizer, on a slice of each parameter's flat float32 copy, one slice per data-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_plugins.megatron.library import core
from accel_plugins.megatron.weights import gather

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_plugins.megatron.engine import MegatronEngine
    from accel_plugins.megatron.weights import Placed
    from accel_plugins.roles import StateDict

_STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
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


def slots_of(engine: MegatronEngine) -> dict[nn.Parameter, Slot]:
    """Return this rank's slots by parameter; a data-parallel rank may have none for some."""
    optimizers = core("optimizer")
    found: dict[nn.Parameter, Slot] = {}
    for one in engine.optimizer.chained_optimizers:
        if isinstance(one, optimizers.DistributedOptimizer):
            for parameter, (group, index) in one.model_param_group_index_map.items():
                found[parameter] = Slot(
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
                found[placed.parameter] = Slot(master=master, optimizer=one.optimizer)
    return found


def trained(engine: MegatronEngine) -> list[Placed]:
    """Return the parameters that the optimizer steps."""
    return [one for one in engine.placed if one.parameter.requires_grad]


def _full_shape(slots: Mapping[nn.Parameter, Slot], one: Placed, key: str | None) -> Tensor:
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
    engine: MegatronEngine, slots: Mapping[nn.Parameter, Slot], one: Placed, state: Mapping[str, Tensor]
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


def restore(engine: MegatronEngine, one: Placed, slot: Slot, entries: Sequence[Any]) -> None:
    """Load the state of one parameter."""
    for key, value in entries[0].items():
        if key == _STEP:
            _set_step(slot, float(value))
        elif isinstance(value, torch.Tensor):
            slot.write(key, _local(engine, one, [entry[key] for entry in entries]))


def _set_step(slot: Slot, step: float) -> None:
    if isinstance(slot.optimizer, torch.optim.Optimizer) and type(slot.optimizer).__module__.startswith(
        "torch."
    ):
        slot.state[_STEP] = torch.tensor(step)
        return
    for group in slot.optimizer.param_groups:  # fused optimizers count for the group
        group[_STEP] = int(step)


def _agreed(slots: Mapping[nn.Parameter, Slot]) -> tuple[list[str], float | None]:
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


def _local(engine: MegatronEngine, one: Placed, tensors: Sequence[Tensor]) -> Tensor:
    packed = one.packing.pack(tensors)
    own = one.packing.shard(packed, engine.groups.tensor_rank, engine.groups.tensor)
    return own.to(device=one.parameter.device, dtype=torch.float32).reshape(one.parameter.shape)


def _gathered(
    engine: MegatronEngine,
    placed: Sequence[Placed],
    tensor_of: Callable[[Placed], Tensor],
    dtype_of: Callable[[Placed], torch.dtype],
) -> Iterator[dict[str, Tensor]]:
    family: Any = engine.family
    return gather(placed, family.weights(engine.config), engine.groups, tensor_of, dtype_of)
