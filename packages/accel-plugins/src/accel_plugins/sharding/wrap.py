"""Shard models and optimizers in place: move to meta, shard, materialise from rank 0, remap optimizers."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import ChainMap, Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel_ops.modules import model_has_dtensor, without_compiler
from accel_plugins.sharding.shards import ShardedStates, gather_full_tensor, group_tied_names, shard_like
from accel_plugins.sharding.state import strip_wrapper_prefixes
from accel_plugins.sharding.step import clip_norm, clip_values, one_mesh_per_group
from accel_plugins.strategy import (
    PLAIN_FEATURES,
    Bundle,
    Feature,
    Optimizers,
    Parameters,
    PrecisionPolicy,
    Strategy,
)
from accel_plugins.unsharded import check_not_lazy, move_to_device
from accel_state import hang_monitor
from accel_state.errors import CheckpointMismatchError, SettingsError, UnsupportedError, some_of
from accel_state.runtime import Runtime
from accel_state.torch_private import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from accel_state.settings.model import Settings

logger = logging.getLogger(__name__)

_ORIGIN = "_accel_origin"
_models_marked = itertools.count()


def mark_originals(model: nn.Module) -> int:
    """Note on each parameter of a model, which will be replaced, the model's number and its first name."""
    number = next(_models_marked)
    for name, parameter in model.named_parameters():
        vars(parameter)[_ORIGIN] = number, name
    return number


