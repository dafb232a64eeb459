"""Shard models in place: move to meta, shard, materialise from rank 0; optimizers follow parameters."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel_ops.modules import model_has_dtensor, without_compiler
from accel_ops.weights.tensors import get_non_persistent_buffers
from accel_plugins.sharding.quantised import is_quantised, prepare_quantised
from accel_plugins.sharding.shards import (
    ShardedStates,
    gather_full_tensor,
    group_tied_names,
    shard_like,
    with_local,
)
from accel_plugins.sharding.state import strip_wrapper_prefixes
from accel_plugins.sharding.step import clip_norm, clip_values, one_mesh_per_group
from accel_plugins.strategy import (
    PLAIN_FEATURES,
    Bundle,
    Feature,
    Optimizers,
    Parameters,
    Strategy,
)
from accel_plugins.unsharded import check_not_lazy, has_offloaded_parameters, move_to_device
from accel_state import hang_monitor
from accel_state.errors import CheckpointMismatchError, SettingsError, some_of
from accel_state.runtime import Runtime
from accel_state.torch_private import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from accel_plugins.host_copies import StateKind

logger = logging.getLogger(__name__)

_REPLACEMENT = "_accel_replacement"


def note_replacement(attributes: dict[str, Any], new: Tensor | None) -> None:
    """Note on a parameter, given its attributes, what it became; `None` if only other ranks have it."""
    if new is None or vars(new) is not attributes:
        attributes[_REPLACEMENT] = new


def is_replaced(parameter: Tensor) -> bool:
    """Return whether a parameter is an original that was replaced by another one, or removed."""
    return _REPLACEMENT in vars(parameter)


def replacement_of(parameter: Tensor) -> Tensor | None:
    """Return what a parameter became, also in several steps; `None` if only other ranks have it."""
    new: Tensor | None = parameter
    while new is not None and is_replaced(new):
        new = vars(new)[_REPLACEMENT]
    return new


def check_parameters(optimizers: Iterable[Optimizer], models: Iterable[nn.Module]) -> None:
    """Check that the parameters of optimizers belong to models, or were replaced before."""
    owned = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        unknown = [p for p in parameters if id(p) not in owned and not is_replaced(p)]
        if unknown:
            raise SettingsError(
                f"{len(unknown)} of the {len(parameters)} parameters of {type(optimizer).__qualname__}, "
                f"the first of shape {tuple(unknown[0].shape)}, belong to no model that is prepared with "
                "it or was before: they would not be trained. Create the optimizer from "
                "model.parameters() of the model that you pass to prepare(), and pass both."
            )


def follow_replacements(optimizer: Optimizer) -> None:
    """Replace an optimizer's parameters by what they became, and shard its state."""
    mapping: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (new := replacement_of(parameter)) is not None:
                mapping[parameter] = new
            else:
                optimizer.state.pop(parameter, None)
        group["params"][:] = [parameter for parameter in group["params"] if parameter in mapping]
    switch_parameters(optimizer, mapping)


