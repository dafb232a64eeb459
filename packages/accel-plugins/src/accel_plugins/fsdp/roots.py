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

from accel_ops.modules import extract_model_from_parallel, without_compiler
from accel_plugins.dcp.tensors import TensorShards, allocator_like, check_groups, plain_name
from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

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
    ) -> FullyShardedDataParallel | None:
        """Return the root module of the model that an optimizer trains."""
        owned = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for model in models:
            root = self.of_model(model)
            if root is not None and any(id(one) in owned for one in root.parameters()):
                return root
        return None


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
        root = self.roots.of_optimizer(optimizer, models)
        if root is None:
            return self._plain.optimizer_tensors(optimizer, models)
        nested = next(
            (
                key
                for values in optimizer.state_dict()["state"].values()
                for key, value in values.items()
                if isinstance(value, dict)
            ),
            None,
        )
        if nested is not None:
            raise UnsupportedError(
                f"{type(optimizer).__qualname__} keeps {nested!r} for this rank's shards, which torch cannot "
                "gather from FSDP1: its state cannot be saved. Save the model alone, with save_model(), or "
                "use an optimizer whose state is tensors of the parameters' shapes."
            )
        with sharded_states(root):
            return FullyShardedDataParallel.optim_state_dict(root, optimizer)

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        """Allocate tensors sharded like FSDP1's sharded state dict."""
        root = self.roots.of_optimizer(optimizer, models)
        if root is None:
            return self._plain.state_allocator(optimizer, models)
        return allocator_like(self.model_tensors(root))

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        """Load a sharded state dict of the optimizer."""
        root = self.roots.of_optimizer(optimizer, models)
        if root is None:
            self._plain.load_optimizer(optimizer, models, state)
            return
        with sharded_states(root):
            now = FullyShardedDataParallel.optim_state_dict(root, optimizer)
            check_groups(*[[group["params"] for group in one["param_groups"]] for one in (state, now)])
            with suppress_fsdp1_warnings():
                loaded = FullyShardedDataParallel.optim_state_dict_to_load(root, optimizer, state)
        optimizer.load_state_dict(loaded)
