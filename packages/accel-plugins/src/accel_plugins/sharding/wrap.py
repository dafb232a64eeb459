"""Shard models and optimizers in place: move to meta, shard, materialise from rank 0, remap optimizers.

FSDP2, tensor parallelism and FSDP1 share the model wrapper, the map from original to sharded parameters,
float32 master weights, and the stepper for `DTensor`s on several meshes.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import get_total_norm
from torch.utils.weak import WeakIdKeyDictionary

from accel_ops.modules import without_compiler
from accel_ops.tree import by_device, local_parts
from accel_plugins.sharding.shards import gather_full_tensor, group_tied_names, shard_like
from accel_plugins.sharding.state import strip_wrapper_prefixes
from accel_plugins.strategy import PLAIN_FEATURES, Bundle, Feature, PrecisionPolicy
from accel_plugins.unsharded import TorchStepper, check_not_lazy, move_to_device
from accel_state import hang_monitor
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.frozen import frozen
from accel_state.runtime import Runtime
from accel_state.torch_private import (
    buffer_table,
    flat_handle,
    foreach_clamp_max_,
    foreach_clamp_min_,
    foreach_mul_,
    gradient_hooks,
    is_traceable_wrapper_subclass,
    refresh_original_parameters,
    set_gradient_hooks,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer


logger = logging.getLogger(__name__)


SHARDED_FEATURES = PLAIN_FEATURES - {Feature.CUSTOM_DEVICE_PLACEMENT, Feature.UNEVEN_INPUTS}
"""The features of strategies with sharded models."""


class ParamRemap:
    """Map from original to sharded parameters, for optimizers prepared with the model or later."""

    def __init__(self) -> None:
        self._successors: Any = WeakIdKeyDictionary()
        self._num_originals: Any = WeakIdKeyDictionary()  # by sharded parameter; a flat one has several
        self._models: WeakSet[nn.Module] = WeakSet()
        self._optimizers: WeakSet[Optimizer] = WeakSet()

    def has(self, model: nn.Module) -> bool:
        """Return whether a model was sharded already."""
        return model in self._models

    def knows(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer was prepared before."""
        return optimizer in self._optimizers

    def replaces(self, parameter: Tensor) -> bool:
        """Return whether a parameter is an original one that a sharded one has replaced."""
        return parameter in self._successors

    def check(self, optimizers: Iterable[Optimizer], models: Iterable[nn.Module]) -> None:
        """Check that the parameters of optimizers belong to prepared models."""
        owned = {id(parameter) for model in (*models, *self._models) for parameter in model.parameters()}
        for optimizer in optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            unknown = [
                parameter
                for parameter in parameters
                if id(parameter) not in owned and parameter not in self._successors
            ]
            if unknown:
                raise SettingsError(
                    f"{len(unknown)} of the {len(parameters)} parameters of {type(optimizer).__qualname__}, "
                    f"the first of shape {tuple(unknown[0].shape)}, belong to no model that is prepared with "
                    "it or was before: they would not be trained. Create the optimizer from "
                    "model.parameters() of the model that you pass to prepare(), and pass both."
                )

    def add(self, model: nn.Module, before: Iterable[tuple[Tensor, str]], now: Mapping[str, Tensor]) -> None:
        """Add a sharded model: the names of its parameters before, and its parameters now by name."""
        self._models.add(model)
        for parameter, name in before:
            if name in now and now[name] is not parameter and parameter not in self._successors:
                self._successors[parameter] = now[name]
                self._num_originals[now[name]] = self._num_originals.get(now[name], 0) + 1

    def switch(self, optimizer: Optimizer) -> None:
        """Replace an optimizer's original parameters by the sharded ones, and shard its state."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        mapping = {
            parameter: self._successors[parameter]
            for parameter in parameters
            if parameter in self._successors
        }
        for key, count in Counter(id(new) for new in mapping.values()).items():
            total = next(self._num_originals[new] for new in mapping.values() if id(new) == key)
            if count < total:
                raise SettingsError(
                    f"{type(optimizer).__qualname__} has {count} of the {total} parameters of one block, of "
                    "which FSDP1 makes one flat parameter: it would train all of them. Set "
                    "FullyShardedDataParallelPlugin(use_orig_params=True)."
                )
        self._optimizers.add(optimizer)
        switch_parameters(optimizer, mapping)


@frozen
class ShardedWrapper:
    """Model wrapper that shards models in place; they stay the same objects, with the same names.

    Args:
        validate: Raises `ValueError` for a model that cannot be sharded; checks this rank alone.
        master_weights: The mixed precision under which trained parameters are cast to float32; `None` to keep
            all dtypes.
        only_main_has_values: Whether models of ranks other than 0 may be on the meta device.
    """

    runtime: Runtime
    shard: Callable[[nn.Module], None]
    validate: Callable[[nn.Module], None]
    parameters_on: torch.device
    master_weights: str | None = None
    only_main_has_values: bool = False
    remap: ParamRemap = field(default_factory=ParamRemap)

    def check(self, bundle: Bundle) -> None:
        """Refuse models that cannot be sharded or that differ between ranks; all ranks raise if one does."""
        problem = ""
        models = [model for model in map(without_compiler, bundle.models) if not self.remap.has(model)]
        try:
            for model in models:
                _check_quantised(model)
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
            shard: Returns a model sharded, with all its values, in place of all that is done here.
            load: Gives a sharded model on the meta device its values, called as `load(model, full_state,
                cpu_offload=…)`; the full state is empty on ranks other than 0.
        """
        models = [*bundle.models]
        for index, model in enumerate(models):
            core = without_compiler(model)
            if self.remap.has(core):
                continue
            if evaluation and not self.only_main_has_values:
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
        """Shard a model by a function of the caller."""
        before = {
            parameter: strip_wrapper_prefixes(name)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        sharded = shard(model)
        if not self.remap.has(sharded):
            named = sharded.named_parameters(remove_duplicate=False)
            now = {strip_wrapper_prefixes(name): parameter for name, parameter in named}
            self.remap.add(sharded, before.items(), now)
        return sharded

    def _wrap(self, model: nn.Module, bundle: Bundle, load: Callable[..., Any] | None) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        is_main = self.runtime.topology.is_main
        if self.master_weights is not None and is_main:
            warn_about_master_weights(model, self.master_weights)
        values = to_meta(
            model,
            keep=is_main,
            device=self.runtime.device,
            dtype_of=None if self.master_weights is None else dtype_to_train,
        )
        detached_parameters = detach_params(bundle.optimizers, names)
        self.shard(model)
        if load is not None:
            on_cpu = self.parameters_on != self.runtime.device
            load(model, {**values.parameters, **values.buffers}, cpu_offload=on_cpu)
            values = _without_materialized(model, values)
        materialize_from_rank0(model, values, self.runtime, parameters_on=self.parameters_on)
        reattach_params(detached_parameters, model)
        self.remap.add(model, values.before.items(), dict(model.named_parameters(remove_duplicate=False)))

    def _validate(self, model: nn.Module) -> None:
        may_be_empty = self.only_main_has_values and not self.runtime.topology.is_main
        check_not_lazy(model)
        for name, parameter in model.named_parameters():
            if parameter.is_meta and not may_be_empty:
                raise SettingsError(
                    f"{type(model).__name__}: the parameter {name!r} is on the meta device on "
                    f"rank {self.runtime.topology.rank}. Load the weights there before prepare(); with "
                    "FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True), rank 0 alone needs them."
                )
        self.validate(model)


def _digest(model: nn.Module) -> str:
    tensors = (*model.named_parameters(), *model.named_buffers())
    text = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_quantised(model: nn.Module) -> None:
    """Refuse weights quantised by bitsandbytes: sharded as plain tensors they would lose their scales."""
    for name, parameter in model.named_parameters():
        if type(parameter).__module__.startswith("bitsandbytes."):
            raise SettingsError(
                f"{type(model).__name__}: the parameter {name!r} is quantised ({type(parameter).__name__} of "
                "bitsandbytes) and cannot be sharded. Train the model with DDP, or load it in its own dtype."
            )


@dataclass(slots=True)
class FullModelState:
    """State of a model before it was moved to meta.

    Args:
        parameters: Full parameters by name, on the rank that keeps them; tied ones under their first name.
        names: All names of each parameter and buffer, by the first one.
        before: Weak map from the original parameters to their names.
        hooks: Hooks on the gradient of each parameter that has some, as torch keeps them.
    """

    parameters: dict[str, Tensor] = field(default_factory=dict[str, Any])
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Any])
    dtypes: dict[str, torch.dtype] = field(default_factory=dict[str, Any])
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict[str, Any])
    names: dict[str, list[str]] = field(default_factory=dict[str, Any])
    before: Any = field(default_factory=WeakIdKeyDictionary)
    hooks: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, Any])