class ShardedStrategy(Strategy):
    """Shards models in place; they stay the same objects, with the same names. Subclasses set the attributes.

    `stages` shard a model, and `validators` raise `ValueError` on this rank for one that cannot be sharded.
    Trained parameters are cast to float32 under the mixed precision `master_weights`. Models of ranks other
    than 0 may be on the meta device if `only_main_has_values`, those of all ranks if `may_be_loaded_later`,
    and frozen weights quantised if `shards_quantised`. `prepared` has the sharded models.
    """

    features = PLAIN_FEATURES - {Feature.CUSTOM_DEVICE_PLACEMENT, Feature.UNEVEN_INPUTS}

    def setup(self) -> None:
        self.stages: Sequence[Callable[[nn.Module], None]] = ()
        self.validators: Sequence[Callable[[nn.Module], None]] = ()
        self.parameters_on = self.runtime.device
        self.master_weights: str | None = None
        self.only_main_has_values = self.shards_quantised = self.may_be_loaded_later = False
        self.prepared: WeakSet[nn.Module] = WeakSet()
        self.without_values: WeakSet[nn.Module] = WeakSet()
        self.states = ShardedStates(self.runtime.device)

    def offload_states(
        self, kinds: Iterable[StateKind], models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:
        for module in (part for model in models for part in model.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass without a backward pass leaves the root gathered
        super().offload_states(kinds, models, optimizers)

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
        inside = [*map(without_compiler, bundle.models)]
        models = [model for model in inside if not self.is_prepared(model)]
        try:
            for model in models:
                self._validate(model)
            check_parameters(bundle.optimizers, (*inside, *self.prepared))
        except ValueError as error:
            problem = str(error)
        empty = [_meta_buffers(model) if _has_no_values(model) else None for model in models]
        digests: list[str] = []
        for model in models:
            tensors = (*model.named_parameters(), *model.named_buffers())
            text = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors)
            digests.append(hashlib.sha256(text.encode()).hexdigest())
        reports = self.runtime.collectives.all_gather_object((problem, digests, empty))
        for rank, (text, _, _) in enumerate(reports):
            if text:
                raise SettingsError(text if text == problem else f"rank {rank}: {text}")
        for rank, (_, others, are_empty) in enumerate(reports):
            if are_empty != reports[0][2] and not self.only_main_has_values:
                raise SettingsError(
                    f"prepare() got other models on the meta device on rank {rank} than on rank 0. Load the "
                    "weights before prepare() on every rank, or after it on every rank."
                )
            if others != reports[0][1]:
                raise SettingsError(
                    f"prepare() got other models on rank {rank} than on rank 0: names, shapes or dtypes "
                    "of their parameters differ. Make the same models on every rank."
                )
        main = zip(models, reports[0][2], strict=True)
        self.without_values.update(model for model, buffers in main if buffers is not None)

    def wrap(
        self,
        bundle: Bundle,
        *,
        evaluation: bool = False,
        shard: Callable[[nn.Module], nn.Module] | None = None,
        load: Callable[..., Any] | None = None,
    ) -> Bundle:
        """Shard the models that are not sharded yet, and switch optimizers to the new parameters.

        `shard(model)` replaces the sharding of this class, and returns the model. `load(model, full_state,
        cpu_offload=…)` materialises a sharded model on the meta device; only rank 0 has a full state.
        """
        models = [*bundle.models]
        for index, model in enumerate(models):
            core = without_compiler(model)
            if self.is_prepared(core):
                self.prepared.add(core)
                continue
            if evaluation and not self.only_main_has_values:
                if model_has_dtensor(core):  # its optimizer may be prepared, as by transformers' Trainer
                    self.prepared.add(core)
                alone = replace(bundle, models=[model], placements=())
                [models[index]] = move_to_device(alone, self.runtime.device)
            elif shard is None:
                self._wrap(core, bundle, load)
            else:
                # Their attributes alone, so that the parameters can be freed.
                notes = {name: vars(parameter) for name, parameter in core.named_parameters()}
                models[index] = sharded = shard(core)  # which may call this method
                named = sharded.named_parameters(remove_duplicate=False)
                now = {strip_wrapper_prefixes(name): parameter for name, parameter in named}
                for name, attributes in notes.items():
                    if (new := now.get(strip_wrapper_prefixes(name))) is not None:
                        note_replacement(attributes, new)
                self.prepared.add(sharded)
        for optimizer in bundle.optimizers:
            follow_replacements(optimizer)
        return replace(bundle, models=models)

    def shard_in_place(self, model: nn.Module) -> None:
        """Shard a model on the meta device."""
        for shard in self.stages:
            shard(model)

    def is_prepared(self, model: nn.Module) -> bool:
        """Return whether a model is already sharded; FSDP2's are also by an earlier `Accelerator`."""
        return model in self.prepared or isinstance(model, FSDPModule)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return without_compiler(model)

    def _wrap(self, model: nn.Module, bundle: Bundle, load: Callable[..., Any] | None) -> None:
        is_main = self.runtime.topology.is_main
        if self.master_weights is not None and is_main:
            warn_about_master_weights(model, self.master_weights)
        prepare_quantised(model, self.runtime)
        # 1. Move it to meta, and put placeholders into the optimizers, which frees the memory of parameters.
        is_empty = model in self.without_values
        without_values = {name for name, tensor in _named_tensors(model) if tensor.is_meta}
        rows = to_meta(
            model,
            keep=is_main,
            device=self.runtime.device,
            mesh=self.mesh,
            dtype_of=None if self.master_weights is None else dtype_to_train,
        )
        for optimizer in bundle.optimizers:
            for parameters in (group["params"] for group in optimizer.param_groups):
                for index, parameter in enumerate(parameters):
                    if row := rows.get(id(parameter)):
                        parameters[index] = placeholder = torch.empty(0, device="cpu")
                        row.replaced.append(vars(placeholder))
                        if parameter in optimizer.state:
                            optimizer.state[placeholder] = optimizer.state.pop(parameter)
        # 2. Shard it, and materialise its shards.
        self.shard_in_place(model)
        if is_empty:
            self._allocate(model, without_values)
        if load is not None and not is_empty:
            on_cpu = self.parameters_on != self.runtime.device
            full = {row.names[0]: row.full for row in rows.values() if row.full is not None}
            load(model, full, cpu_offload=on_cpu)
        materialize_from_rank0(
            model, rows.values(), self.runtime, parameters_on=self.parameters_on, only_meta=True
        )
        # 3. Note what the parameters became.
        now = dict(model.named_parameters(remove_duplicate=False))
        for row in rows.values():
            for attributes in row.replaced:
                note_replacement(attributes, next((now[name] for name in row.names if name in now), None))
        self.prepared.add(model)

    def _allocate(self, model: nn.Module, names: Collection[str]) -> None:
        """Give tensors that are loaded later memory for their shards: NaN, so that missing values show."""
        for row, tensor in full_tensors(model):
            if row.names[0] not in names:
                continue
            target = self.parameters_on if row.is_parameter else self.runtime.device
            local: Any = tensor.detach()
            local = local.to_local() if isinstance(local, DTensor) else local
            filled = torch.full_like(local, torch.nan if local.is_floating_point() else 0, device=target)
            value = with_local(tensor, filled) if isinstance(tensor, DTensor) else filled
            if row.is_parameter:
                value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            for name in row.names:
                put_tensor(model, name, value)

    def _validate(self, model: nn.Module) -> None:
        may_be_empty = self.only_main_has_values and not self.runtime.topology.is_main
        if not may_be_empty and self.may_be_loaded_later and _has_no_values(model):
            may_be_empty = True
            passing = get_non_persistent_buffers(model, recurse=True, fqns=True)
            lost = [name for name in _meta_buffers(model) if name in passing]
            if lost:
                raise SettingsError(
                    f"{type(model).__name__}: {some_of(lost)} are buffers on the meta device that no "
                    "checkpoint has. Make the model within init_empty_weights(), which computes buffers."
                )
        check_not_lazy(model)
        for name, parameter in model.named_parameters():
            kind = type(parameter.data)
            # Weights that torchao trains in FP8 are made for FSDP2, and say so by this method.
            if kind.__module__.startswith("torchao.") and not hasattr(kind, "fsdp_pre_all_gather"):
                raise SettingsError(
                    f"The parameter {name!r} is quantised by torchao ({kind.__name__}) and cannot be "
                    "sharded, since torchao's tensors do not have the operations that sharding takes. "
                    "Quantise the model with bitsandbytes, whose weights FSDP2 shards, or load it in its own "
                    "dtype."
                )
            if is_quantised(parameter) and not self.shards_quantised:
                raise SettingsError(
                    f"{type(model).__name__}: the parameter {name!r} is quantised "
                    f"({type(parameter).__name__} of bitsandbytes) and cannot be sharded over these axes. "
                    "Train the model with FSDP2 alone or DDP, or load it in its own dtype."
                )
            if parameter.is_meta and not may_be_empty:
                raise SettingsError(
                    f"{type(model).__name__}: the parameter {name!r} is on the meta device on "
                    f"rank {self.runtime.topology.rank}. Load the weights there before prepare(); with "
                    "FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True), rank 0 alone needs them."
                )
        for validate in self.validators:
            validate(model)


def _meta_buffers(model: nn.Module) -> list[str]:
    return [name for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.is_meta]


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    parameters = model.named_parameters(remove_duplicate=False)
    return [*parameters, *model.named_buffers(remove_duplicate=False)]


def _has_no_values(model: nn.Module) -> bool:
    """Return whether all parameters of a model are on the meta device, and no hook loads them."""
    parameters = [*model.parameters()]
    is_meta = bool(parameters) and all(parameter.is_meta for parameter in parameters)
    return is_meta and not has_offloaded_parameters(model)


@dataclass(slots=True)
class FullTensor:
    """A parameter or buffer of a model before it was moved to meta, with all its names.

    `dtype` is that in the sharded model; `attributes` were set by other libraries; `hooks` are its gradient
    hooks as torch keeps them; `replaced` are the attributes of what it replaces: the parameter, which is not
    kept, and placeholders in optimizers. The rank that keeps it has `full`; a sharded one may stay as it is.
    """

    names: Sequence[str]
    shape: torch.Size
    dtype: torch.dtype
    is_parameter: bool
    attributes: dict[str, Any]
    hooks: tuple[Any, Any] | None
    replaced: list[dict[str, Any]]
    full: Tensor | None = None
    keeps_shards: bool = False

    def restore(self, tensor: Tensor) -> None:
        """Set the attributes and hooks on the tensor in its place."""
        vars(tensor).update(self.attributes)
        if self.hooks is not None:  # the same dictionaries, so that a handle still removes its hook
            tensor._backward_hooks, tensor._post_accumulate_grad_hooks = self.hooks


def full_tensors(model: nn.Module) -> list[tuple[FullTensor, Tensor]]:
    """Describe the parameters and buffers of a model, each with the tensor."""
    described: list[tuple[FullTensor, Tensor]] = []
    for is_parameter, named in (
        (True, model.named_parameters(remove_duplicate=False)),
        (False, model.named_buffers(remove_duplicate=False)),
    ):
        for names, tensor in group_tied_names(dict(named)):
            value: Any = tensor
            has_own_type = is_traceable_wrapper_subclass(value) and not isinstance(tensor, DTensor)
            attributes = {} if has_own_type else dict(vars(tensor))  # a library's, for its kernels
            attributes.pop(_REPLACEMENT, None)
            hooks = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks) if hook_of(tensor) else None
            replaced = [vars(tensor)] if is_parameter else []
            row = FullTensor(names, tensor.shape, tensor.dtype, is_parameter, attributes, hooks, replaced)
            described.append((row, tensor))
    return described