class ParamRemap:
    """What became of marked parameters, for optimizers prepared with their model or later."""

    def __init__(self) -> None:
        # For each sharded model, what its original parameters became; None if only other ranks have it.
        self._models: WeakKeyDictionary[nn.Module, dict[Any, Tensor | None]] = WeakKeyDictionary()
        self._optimizers: WeakSet[Optimizer] = WeakSet()

    def has(self, model: nn.Module) -> bool:
        """Return whether a model is already sharded; FSDP2's are also by an earlier `Accelerator`."""
        return model in self._models or isinstance(model, FSDPModule)

    def knows(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer was prepared before."""
        return optimizer in self._optimizers

    def replaces(self, parameter: Tensor) -> bool:
        """Return whether a parameter is an original that was replaced by a sharded one, or removed."""
        return vars(parameter).get(_ORIGIN) in self._known

    @property
    def _known(self) -> ChainMap[Any, Tensor | None]:
        return ChainMap(*self._models.values())

    def check(self, optimizers: Iterable[Optimizer], models: Iterable[nn.Module]) -> None:
        """Check that the parameters of optimizers belong to prepared models."""
        owned = {id(parameter) for model in (*models, *self._models) for parameter in model.parameters()}
        for optimizer in optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            unknown = [p for p in parameters if id(p) not in owned and not self.replaces(p)]
            if unknown:
                raise SettingsError(
                    f"{len(unknown)} of the {len(parameters)} parameters of {type(optimizer).__qualname__}, "
                    f"the first of shape {tuple(unknown[0].shape)}, belong to no model that is prepared with "
                    "it or was before: they would not be trained. Create the optimizer from "
                    "model.parameters() of the model that you pass to prepare(), and pass both."
                )

    def add(self, model: nn.Module, number: int, now: Mapping[str, Tensor | None]) -> None:
        """Add a sharded model: what its parameters became, by their first names when they were marked."""
        known = self._models.setdefault(model, {})
        for name, parameter in now.items():
            if parameter is None or vars(parameter).get(_ORIGIN) != (number, name):
                known[number, name] = parameter

    def add_as_is(self, model: nn.Module) -> None:
        """Add a model whose parameters stay."""
        self._models.setdefault(model, {})

    def switch(self, optimizer: Optimizer) -> None:
        """Replace an optimizer's original parameters by the sharded ones, and shard its state."""
        known = self._known
        mapping: dict[Tensor, Tensor] = {}
        for group in optimizer.param_groups:
            present: list[Tensor] = []
            for parameter in group["params"]:
                new = known.get(vars(parameter).get(_ORIGIN), parameter)
                if new is None:
                    optimizer.state.pop(parameter, None)
                    continue
                present.append(parameter)
                if new is not parameter:
                    mapping[parameter] = new
            group["params"][:] = present
        totals = Counter(id(new) for new in known.values())
        for new, count in Counter(map(id, mapping.values())).items():
            if count < totals[new]:
                raise SettingsError(
                    f"{type(optimizer).__qualname__} has {count} of the {totals[new]} parameters of one "
                    "block, of which FSDP1 makes one flat parameter: it would train all of them. Set "
                    "FullyShardedDataParallelPlugin(use_orig_params=True)."
                )
        self._optimizers.add(optimizer)
        switch_parameters(optimizer, mapping)


class ShardedStrategy(Strategy):
    """Shards models in place; they stay the same objects, with the same names. Subclasses set the attributes.

    Attributes:
        stages: Functions that shard a model in place, called in this order.
        validators: Functions that raise `ValueError` on this rank for a model that cannot be sharded.
        parameters_on: The device of sharded parameters.
        master_weights: The mixed precision under which trained parameters are cast to float32; `None` to keep
            all dtypes.
        only_main_has_values: Whether models of ranks other than 0 may be on the meta device.
        mesh: The mesh of the run: parameters that `parallelize_module` has sharded over it keep their shards.
        remap: What became of the parameters of models.
    """

    features = PLAIN_FEATURES - {Feature.CUSTOM_DEVICE_PLACEMENT, Feature.UNEVEN_INPUTS}

    def __init__(
        self, settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
    ) -> None:
        super().__init__(settings, runtime, precision, handlers)
        self.stages: Sequence[Callable[[nn.Module], None]] = ()
        self.validators: Sequence[Callable[[nn.Module], None]] = ()
        self.parameters_on = runtime.device
        self.master_weights: str | None = None
        self.only_main_has_values = False
        self.remap = ParamRemap()
        self.states = ShardedStates(runtime.device)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None]:
        inner = without_compiler(model)
        if not isinstance(inner, FSDPModule):
            yield
            return
        inner.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            inner.set_requires_gradient_sync(True)

    def join(
        self, joinables: Sequence[Any], *, divide_by_initial_world_size: bool = True
    ) -> AbstractContextManager[None]:
        del joinables, divide_by_initial_world_size
        raise UnsupportedError(
            f"join(): under the strategy {self.name!r} every rank has parts of the parameters, so no rank "
            "can finish early. Use even_batches=True."
        )

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        with hang_monitor.collective_scope("backward"):
            super().backward(loss, accumulation=accumulation, sync=sync, **kwargs)

    def clip_grad_norm(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2.0, *, optimizers: Optimizers = ()
    ) -> Tensor:
        return clip_norm(self.unscale(parameters, optimizers), max_norm, norm_type)

    def clip_grad_value(
        self, parameters: Parameters, clip_value: float, *, optimizers: Optimizers = ()
    ) -> None:
        clip_values(self.unscale(parameters, optimizers), clip_value)

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        with one_mesh_per_group(optimizer):
            return self.precision.step(optimizer, closure)

    def check(self, bundle: Bundle) -> None:
        """Reject models that cannot be sharded or that differ between ranks; all ranks raise if one does."""
        problem = ""
        models = [model for model in map(without_compiler, bundle.models) if not self.remap.has(model)]
        try:
            for model in models:
                self._validate(model)
            self.remap.check(bundle.optimizers, map(without_compiler, bundle.models))
        except ValueError as error:
            problem = str(error)
        reports = self.runtime.collectives.all_gather_object((problem, [*map(_digest, models)]))
        for rank, (text, _) in enumerate(reports):
            if text:
                raise SettingsError(text if text == problem else f"rank {rank}: {text}")
        for rank, (_, digests) in enumerate(reports):
            if digests != reports[0][1]:
                raise SettingsError(
                    f"prepare() got other models on rank {rank} than on rank 0: names, shapes or dtypes "
                    "of their parameters differ. Make the same models on every rank."
                )

    def wrap(
        self,
        bundle: Bundle,
        *,
        evaluation: bool = False,
        shard: Callable[[nn.Module], nn.Module] | None = None,
        load: Callable[..., Any] | None = None,
    ) -> Bundle:
        """Shard the models that are not sharded yet, and switch optimizers to the new parameters.

        Args:
            bundle: Models that `check` has let pass.
            evaluation: The models will never be trained.
            shard: Returns the model sharded and materialised; replaces the sharding of this class.
            load: Materialises a sharded model on the meta device, called as `load(model, full_state,
                cpu_offload=…)`; the full state is empty on ranks other than 0.
        """
        models = [*bundle.models]
        for index, model in enumerate(models):
            core = without_compiler(model)
            if self.remap.has(core):
                self.remap.add_as_is(core)
                continue
            if evaluation and not self.only_main_has_values:
                if model_has_dtensor(
                    core
                ):  # its optimizer may be prepared, as by the Trainer of transformers
                    self.remap.add_as_is(core)
                models[index] = move_to_device(
                    replace(bundle, models=[model], placements=()), self.runtime.device
                )[0]
            elif shard is not None:
                models[index] = self._shard_by(shard, core)
            else:
                self._wrap(core, bundle, load)
        for optimizer in bundle.optimizers:
            self.remap.switch(optimizer)
        return replace(bundle, models=models)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return without_compiler(model)

    def _shard_by(self, shard: Callable[[nn.Module], nn.Module], model: nn.Module) -> nn.Module:
        """Shard a model with a function of the caller."""
        number = mark_originals(model)
        marks = {name: vars(parameter) for name, parameter in model.named_parameters()}
        sharded = shard(model)
        named = sharded.named_parameters(remove_duplicate=False)
        now = {strip_wrapper_prefixes(name): parameter for name, parameter in named}
        # Where the function calls this class, the originals are marked once more, and added there.
        names = [name for name, mark in marks.items() if mark[_ORIGIN] == (number, name)]
        own = {name: strip_wrapper_prefixes(name) for name in names}
        self.remap.add(sharded, number, {name: now[key] for name, key in own.items() if key in now})
        return sharded

    def _wrap(self, model: nn.Module, bundle: Bundle, load: Callable[..., Any] | None) -> None:
        is_main = self.runtime.topology.is_main
        if self.master_weights is not None and is_main:
            warn_about_master_weights(model, self.master_weights)
        # 1. Move it to meta, and remove its parameters from the optimizers, which frees their memory.
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        number = mark_originals(model)
        values = to_meta(
            model,
            keep=is_main,
            device=self.runtime.device,
            mesh=self.mesh,
            dtype_of=None if self.master_weights is None else dtype_to_train,
        )
        detached: list[tuple[Optimizer, list[Tensor], int, str, Any]] = []
        for optimizer in bundle.optimizers:
            for parameters in (group["params"] for group in optimizer.param_groups):
                for index, parameter in enumerate(parameters):
                    if name := names.get(id(parameter)):
                        state = optimizer.state.pop(parameter, None)
                        detached.append((optimizer, parameters, index, name, state))
                        parameters[index] = torch.empty(0, device="cpu")
        # 2. Shard it, and materialise its shards.
        aliases = values.names
        for shard in self.stages:
            shard(model)
        if load is not None:
            on_cpu = self.parameters_on != self.runtime.device
            load(model, {**values.parameters, **values.buffers}, cpu_offload=on_cpu)
        values = _without_materialized(model, values)
        materialize_from_rank0(model, values, self.runtime, parameters_on=self.parameters_on)
        now = dict(model.named_parameters(remove_duplicate=False))
        # 3. Put the sharded parameters into the optimizers, with their sharded states.
        present = {name: next((alias for alias in aliases[name] if alias in now), None) for name in aliases}
        for optimizer, parameters, index, name, state in detached:
            own = present[name]
            if own is None:
                vars(parameters[index])[_ORIGIN] = number, name
                continue
            parameters[index] = now[own]
            if state is not None:
                optimizer.state[now[own]] = _shard_state(state, now[own])
        self.remap.add(
            model, number, {name: None if own is None else now[own] for name, own in present.items()}
        )

    def _validate(self, model: nn.Module) -> None:
        may_be_empty = self.only_main_has_values and not self.runtime.topology.is_main
        check_not_lazy(model)
        for name, parameter in model.named_parameters():
            kind = type(parameter)
            if kind.__module__.startswith("bitsandbytes."):  # as plain tensors they would lose their scales
                raise SettingsError(
                    f"{type(model).__name__}: the parameter {name!r} is quantised ({kind.__name__} of "
                    "bitsandbytes) and cannot be sharded. Train the model with DDP, or load it in its own "
                    "dtype."
                )
            if parameter.is_meta and not may_be_empty:
                raise SettingsError(
                    f"{type(model).__name__}: the parameter {name!r} is on the meta device on "
                    f"rank {self.runtime.topology.rank}. Load the weights there before prepare(); with "
                    "FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True), rank 0 alone needs them."
                )
        for validate in self.validators:
            validate(model)