def to_meta(
    model: nn.Module,
    *,
    keep: bool,
    device: torch.device,
    dtype_of: Callable[[Tensor], torch.dtype] | None = None,
) -> FullModelState:
    """Move a model to the meta device in place, and return its state; names and ties are kept.

    Args:
        model: Any model; parameters that are sharded already are all-gathered.
        keep: Whether this rank keeps the full tensors.
        device: Device of the collectives.
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
            values.dtypes[name] = tensor.dtype
            if kind is values.parameters:
                if hook_of(tensor):
                    values.hooks[name] = gradient_hooks(tensor)
                values.before[tensor] = name
                values.dtypes[name] = dtype_of(tensor) if dtype_of else tensor.dtype
            values.attributes[name] = {} if _has_own_type(tensor) else dict(vars(tensor))
            full = gather_full_tensor(tensor, device) if isinstance(tensor, DTensor) else tensor.detach()
            if keep:
                kind[name] = full
    _move_to_meta(model, values)
    return values


def _move_to_meta(model: nn.Module, values: FullModelState) -> None:
    """Move a model to the meta device; tied tensors stay tied."""
    for names in values.names.values():
        tensor = _get_tensor(model, names[0])
        if _has_own_type(tensor):  # `Module.to` refuses to swap a tensor with weak references
            meta = tensor.detach().to("meta", values.dtypes[names[0]])
            for name in names:
                put_tensor(model, name, nn.Parameter(meta, requires_grad=tensor.requires_grad))
    nn.Module.to(model, device="meta")  # an override of `to` may refuse to move the model
    for names in values.names.values():
        tensor = _get_tensor(model, names[0])
        if _has_own_type(tensor):
            continue
        tensor.data = tensor.data.to(values.dtypes[names[0]])
        for name in names[1:]:
            put_tensor(model, name, tensor)


def materialize_from_rank0(
    model: nn.Module, values: FullModelState, runtime: Runtime, *, parameters_on: torch.device
) -> None:
    """Broadcast rank 0's tensors one by one; every rank materialises its shards, and frees what it has done.

    Rank 0's values are used even if every rank has some: ranks with different seeds would otherwise train a
    mixture of several models. That costs one broadcast of the model in `prepare`, as with DDP. Buffers and
    collectives use the device of the run.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, names in values.names.items():
        is_parameter = name in parameters
        like = parameters[name] if is_parameter else buffers[name]
        available = values.parameters if is_parameter else values.buffers
        full = _broadcast_from_rank0(available.pop(name, None), like, values.dtypes[name], runtime)
        target = parameters_on if is_parameter else runtime.device
        shard = shard_like(full, like, target, keep_type=is_parameter)
        del full
        if is_parameter:
            shard = nn.Parameter(shard, requires_grad=like.requires_grad)
            vars(shard).update(values.attributes[name])
            if name in values.hooks:  # the same dictionaries, so that a handle still removes its hook
                set_gradient_hooks(shard, values.hooks[name])
        for alias in names:
            put_tensor(model, alias, shard)


