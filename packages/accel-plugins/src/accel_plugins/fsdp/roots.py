"""FSDP1's modules: the registry of roots, the original names of their parameters, and sharded states."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.optim import Optimizer

from accel_ops.modules import extract_model_from_parallel, without_compiler
from accel_plugins.dcp.tensors import TensorShards, allocator_like, check_groups, plain_name
from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from accel_plugins.dcp.protocol import StateAllocator, StateForm
    from accel_plugins.roles import StateDict


class FsdpRoots:
    """Weak set of the root FSDP1 modules, in the order in which they were added, the same on every rank."""

    def __init__(self) -> None:
        self._roots: WeakKeyDictionary[FullyShardedDataParallel, None] = WeakKeyDictionary()

    def add(self, root: FullyShardedDataParallel) -> None:
        """Add a root module."""
        self._roots[root] = None

    def of_model(self, model: nn.Module) -> FullyShardedDataParallel | None:
        """Return the root module of a model; `None` if it was not wrapped."""
        outer = without_compiler(model)
        if isinstance(outer, FullyShardedDataParallel):
            return outer
        core = extract_model_from_parallel(model, keep_torch_compile=False)
        return next((root for root in self._roots if root.module is core), None)

    def of_parameters(self, parameters: Iterable[Tensor]) -> list[FullyShardedDataParallel]:
        """Return the root modules that have one of the parameters."""
        ids = {id(one) for one in parameters}
        return [root for root in self._roots if any(id(one) in ids for one in root.parameters())]

    def shard_state(self, optimizer: Optimizer) -> None:
        """Shard, in place, the state that an optimizer has for full parameters, with `use_orig_params`."""
        for root in self._roots:
            for _, flat in _flat_parameters(root):
                for parameter, shape, shard in zip(
                    flat._params or (), flat._shapes, flat._shard_param_infos, strict=False
                ):
                    state: dict[str, Any] = optimizer.state.get(parameter, {})
                    for key, value in state.items():
                        if getattr(value, "shape", None) == shape != parameter.shape:
                            begin, end = (shard.intra_param_start_idx or 0, shard.intra_param_end_idx)
                            local = value.flatten()[begin : end + 1 if shard.in_shard else begin]
                            state[key] = local.to(parameter, copy=True)

    def of_optimizer(
        self, optimizer: Optimizer, models: Sequence[nn.Module]
    ) -> dict[str, FullyShardedDataParallel]:
        """Return the root modules of the models that an optimizer trains, by the prefix of their names in it.

        As for `parameter_names`, it is empty for one model, and the model's index for each of several.
        """
        owned = {id(one) for group in optimizer.param_groups for one in group["params"]}
        roots = {
            index: root
            for index, model in enumerate(models)
            if (root := self.of_model(model)) is not None
            and any(id(one) in owned for one in root.parameters())
        }
        return {f"{index}." if len(roots) > 1 else "": root for index, root in roots.items()}


@contextmanager
def _trained_by(optimizer: Optimizer, root: FullyShardedDataParallel) -> Generator[Optimizer]:
    """Yield an optimizer of the parameters of one model; within the block the model's others are frozen.

    torch wants every trained parameter of a model in the one optimizer whose state is converted.
    """
    inside = {id(one) for one in root.parameters()}
    own = [one for group in optimizer.param_groups for one in group["params"] if id(one) in inside]
    ids = {id(one) for one in own}
    frozen = [one for one in root.parameters() if one.requires_grad and id(one) not in ids]
    part = Optimizer([{"params": own}], {})
    part.state.update({one: optimizer.state[one] for one in own if one in optimizer.state})
    for one in frozen:
        one.requires_grad = False
    try:
        yield part
    finally:
        for one in frozen:
            one.requires_grad = True


@contextmanager
def sharded_states(root: FullyShardedDataParallel) -> Generator[None]:
    """Within the block, state dicts of a model and its optimizer are sharded, as DTensors."""
    with (
        suppress_fsdp1_warnings(),
        FullyShardedDataParallel.state_dict_type(
            root,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        ),
    ):
        yield


@contextmanager
def suppress_fsdp1_warnings() -> Generator[None]:
    """Suppress FSDP1's deprecation warnings, and those about calls that torch makes itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings(
            "ignore", message=".*(NO_SHARD|_get_pg_default_device|Multiple backends are registered)"
        )
        yield


def parameters_by_name(root: FullyShardedDataParallel, *, flat: bool) -> dict[str, Tensor]:
    """Return FSDP1's parameters by the original names: flat ones by those of all that they consist of."""
    if not flat:
        return {plain_name(name): one for name, one in root.named_parameters(remove_duplicate=False)}
    return {prefix + inner: one for prefix, one in _flat_parameters(root) for inner in one._fqns}


def tied_names(root: FullyShardedDataParallel) -> dict[str, str]:
    """Map the further names of tied weights to the name under which FSDP1 has the weight."""
    found: dict[str, str] = {}
    for prefix, flat in _flat_parameters(root):
        for name, _, inside, first, _, first_inside in flat._shared_param_infos:
            found[prefix + _joined(inside, name)] = prefix + _joined(first_inside, first)
    return found