def _digest(model: nn.Module) -> str:
    tensors = (*model.named_parameters(), *model.named_buffers())
    text = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(slots=True)
class FullModelState:
    """State of a model before it was moved to meta.

    Args:
        parameters: Full parameters by name, on the rank that keeps them; tied ones by their first name.
        names: All names of each parameter and buffer, by the first one.
        retained: First names of the parameters that keep their shards.
        hooks: Gradient hooks of each parameter that has some, as torch keeps them.
    """

    parameters: dict[str, Tensor] = field(default_factory=dict[str, Any])
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Any])
    shapes: dict[str, torch.Size] = field(default_factory=dict[str, Any])
    dtypes: dict[str, torch.dtype] = field(default_factory=dict[str, Any])
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict[str, Any])
    names: dict[str, list[str]] = field(default_factory=dict[str, Any])
    retained: set[str] = field(default_factory=set[str])
    hooks: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, Any])


def to_meta(
    model: nn.Module,
    *,
    keep: bool,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    dtype_of: Callable[[Tensor], torch.dtype] | None = None,
) -> FullModelState:
    """Move a model to the meta device in place, and return its state; names and ties are kept.

    Args:
        model: Any model; parameters that are sharded already are all-gathered, except over axes of `mesh`:
            these keep their shards, of which replicas get the first one's values.
        keep: Whether this rank keeps the full tensors.
        device: Device of the collectives.
        mesh: The mesh of the run, if it has one.
        dtype_of: Returns a parameter's new dtype; unchanged if `None`.
    """
    values = FullModelState()
    for kind, named in (
        (values.parameters, model.named_parameters(remove_duplicate=False)),
        (values.buffers, model.named_buffers(remove_duplicate=False)),
    ):
        first: dict[int, str] = {}
        for name, tensor in named:
            known = first.setdefault(id(tensor), name)
            values.names.setdefault(known, []).append(name)
            if known != name:
                continue
            values.dtypes[name], values.shapes[name] = tensor.dtype, tensor.shape
            if kind is values.parameters:
                if hook_of(tensor):
                    values.hooks[name] = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
                values.dtypes[name] = dtype_of(tensor) if dtype_of else tensor.dtype
            attributes = {} if _has_own_type(tensor) else dict(vars(tensor))
            attributes.pop(_ORIGIN, None)
            values.attributes[name] = attributes
            if _has_shards_of(mesh, tensor):
                values.retained.add(name)
                _broadcast_to_replicas(tensor, mesh)
                continue
            full = gather_full_tensor(tensor, device) if isinstance(tensor, DTensor) else tensor.detach()
            if keep:
                kind[name] = full
    _move_to_meta(model, values)
    return values