def _without_materialized(model: nn.Module, values: FullModelState) -> FullModelState:
    """Return the state of the tensors that are still on the meta device; give the others what they had."""
    on_meta: dict[str, list[str]] = {}
    for name, names in values.names.items():
        tensor = _get_tensor(model, name)
        if tensor.is_meta:
            on_meta[name] = names
            continue
        vars(tensor).update(values.attributes[name])
        if name in values.hooks:
            set_gradient_hooks(tensor, values.hooks[name])
        for alias in names[1:]:
            put_tensor(model, alias, tensor)
    return replace(values, names=on_meta)


def load_from_rank0(model: nn.Module, state: Any, runtime: Runtime, *, on_cpu: bool) -> None:
    """Load a full state dict of rank 0 into a sharded model, materialised or not."""
    values = FullModelState()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        values.names[name] = [name]
        values.dtypes[name] = tensor.dtype
        values.attributes[name] = dict(vars(tensor))
    for names, _ in group_tied_names(dict(model.named_parameters(remove_duplicate=False))):
        values.names[names[0]] = [*names]
    if runtime.topology.is_main:
        parameters = dict(model.named_parameters())
        values.parameters = {name: state[name] for name in values.names if name in parameters}
        values.buffers = {
            name: state[name] for name in values.names if name not in parameters and name in state
        }
    missing = runtime.collectives.all_gather_object(
        [name for name in values.names if name not in (state or ())]
    )[0]
    for name in missing:  # buffers that are not persistent are in no state dict
        values.names.pop(name)
    materialize_from_rank0(
        model, values, runtime, parameters_on=torch.device("cpu") if on_cpu else runtime.device
    )