def to_meta(
    model: nn.Module,
    *,
    keep: bool,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    dtype_of: Callable[[Tensor], torch.dtype] | None = None,
) -> dict[int, FullTensor]:
    """Move a model to meta in place; return its tensors by id, with values on the ranks that `keep` them.

    Parameters that are sharded already are all-gathered on the device, except over axes of the run's mesh:
    these keep their shards, of which replicas get the first one's values. Not by `nn.Module.to`, which would
    move the originals that optimizers still have, too.
    """
    described = full_tensors(model)
    for row, tensor in described:
        if dtype_of is not None and row.is_parameter:
            row.dtype = dtype_of(tensor)
        row.keeps_shards = _has_shards_of(mesh, tensor)
        if row.keeps_shards:
            _broadcast_to_replicas(tensor, mesh)
        else:
            full = gather_full_tensor(tensor, device) if isinstance(tensor, DTensor) else tensor.detach()
            row.full = full if keep else None
        if row.keeps_shards and row.dtype is tensor.dtype:
            continue
        moved = tensor.detach().to(tensor.device if row.keeps_shards else "meta", row.dtype)
        if row.is_parameter:
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        for name in row.names:
            put_tensor(model, name, moved)
    return {id(tensor): row for row, tensor in described}


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


def materialize_from_rank0(
    model: nn.Module,
    tensors: Iterable[FullTensor],
    runtime: Runtime,
    *,
    parameters_on: torch.device,
    only_meta: bool = False,
) -> None:
    """Broadcast rank 0's tensors one by one; every rank materialises its shards, and frees the full tensor.

    Ranks with other values, as of other seeds, would train a mixture of several models. A rank without a
    module takes part in its broadcasts. `only_meta`: tensors that have values keep them.
    """
    present = dict(_named_tensors(model))
    for row in tensors:
        own = [name for name in row.names if name in present]
        if only_meta and (not present[own[0]].is_meta if own else row.keeps_shards):
            for name in own:
                row.restore(present[own[0]])
                put_tensor(model, name, present[own[0]])
            continue
        full, row.full = row.full, None
        if full is None or not runtime.topology.is_main:
            full = torch.empty(row.shape, dtype=row.dtype, device=runtime.device)
        else:
            full = full.to(runtime.device, row.dtype).contiguous()
        runtime.collectives.broadcast(full, src=0)
        if not own:
            continue
        like, target = present[own[0]], parameters_on if row.is_parameter else runtime.device
        shard = shard_like(full, like, target, keep_type=row.is_parameter)
        del full
        if row.is_parameter:
            shard = nn.Parameter(shard, requires_grad=like.requires_grad)
            row.restore(shard)
        for name in own:
            put_tensor(model, name, shard)