def _flat_parameters(root: FullyShardedDataParallel) -> Iterator[tuple[str, Any]]:
    """Yield each flat parameter with the name prefix of its module."""
    for name, module in root.named_modules():
        handle: Any = getattr(module, "_handle", None)  # only FSDP modules have one
        if isinstance(module, FullyShardedDataParallel) and handle is not None:
            yield plain_name(f"{name}.") if name else "", handle.flat_param


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp1Shards:
    """Sharded state dicts of FSDP1, with the original parameters instead of the flat ones."""

    roots: FsdpRoots
    form_now: Callable[[], StateForm]
    _plain: TensorShards = field(default_factory=TensorShards, init=False)

    def form(self) -> StateForm:
        """Return the form that `save_state` writes."""
        return self.form_now()

    def model_tensors(self, model: nn.Module) -> StateDict:
        """Return the sharded state dict of the model; tied weights are one object."""
        root = self.roots.of_model(model)
        if root is None:
            return self._plain.model_tensors(model)
        with sharded_states(root):
            state = {plain_name(name): value for name, value in root.state_dict().items()}
        # FSDP1 returns tied weights as several tensors; make them one object again.
        tied = {name: first for name, first in tied_names(root).items() if {name, first} <= state.keys()}
        return state | {name: state[first] for name, first in tied.items()}

    def load_model(self, model: nn.Module, state: StateDict, **options: Any) -> None:
        """Load a sharded state dict; one name of tied weights is enough."""
        root = self.roots.of_model(model)
        if root is None:
            self._plain.load_model(model, state, **options)
            return
        complete = dict(state)
        for name, first in tied_names(root).items():  # files have one name of tied weights
            known = next((one for one in (first, name) if one in state), None)
            if known is not None:
                complete[name] = complete[first] = state[known]
        with sharded_states(root):
            root.load_state_dict(complete, **options)

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        """Return the sharded state dict of the optimizer."""
        roots = self.roots.of_optimizer(optimizer, models)
        if not roots:
            return self._plain.optimizer_tensors(optimizer, models)
        _check_flat(optimizer.state_dict()["state"].values(), type(optimizer).__qualname__)
        state: StateDict = {}
        for prefix, root in roots.items():
            with sharded_states(root), _trained_by(optimizer, root) as part:
                found = FullyShardedDataParallel.optim_state_dict(root, part)["state"]
            state |= {prefix + name: values for name, values in found.items()}
        return {"state": state, "param_groups": self._named_groups(optimizer, roots)}

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        """Allocate tensors sharded like FSDP1's sharded state dict."""
        roots = self.roots.of_optimizer(optimizer, models)
        if not roots:
            return self._plain.state_allocator(optimizer, models)
        return allocator_like(
            {
                prefix + name: tensor
                for prefix, root in roots.items()
                for name, tensor in self.model_tensors(root).items()
            }
        )

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        """Load a sharded state dict of the optimizer."""
        roots = self.roots.of_optimizer(optimizer, models)
        if not roots:
            self._plain.load_optimizer(optimizer, models, state)
            return
        names = self._named_groups(optimizer, roots)
        check_groups(*[[group["params"] for group in groups] for groups in (state["param_groups"], names)])
        every = [one for group in optimizer.param_groups for one in group["params"]]
        numbers = {id(one): number for number, one in enumerate(every)}
        local: dict[int, Any] = {}
        for prefix, root in roots.items():
            with sharded_states(root), _trained_by(optimizer, root) as part:
                own = {
                    name.removeprefix(prefix): values
                    for name, values in state["state"].items()
                    if name.startswith(prefix)
                }
                groups = [{"params": [*own]}]
                loaded = FullyShardedDataParallel.optim_state_dict_to_load(
                    root, part, {"state": own, "param_groups": groups}
                )["state"]
            parameters = part.param_groups[0]["params"]
            local |= {numbers[id(parameters[number])]: values for number, values in loaded.items()}
        counts = iter(range(len(every)))
        groups = [
            {**group, "params": [next(counts) for _ in now["params"]]}
            for group, now in zip(state["param_groups"], optimizer.param_groups, strict=True)
        ]
        optimizer.load_state_dict({"state": local, "param_groups": groups})

    def _named_groups(
        self, optimizer: Optimizer, roots: Mapping[str, FullyShardedDataParallel]
    ) -> list[dict[str, Any]]:
        """Return the optimizer's groups with the original names of their parameters."""
        names: dict[int, list[str]] = {}
        for prefix, root in roots.items():
            names |= {id(one): [prefix + plain_name(name)] for name, one in root.named_parameters()}
            for inside, flat in _flat_parameters(root):
                names[id(flat)] = [prefix + inside + name for name in flat._fqns]
        return [
            {**group, "params": [name for one in group["params"] for name in names[id(one)]]}
            for group in optimizer.param_groups
        ]


def _check_flat(states: Iterable[Mapping[str, Any]], kind: str) -> None:
    """Refuse states with dictionaries inside, of which torch wants the same on every rank."""
    for values in states:
        for key, value in values.items():
            if isinstance(value, dict):
                raise UnsupportedError(
                    f"{kind} keeps {key!r} for this rank's shards, which torch cannot gather from FSDP1: its "
                    "state cannot be saved. Save the model alone, with save_model(), or use an optimizer "
                    "whose state is tensors of the parameters' shapes."
                )