def _broadcast_from_rank0(value: Tensor | None, like: Tensor, dtype: torch.dtype, runtime: Runtime) -> Tensor:
    if value is None or runtime.topology.rank != 0:
        full = torch.empty(like.shape, dtype=dtype, device=runtime.device)
    else:
        full = value.to(runtime.device, dtype).contiguous()
    runtime.collectives.broadcast(full, src=0)
    return full


def put_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the parameter or buffer of a name in a model."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf in (buffers := buffer_table(owner)):  # `setattr` would refuse a parameter there
        buffers[leaf] = tensor
    else:
        setattr(owner, leaf, tensor)


def _get_tensor(model: nn.Module, name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)


def _has_own_type(tensor: Tensor) -> bool:
    """Return whether a tensor is of a library's own type around its values, for its kernels."""
    return is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor)


def switch_parameters(optimizer: Optimizer, mapping: Mapping[Tensor, Tensor]) -> None:
    """Replace parameters of an optimizer, in place, by those that a mapping has for them.

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


@dataclass(frozen=True, slots=True)
class DetachedParameter:
    """A parameter of an optimizer, replaced by a placeholder while the model is moved."""

    optimizer: Optimizer
    parameters: list[Tensor]
    index: int
    name: str
    state: Any


def detach_params(optimizers: Iterable[Optimizer], names: Mapping[int, str]) -> list[DetachedParameter]:
    """Remove a model's parameters, by id, from optimizers, so that their memory can be freed.

    The optimizers must not be used until `reattach_params`.
    """
    detached_parameters: list[DetachedParameter] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters = group["params"]
            for index, parameter in enumerate(parameters):
                name = names.get(id(parameter))
                if name is not None:
                    detached_parameters.append(
                        DetachedParameter(
                            optimizer, parameters, index, name, optimizer.state.pop(parameter, None)
                        )
                    )
                    parameters[index] = torch.empty(0)
    return detached_parameters


def reattach_params(detached_parameters: Iterable[DetachedParameter], model: nn.Module) -> None:
    """Put a model's sharded parameters in place of the detached ones, with their sharded states."""
    now = dict(model.named_parameters(remove_duplicate=False))
    for detached in detached_parameters:
        new = now[detached.name]
        detached.parameters[detached.index] = new
        if detached.state is not None:
            detached.optimizer.state[new] = _shard_state(detached.state, new)


def _shard_state(state: Any, like: Tensor) -> Any:
    if not isinstance(state, dict):
        return state
    items: dict[str, Any] = state
    return {
        name: shard_like(value.to(like.dtype) if value.is_floating_point() else value, like)
        if isinstance(value, Tensor) and value.shape == like.shape and not isinstance(value, DTensor)
        else value
        for name, value in items.items()
    }