def _has_shards_of(mesh: Any, tensor: Any) -> bool:
    """Return whether a tensor is sharded over axes of a mesh."""
    if mesh is None or not isinstance(tensor, DTensor):
        return False
    own = tensor.device_mesh.mesh_dim_names or ()
    axes = tuple(axis for axis in mesh.mesh_dim_names if axis in own)
    return bool(axes) and axes == own and tensor.device_mesh == mesh[axes]


def _broadcast_to_replicas(tensor: Any, mesh: Any) -> None:
    """Give a shard the values of the first rank along each axis of the mesh that does not shard it."""
    shard = tensor.detach().to_local()
    for axis in mesh.mesh_dim_names:
        if axis not in tensor.device_mesh.mesh_dim_names:
            values = shard.contiguous()
            dist.broadcast(values, group=mesh.get_group(axis), group_src=0)
            shard.copy_(values)


def _move_to_meta(model: nn.Module, values: FullModelState) -> None:
    """Move a model to the meta device, except shards that it keeps; tied tensors stay tied.

    Not by `nn.Module.to`, which would move the originals that optimizers still have, too.
    """
    for name, names in values.names.items():
        tensor = _get_tensor(model, name)
        device = tensor.device if name in values.retained else "meta"
        if device != "meta" and values.dtypes[name] is tensor.dtype:
            continue
        moved = tensor.detach().to(device, values.dtypes[name])
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        for alias in names:
            put_tensor(model, alias, moved)