def load_from_rank0(model: nn.Module, state: Any, runtime: Runtime, *, on_cpu: bool) -> None:
    """Load a full state dict of rank 0 into a sharded model, materialised or not; every rank raises."""
    tensors = [row for row, _ in full_tensors(model)]
    missing = runtime.collectives.all_gather_object(
        [row.names[0] for row in tensors if row.names[0] not in (state or ())]
    )[0]
    absent = [repr(row.names[0]) for row in tensors if row.is_parameter and row.names[0] in missing]
    if absent:
        raise CheckpointMismatchError(
            f"the full state dict of rank 0 has no {some_of(absent)}, which {type(model).__name__} has: load "
            "that of the same model"
        )
    # Buffers that are not persistent are in no state dict.
    tensors = [row for row in tensors if row.names[0] not in missing]
    for row in tensors if runtime.topology.is_main else ():
        row.full = state[row.names[0]]
    materialize_from_rank0(
        model, tensors, runtime, parameters_on=torch.device("cpu") if on_cpu else runtime.device
    )


def put_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the parameter or buffer with this name in a model."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf in (buffers := owner._buffers):  # `setattr` would refuse a parameter there
        buffers[leaf] = tensor
    else:
        setattr(owner, leaf, tensor)


def switch_parameters(optimizer: Optimizer, mapping: Mapping[Tensor, Tensor]) -> None:
    """Replace parameters of an optimizer in place, by a mapping from old to new.

    Groups keep their lists; state is sharded like the new parameters. One parameter may replace several.
    """
    for group in optimizer.param_groups:
        for old in group["params"]:
            new = mapping.get(old, old)
            if new is not old and old in optimizer.state:
                optimizer.state[new] = _shard_state(optimizer.state.pop(old), new)
        group["params"][:] = dict.fromkeys(mapping.get(old, old) for old in group["params"])


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
    """Return the method by which a parameter's gradient hook was registered, if it has one."""
    if parameter._backward_hooks:
        return "register_hook"
    return "register_post_accumulate_grad_hook" if parameter._post_accumulate_grad_hooks else None


def dtype_to_train(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which an optimizer trains a parameter; frozen ones keep their dtype."""
    is_low = parameter.dtype in {torch.bfloat16, torch.float16}
    return torch.float32 if parameter.requires_grad and is_low else parameter.dtype


def warn_about_master_weights(model: nn.Module, precision: str) -> None:
    """Warn if parameters of a model will be trained in float32 instead of their own dtype."""
    low = [p.dtype for p in model.parameters() if dtype_to_train(p) is not p.dtype]
    if low:
        logger.warning(
            "%d parameters of %s are in %s. With mixed_precision=%r they are trained and saved in "
            "float32, since small updates would be lost in their own dtype. Use mixed_precision='no' to "
            "keep the dtype.",
            *(len(low), type(model).__name__, ", ".join(sorted({*map(str, low)})), precision),
        )