def hook_of(parameter: Any) -> str | None:
    """Return the method by which a hook on the gradient of a parameter was registered, if one was.

    Example:
        >>> parameter = torch.nn.Parameter(torch.ones(1))
        >>> _ = parameter.register_hook(torch.neg)
        >>> hook_of(parameter)
        'register_hook'
    """
    hooks, after_accumulation = gradient_hooks(parameter)
    if hooks:
        return "register_hook"
    return "register_post_accumulate_grad_hook" if after_accumulation else None


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer computes the same from shards of a parameter as from all of it.

    A new optimizer of its class and options steps a small matrix, and others the flat halves of it; they
    differ where the update of an element depends on others, as by an inner product, a norm, a factored state
    or a matrix. An optimizer that cannot be made from its defaults, or draws random numbers, is trusted.

    Example:
        >>> parameters = [torch.nn.Parameter(torch.ones(2, 2))]
        >>> is_elementwise(torch.optim.AdamW(parameters)), is_elementwise(torch.optim.LBFGS(parameters))
        (True, False)
    """
    generator = torch.Generator().manual_seed(0)
    value, *gradients = torch.randn(3, 4, 4, generator=generator).unbind()
    # 1. Step the full matrix, with two seeds.
    try:
        full, again = (_step_copy(optimizer, value, gradients, seed=seed) for seed in (0, 1))
    except Exception:  # noqa: BLE001 - an optimizer's own code may raise anything
        return True
    if not torch.equal(full, again):
        return True
    # 2. Step its halves, and compare.
    try:
        halves = [
            _step_copy(
                optimizer, value.flatten()[part], [gradient.flatten()[part] for gradient in gradients], seed=0
            )
            for part in (slice(8), slice(8, 16))
        ]
    except Exception:  # noqa: BLE001 - as above
        return False
    return torch.allclose(torch.cat(halves, 1), full.flatten(1), rtol=1e-3, atol=1e-6)


def _step_copy(optimizer: Optimizer, value: Tensor, gradients: Iterable[Tensor], *, seed: int) -> Tensor:
    """Step a new optimizer of the same class, with a parameter of this value in each group; return them."""
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters
    options = {name: default for name, default in optimizer.defaults.items() if name in accepted}
    parameters = [nn.Parameter(value.clone()) for _ in optimizer.param_groups]
    groups = [
        {**group, "params": [parameter]}
        for group, parameter in zip(optimizer.param_groups, parameters, strict=True)
    ]
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        trial = kind(groups, **options)
        for gradient in gradients:

            @torch.enable_grad()
            def closure(gradient: Tensor = gradient) -> Tensor:
                loss = torch.zeros(())
                for parameter in parameters:
                    parameter.grad = gradient.clone()
                    loss = loss + (parameter.detach() * gradient).sum()
                return loss

            closure()
            trial.step(closure)
    return torch.stack([parameter.detach() for parameter in parameters])


_LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})


def dtype_to_train(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which an optimizer trains a parameter; frozen and quantised ones keep theirs.

    Example:
        >>> dtype_to_train(torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)))
        torch.float32
        >>> dtype_to_train(torch.zeros(1, dtype=torch.bfloat16))
        torch.bfloat16
    """
    return torch.float32 if parameter.requires_grad and parameter.dtype in _LOW_PRECISION else parameter.dtype


def upcast_flat_parameters(root: FullyShardedDataParallel) -> None:
    """Convert the trained flat parameters of FSDP1 to float32, before the first forward pass.

    torch accepts a dtype that changes between wrapping and the first forward pass.
    """
    for module in FullyShardedDataParallel.fsdp_modules(root):
        handle: Any = flat_handle(module)
        if handle is None or dtype_to_train(handle.flat_param) is handle.flat_param.dtype:
            continue
        handle.flat_param.data = handle.flat_param.data.float()
        refresh_original_parameters(module, handle)


def warn_about_master_weights(model: nn.Module, precision: str) -> None:
    """Warn if parameters of a model will be trained in float32 instead of their own dtype."""
    low_precision = [
        parameter for parameter in model.parameters() if dtype_to_train(parameter) is not parameter.dtype
    ]
    if low_precision:
        dtypes = ", ".join(sorted({str(parameter.dtype) for parameter in low_precision}))
        logger.warning(
            "%d parameters of %s are in %s; with mixed_precision=%r they are trained and saved in float32, "
            "as small updates would be lost in their own dtype; mixed_precision='no' keeps it.",
            len(low_precision),
            type(model).__name__,
            dtypes,
            precision,
        )


def sharded_stepper(precision: PrecisionPolicy, strategy: str) -> TorchStepper:
    """Return the stepper of parameters that may be `DTensor`s on several meshes."""
    return TorchStepper(
        precision=precision,
        no_sync_of=_no_sync,
        join_of=partial(_refuse_join, strategy),
        around_backward=partial(hang_monitor.collective_scope, "backward"),
        around_step=one_mesh_per_group,
        clip_norm=_clip_norm,
        clip_value=_clip_value,
    )


@contextmanager
def one_mesh_per_group(optimizer: Optimizer) -> Generator[None]:
    """Split an optimizer's groups by mesh within the block, for its step.

    torch's `foreach` and `fused` kernels take lists of tensors only if all are on one mesh, or on none. The
    groups are restored afterwards, with the values that the step wrote.

    Raises:
        UnsupportedError: The step uses an operation that torch does not have for DTensors.
    """
    groups = [*optimizer.param_groups]
    split = [_by_mesh(group) for group in groups]
    # LBFGS keeps a list of its own, and accepts one group only.
    is_split = any(len(by_mesh) > 1 for by_mesh in split) and "_params" not in vars(optimizer)
    if is_split:  # in place, since an optimizer that wraps another one shares the list
        optimizer.param_groups[:] = [group for by_mesh in split for group in by_mesh]
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if not _is_raised_by_dtensor(error):
            raise
        raise UnsupportedError(
            f"{type(optimizer).__qualname__} cannot step on sharded parameters: {str(error).splitlines()[0]} "
            "Use an optimizer that works on DTensors, or a strategy that does not shard."
        ) from error
    finally:
        if is_split:
            optimizer.param_groups[:] = groups
            for group, by_mesh in zip(groups, split, strict=True):
                group.update({**by_mesh[0], "params": group["params"]} if by_mesh else {})