def materialize_from_rank0(
    model: nn.Module, values: FullModelState, runtime: Runtime, *, parameters_on: torch.device
) -> None:
    """Broadcast rank 0's tensors one by one; every rank materialises its shards, and frees the full tensor.

    Rank 0's values are used even if every rank has some: ranks with different seeds would otherwise train a
    mixture of several models. This costs one broadcast of the model in `prepare`, as with DDP. Buffers and
    collectives use the device of the run. A rank without a module takes part in its broadcasts.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, names in values.names.items():
        own = [alias for alias in names if alias in parameters or alias in buffers]
        available = values.parameters if name in values.parameters else values.buffers
        full, dtype = available.pop(name, None), values.dtypes[name]
        if full is None or not runtime.topology.is_main:
            full = torch.empty(values.shapes[name], dtype=dtype, device=runtime.device)
        else:
            full = full.to(runtime.device, dtype).contiguous()
        runtime.collectives.broadcast(full, src=0)
        if not own:
            continue
        is_parameter = own[0] in parameters
        like = parameters[own[0]] if is_parameter else buffers[own[0]]
        target = parameters_on if is_parameter else runtime.device
        shard = shard_like(full, like, target, keep_type=is_parameter)
        del full
        if is_parameter:
            shard = nn.Parameter(shard, requires_grad=like.requires_grad)
            vars(shard).update(values.attributes[name])
            if name in values.hooks:  # the same dictionaries, so that a handle still removes its hook
                shard._backward_hooks, shard._post_accumulate_grad_hooks = values.hooks[name]
        for alias in own:
            put_tensor(model, alias, shard)


def _without_materialized(model: nn.Module, values: FullModelState) -> FullModelState:
    """Return the state of the tensors still on the meta device; restore hooks and ties of the others."""
    present = dict(model.named_parameters(remove_duplicate=False))
    present |= dict(model.named_buffers(remove_duplicate=False))
    on_meta: dict[str, list[str]] = {}
    for name, names in values.names.items():
        own = [alias for alias in names if alias in present]
        if present[own[0]].is_meta if own else name not in values.retained:
            on_meta[name] = names
        if not own or name in on_meta:
            continue
        tensor = present[own[0]]
        vars(tensor).update(values.attributes[name])
        if name in values.hooks:
            tensor._backward_hooks, tensor._post_accumulate_grad_hooks = values.hooks[name]
        for alias in own[1:]:
            put_tensor(model, alias, tensor)
    return replace(values, names=on_meta)


def load_from_rank0(model: nn.Module, state: Any, runtime: Runtime, *, on_cpu: bool) -> None:
    """Load a full state dict of rank 0 into a sharded model, materialised or not.

    Raises:
        CheckpointMismatchError: It lacks a parameter; every rank raises.
    """
    values = FullModelState()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        values.names[name] = [name]
        values.dtypes[name], values.shapes[name] = tensor.dtype, tensor.shape
        values.attributes[name] = dict(vars(tensor))
    for names, _ in group_tied_names(dict(model.named_parameters(remove_duplicate=False))):
        values.names[names[0]] = [*names]
    missing = runtime.collectives.all_gather_object(
        [name for name in values.names if name not in (state or ())]
    )[0]
    parameters = dict(model.named_parameters())
    values.hooks = {
        name: (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
        for name, tensor in parameters.items()
        if hook_of(tensor)
    }
    absent = [repr(name) for name in missing if name in parameters]
    if absent:
        raise CheckpointMismatchError(
            f"the full state dict of rank 0 has no {some_of(absent)}, which {type(model).__name__} has: load "
            "that of the same model"
        )
    for name in missing:  # buffers that are not persistent are in no state dict
        values.names.pop(name)
    if runtime.topology.is_main:
        for name in values.names:
            (values.parameters if name in parameters else values.buffers)[name] = state[name]
    materialize_from_rank0(
        model, values, runtime, parameters_on=torch.device("cpu") if on_cpu else runtime.device
    )


def put_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the parameter or buffer with this name in a model."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf in (buffers := owner._buffers):  # `setattr` would refuse a parameter there
        buffers[leaf] = tensor
    else:
        setattr(owner, leaf, tensor)


def _get_tensor(model: nn.Module, name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)


def _has_own_type(tensor: Tensor) -> bool:
    """Return whether a tensor is of a library's wrapper type, for its kernels."""
    return is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor)


def switch_parameters(optimizer: Optimizer, mapping: Mapping[Tensor, Tensor]) -> None:
    """Replace parameters of an optimizer in place, by a mapping from old to new.

    Groups keep their lists; state is sharded like the new parameters. One parameter may replace several.
    """
    by_id = {id(old): new for old, new in mapping.items()}
    owner: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        parameters = {
            id(parameter): parameter for parameter in (by_id.get(id(old), old) for old in group["params"])
        }
        for old in group["params"]:
            new = by_id.get(id(old))
            if new is not None and old in optimizer.state:
                optimizer.state[new] = _shard_state(optimizer.state.pop(old), new)
        for key in parameters:
            if owner.setdefault(key, index) != index:
                raise SettingsError(
                    f"The parameters of one block are in the groups {owner[key]} and {index} of "
                    f"{type(optimizer).__qualname__}, but FSDP1 makes one flat parameter of them; set "
                    "FullyShardedDataParallelPlugin(use_orig_params=True)."
                )
        group["params"][:] = parameters.values()


def _shard_state(state: Any, like: Tensor) -> Any:
    if not isinstance(state, dict):
        return state
    items: dict[str, Any] = state
    return {
        name: shard_like(
            value.to(torch.promote_types(value.dtype, like.dtype)) if value.is_floating_point() else value,
            like,
        )
        if isinstance(value, Tensor) and value.shape == like.shape and not isinstance(value, DTensor)
        else value
        for name, value in items.items()
    }


def hook_of(parameter: Any) -> str | None:
    """Return the method by which a parameter's gradient hook was registered, if it has one.

    Example:
        >>> parameter = torch.nn.Parameter(torch.ones(1))
        >>> _ = parameter.register_hook(torch.neg)
        >>> hook_of(parameter)
        'register_hook'
    """
    if parameter._backward_hooks:
        return "register_hook"
    return "register_post_accumulate_grad_hook" if parameter._post_accumulate_grad_hooks else None


def dtype_to_train(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which an optimizer trains a parameter; frozen and quantised ones keep their dtype.

    Example:
        >>> dtype_to_train(torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)))
        torch.float32
        >>> dtype_to_train(torch.zeros(1, dtype=torch.bfloat16))
        torch.bfloat16
    """
    is_low = parameter.dtype in {torch.bfloat16, torch.float16}
    return torch.float32 if parameter.requires_grad and is_low else parameter.dtype


def warn_about_master_weights(model: nn.Module, precision: str) -> None:
    """Warn if parameters of a model will be trained in float32 instead of their own dtype."""
    low_precision = [
        parameter for parameter in model.parameters() if dtype_to_train(parameter) is not parameter.dtype
    ]
    if low_precision:
        dtypes = ", ".join(sorted({str(parameter.dtype) for parameter in low_precision}))
        logger.warning(
            "%d parameters of %s are in %s. With mixed_precision=%r they are trained and saved in "
            "float32, since small updates would be lost in their own dtype. Use mixed_precision='no' to "
            "keep the dtype.",
            len(low_precision),
            type(model).__name__,
            dtypes,
            precision,
        )