def _is_raised_by_dtensor(error: BaseException) -> bool:
    if "DTensor" in str(error):
        return True
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_globals["__name__"].startswith("torch.distributed.tensor.")


def _by_mesh(group: dict[str, Any]) -> list[dict[str, Any]]:
    meshes: dict[Any, list[Tensor]] = {}
    for parameter in group["params"]:
        meshes.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(
            parameter
        )
    return [{**group, "params": parameters} for parameters in meshes.values()]


def _refuse_join(strategy: str, *_: Any) -> NoReturn:
    raise UnsupportedError(
        f"join(): under the strategy {strategy!r} every rank has parts of the parameters, and none can "
        "finish early; use even_batches=True."
    )


def _clip_norm(parameters: Tensor | list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    gradients = _gradients(parameters)
    with hang_monitor.collective_scope("clip_grad_norm_"):
        norm = norm_of(gradients, float(norm_type))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parts in by_device(gradients):
        foreach_mul_(parts, factor.to(parts[0].device))
    return norm


def _clip_value(parameters: Tensor | list[Tensor], clip_value: float) -> None:
    for parts in by_device(_gradients(parameters)):
        foreach_clamp_min_(parts, -clip_value)
        foreach_clamp_max_(parts, clip_value)


def norm_of(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Compute the norm over ordinary tensors, the same on every rank, and `DTensor`s of several meshes.

    The result is 0-d, and the same on every rank.
    """
    if not gradients:
        return torch.zeros(())
    groups = _by_axes(gradients)
    powers = [_sum_powers(axes, local_parts(group), norm_type) for axes, group in groups.items()]
    device = next((power.device for power in powers if power.device.type != "cpu"), powers[0].device)
    together = torch.stack([power.to(device) for power in powers])
    return together.max() if norm_type == math.inf else together.sum() ** (1.0 / norm_type)


def _by_axes(gradients: Sequence[Tensor]) -> dict[tuple[Any, ...], list[Tensor]]:
    """Group gradients by their mesh and those of its axes along which they are sharded."""
    groups: dict[tuple[Any, ...], list[Tensor]] = {}
    mesh = placements = None
    group: list[Tensor] = []
    replicated: list[Any] = []
    is_partial = False
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            groups.setdefault((), []).append(gradient)
            continue
        if gradient.device_mesh is not mesh or gradient.placements != placements:  # often as before
            mesh, placements = gradient.device_mesh, gradient.placements
            replicated = [Replicate() if placement.is_partial() else placement for placement in placements]
            shards = [axis for axis, placement in enumerate(replicated) if not placement.is_replicate()]
            group = groups.setdefault((mesh, *shards), [])
            is_partial = replicated != [*placements]
        group.append(gradient.redistribute(placements=replicated) if is_partial else gradient)
    return groups


def _sum_powers(axes: tuple[Any, ...], parts: Sequence[Tensor], norm_type: float) -> Tensor:
    """Sum the p-th powers of the norms over shards and ranks; the maximum for the infinity norm."""
    nonempty = [part for part in parts if part.numel()]
    norm = get_total_norm(nonempty, norm_type) if nonempty else parts[0].new_zeros(())
    largest = norm_type == math.inf
    power = norm if largest else norm**norm_type
    if axes:
        mesh, *shards = axes
        power = power.to(mesh.device_type)
        for axis in shards:
            dist.all_reduce(
                power, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=mesh.get_group(axis)
            )
    return power


def _gradients(parameters: Tensor | list[Tensor]) -> list[Tensor]:
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return [parameter.grad for parameter in tensors if parameter.grad is not None]


@contextmanager
def _no_sync(model: nn.Module) -> Generator[None]:
    inner = without_compiler(model)
    if not isinstance(inner, FSDPModule):
        yield
        return
    inner.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        inner.set_requires_gradient_sync(True)
