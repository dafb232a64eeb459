"""State of DeepSpeed's engines: full weights and optimizer state, and the engine's own folders."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_ops.modules import extract_model_from_parallel, replaced_attributes
from accel_plugins.deepspeed.folder import engine_folder, load_file, model_file, read_folder
from accel_plugins.deepspeed.library import (
    GatheredParameters,
    ds_module,
    is_flattened,
    is_sharded,
    plain_masters,
)
from accel_plugins.full_parameters import FullParameters, ParameterSource, named_parameters_of
from accel_plugins.sharding.shards import group_tied_names
from accel_plugins.sharding.state import (
    StateAllocator,
    StateForm,
    allocator_like,
    check_groups,
    names_to_indices,
    state_by_name,
)
from accel_plugins.strategy import StateDict
from accel_plugins.unsharded import States, Write, load_in_place
from accel_state.errors import CheckpointError, UnsupportedError, some_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.deepspeed.engine import DeepSpeedEngineWrapper
    from accel_plugins.deepspeed.strategy import DeepSpeedStrategy


class DeepSpeedStates(States):
    """Gathers the sharded state of an engine, and shards it again at load; saved in its native format.

    Every method is a collective over all ranks. A sharded model may have no engine.
    """

    is_sharded = True

    def __init__(self, strategy: DeepSpeedStrategy) -> None:
        self.strategy = strategy

    def form(self) -> StateForm:
        return StateForm.NATIVE

    # Weights.

    def _module_of(self, model: nn.Module) -> nn.Module | None:
        """Return the unwrapped model if an engine trains it or its parameters are sharded, else `None`."""
        owner = self.strategy.engine_of(model)
        if owner is not None:
            return owner.engine.module
        core = extract_model_from_parallel(model, keep_torch_compile=False)
        return core if any(map(is_sharded, core.parameters())) else None

    def _shape_of(self, name: str, value: Tensor) -> torch.Size:
        """Return the shape of a tensor of a state dict, before it was sharded or split."""
        return getattr(value, "ds_shape", self.strategy.shapes.get(name, value.shape))

    @torch.no_grad()
    def iter_full_state_dict(
        self, model: nn.Module, *, keep: bool = True, exact: bool = False
    ) -> Iterator[StateDict]:
        """Gather the full state dict tensor by tensor, tied names together; empty on ranks without `keep`.

        `exact` requests the float32 master weights of 16-bit parameters.
        """
        module = self._module_of(model)
        if module is None:
            yield super().full_state_dict(model)
            return
        layers = _SplitLayers(module)
        masters = _Masters(self.strategy.engine_of(model) if exact else None)
        to_host = any(map(is_sharded, module.parameters()))
        for names, value in group_tied_names(module.state_dict(keep_vars=True)):
            full: Any = value
            if isinstance(value, Tensor):
                master = masters.gather(value)
                with GatheredParameters([value] if master is None else []), layers.whole(value, master):
                    full = value.detach() if master is None or value in layers else master
                    full = full.to("cpu", copy=is_sharded(value)) if keep and to_host else full
            yield dict.fromkeys(names, full) if keep else {}
            del full  # It is freed before the next tensor is gathered.

    def full_state_dict(self, model: nn.Module, *, keep: bool = True, exact: bool = False) -> StateDict:
        module = self._module_of(model)
        if module is None:
            return super().full_state_dict(model)
        full: StateDict = {}
        for part in self.iter_full_state_dict(model, keep=keep, exact=exact):
            full |= part
        return {name: full[name] for name in module.state_dict(keep_vars=True) if name in full}

    def iter_full_parameters(self, model: nn.Module, request: FullParameters) -> Iterator[tuple[str, Tensor]]:
        module = self._module_of(model)
        if module is None:
            yield from super().iter_full_parameters(model, request)
            return
        layers = _SplitLayers(module)
        for names, parameter in named_parameters_of(module.state_dict(keep_vars=True)):
            if not any(map(request.selects, names)):
                continue
            if not request.values:
                shape, dtype = self._shape_of(names[0], parameter), request.dtype_of(parameter.dtype)
                full = torch.empty(shape, dtype=dtype, device="meta")
            else:
                with GatheredParameters([parameter]), layers.whole(parameter):
                    full = parameter.detach()
                    if request.keep:
                        full = full.to(request.dtype_of(parameter.dtype), copy=is_sharded(parameter))
            for name in names if request.keep else ():
                yield name, full

    def sources(self, model: nn.Module) -> Sequence[ParameterSource]:
        is_split = self.strategy.tensor_size > 1 or any(map(is_sharded, model.parameters()))
        if self._module_of(model) is not None and is_split:
            raise UnsupportedError(
                "weight_source(track_changes=True) with ZeRO stage 3 or AutoTP of DeepSpeed, whose shards it "
                "does not compare: use stage 2 without AutoTP, or FSDP2."
            )
        return super().sources(model)

    @torch.no_grad()
    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        """Load a full state dict into the model and the float32 master weights."""
        module = self._module_of(model)
        if module is None:
            return super().load_full_state_dict(model, state, **options)
        if options.get("assign"):
            raise UnsupportedError(
                "load_state_dict(assign=True): DeepSpeed's engine keeps its own tensors. Remove assign."
            )
        # 1. Refuse a state dict that does not fit.
        current = module.state_dict(keep_vars=True)
        missing, unexpected = sorted(current.keys() - state.keys()), sorted(state.keys() - current.keys())
        is_strict = options.get("strict", True) and (missing or unexpected)
        problems = [f"missing keys {missing}, unexpected keys {unexpected}"] if is_strict else []
        tensors = {
            name: value for name, value in current.items() if name in state and isinstance(value, Tensor)
        }
        for name, value in tensors.items():
            saved, own = tuple(state[name].shape), tuple(self._shape_of(name, value))
            if saved != own:
                problems.append(f"{name} has the shape {saved} in the state dict and {own} in the model")
        if problems:
            raise RuntimeError(
                f"The state dict does not fit {type(module).__name__}: "
                f"{some_of(problems, most=20, width=300)}."
            )
        # 2. Copy the weights, and exact values to the master weights; tied ones have several names.
        masters, layers = _Masters(self.strategy.engine_of(model)), _SplitLayers(module)
        for names, value in group_tied_names(tensors):
            stored: Any = state[names[0]]  # a tensor, or a safetensors slice
            full = layers.shard(value, stored if isinstance(stored, Tensor) else stored[:])
            with GatheredParameters([value], modifier_rank=0):
                if not is_sharded(value) or dist.get_rank() == 0:
                    value.copy_(full)
            masters.load(value, full)
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def model_tensors(self, model: nn.Module) -> StateDict:
        """Gather the full state dict, with the float32 master weights."""
        return self.full_state_dict(model, exact=True)

    def load_model(self, model: nn.Module, state: StateDict, **options: Any) -> Any:
        return self.load_full_state_dict(model, state, **options)

    # Optimizers: an engine has one.

    def _names(self) -> list[list[str]]:
        """Return the names of the optimizer's parameters, group by group."""
        owner = self.strategy.wrapper
        names = {id(value): name for name, value in owner.engine.module.named_parameters()}
        return [[names[id(tensor)] for tensor in group] for group in owner.groups]

    @torch.no_grad()
    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        """Gather the optimizer's full state dict, as in a single process; empty on ranks without `keep`."""
        del optimizer, models
        owner = self.strategy.wrapper
        outer = owner.optimizer
        if not is_flattened(outer):
            return getattr(outer, "optimizer", outer).state_dict() if keep else {}
        flat_states, states, names = outer.optimizer.state, dict[str, Any](), self._names()
        layers = _SplitLayers(owner.engine.module)
        for group, name, tensor in _trained(owner, names):
            flat: Any = next((flat for flat in _flats(owner, group) if flat in flat_states), None)
            entry: dict[str, Any] = {}
            for key, value in flat_states.get(flat, {}).items():
                if not _is_flat(value):  # Each parameter has its own step.
                    entry |= {} if value is None else {key: copy.deepcopy(value)}
                    continue
                if value.shape != flat.shape:
                    raise UnsupportedError(
                        f"The optimizer's state {key!r} has shape {tuple(value.shape)} for parameters that "
                        "DeepSpeed has flattened into one, and cannot be split by parameter. Save the "
                        "engine's own folder."
                    )
                full = ds_module("utils").safe_get_full_optimizer_state(tensor, key)
                with layers.whole(tensor, full):
                    full = tensor.detach() if tensor in layers else full.detach()
                entry[key] = full.cpu() if keep else None
            states |= {name: entry} if entry else {}
        groups = [*outer.optimizer.param_groups]
        return names_to_indices({"state": states, "param_groups": groups}, names) if keep else {}

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load an optimizer's full state dict, the same on every rank."""
        self.load_optimizer(optimizer, models, state_by_name(state, self._names()))

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        """Gather the full state dict of the optimizer, keyed by parameter name."""
        return state_by_name(self.full_optimizer_state(optimizer, models), self._names())

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        """Allocate full tensors on every rank."""
        del optimizer, models
        return allocator_like({})

    @torch.no_grad()
    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        """Load a state dict that is keyed by parameter name into the optimizer."""
        del optimizer, models
        owner, names, saved = self.strategy.wrapper, self._names(), state["param_groups"]
        outer, utils, layers = owner.optimizer, ds_module("utils"), _SplitLayers(owner.engine.module)
        trained = {name for _, name, _ in _trained(owner, names)}
        check_groups(
            [[*trained.intersection(group["params"])] for group in saved],
            [[*trained.intersection(group)] for group in names],
        )
        if not is_flattened(outer):
            load_in_place(getattr(outer, "optimizer", outer), names_to_indices(state, names))
            return
        for group, before in zip(outer.optimizer.param_groups, saved, strict=True):
            group.update({name: value for name, value in before.items() if name != "params"})
        for number, name, tensor in _trained(owner, names):
            flats, entry = _flats(owner, number), state["state"].get(name, {})
            # 1. Allocate the state of flat partitions as zeros, and link it to the parameters.
            for flat in flats:
                current = outer.optimizer.state[flat]
                for key, value in entry.items():
                    if not _is_flat(value):
                        current[key] = copy.deepcopy(value)
                    elif key not in current:
                        current[key] = torch.zeros_like(flat)
            if not is_sharded(tensor):
                utils.lazy_init_hp_params_optimizer_state([tensor], flats[0], outer.optimizer.state)
            # 2. Copy the values.
            for key, value in entry.items():
                if _is_flat(value):
                    full = layers.shard(tensor, value.to(tensor.device, torch.float32))
                    if is_sharded(tensor):
                        utils.safe_set_local_optimizer_state(tensor, _local_shard(tensor, full), key)
                    else:
                        utils.safe_set_full_optimizer_state(tensor, full, key)

    # The engine's own folder.

    def save_native(
        self, model: nn.Module, directory: Path, index: int, *, write: Write = torch.save
    ) -> None:
        """Write the engine's native checkpoint, which includes the optimizer."""
        owner = self.strategy.engine_of(model)
        if owner is None:
            if self.strategy.runtime.topology.is_main:
                write(super().full_state_dict(model), directory / f"{folder_name(index)}.bin")
            return

        def save(state_dict: Any, path: str) -> None:  # The engine passes both by name.
            write(state_dict, Path(path))

        with replaced_attributes(owner.engine.checkpoint_engine, {"save": save}):
            owner.engine.save_checkpoint(str(directory), tag=folder_name(index))

    def load_native(self, model: nn.Module, directory: Path, index: int) -> None:
        """Load a native checkpoint, written with any sharding."""
        owner = self.strategy.engine_of(model)
        if owner is None:
            path = directory / f"{folder_name(index)}.bin"
            super().load_full_state_dict(model, torch.load(path, map_location="cpu", weights_only=True))
            return
        engine, tensor = owner.engine, self.strategy.tensor_size
        folder = cast("Path", engine_folder(directory, folder_name(index), index))  # local, as `directory`
        # 1. Have the engine load a checkpoint of the same world size and ZeRO stage.
        is_alike = (
            tensor > 1  # and as many ranks have split the saved model
            and model_file(folder, tensor - 1).is_file()
            and not model_file(folder, tensor).is_file()
            and load_file(model_file(folder, 0))["dp_world_size"] == engine.dp_world_size
        )
        saved = None if is_alike else read_folder(folder)
        stage = int(engine.zero_optimization_stage())
        if saved is None or (
            saved.stage == stage and saved.models[0]["dp_world_size"] == engine.dp_world_size
        ):
            del saved

            def load_safely(path: str, map_location: Any = None) -> Any:
                del map_location  # The engine itself copies tensors to its device.
                return load_file(Path(path), for_engine=True)

            with replaced_attributes(engine.checkpoint_engine, {"load": load_safely}):
                loaded, _ = engine.load_checkpoint(str(directory), tag=folder.name)
            if loaded is None:
                raise CheckpointError(
                    f"DeepSpeed could not load {str(folder)!r}. See its log for the reason."
                )
            return
        # 2. Load any other checkpoint as full states.
        self.load_full_state_dict(model, saved.weights())
        optimizer = engine.optimizer
        if optimizer is not None:
            numbered = saved.numbered_optimizer()
            if numbered is None:
                self.load_optimizer(optimizer, [model], saved.optimizer())
            else:
                self.load_full_optimizer_state(optimizer, [model], numbered)
        for name in ("global_steps", "global_samples", "skipped_steps"):
            if name in saved.models[0]:
                setattr(engine, name, saved.models[0][name])
        schedule = saved.models[0].get("lr_scheduler")
        if schedule is not None and engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(schedule)


class _SplitLayers:
    """The layers of a model that AutoTP has split; none without AutoTP."""

    def __init__(self, module: nn.Module) -> None:
        self._layers: dict[int, list[Any]] = {}  # by the id of each parameter, all of its layer
        for layer in module.modules():
            parameters = [*layer.parameters(recurse=False)]
            if any(getattr(parameter, "ds_is_replaced_module", False) for parameter in parameters):
                self._layers |= {id(parameter): parameters for parameter in parameters}

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._layers

    @contextmanager
    def whole(self, value: Any, part: Tensor | None = None) -> Generator[None]:
        """Gather a parameter within the block, or a `part` of its shape. A collective over the ranks.

        DeepSpeed's own context splits anew at the end, into memory that its optimizer does not step.
        """
        layer = self._layers.get(id(value), [])
        shards = [parameter.data for parameter in layer]
        try:
            if layer and part is not None:
                value.data = part
            if layer:
                layer[0].gather_params(layer)
            yield
        finally:
            for parameter, shard in zip(layer, shards, strict=True):
                parameter.data = shard

    def shard(self, value: Any, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor of a parameter. A collective, as `whole`."""
        if value not in self:
            return full
        layer = self._layers[id(value)]
        with self.whole(value):
            value.data = full.to(value.device)
            layer[0]._tp_partition(layer)
            return value.data


class _Masters:
    """The float32 master weights of the parameters that an engine trains; none without one."""

    def __init__(self, owner: DeepSpeedEngineWrapper | None) -> None:
        self._has_engine = owner is not None
        self._trained: set[int] = set()  # ids, as of the following
        self._plain: dict[int, Tensor] = {}  # of optimizers that are not flattened
        if owner is not None:
            trained = [p for p in chain.from_iterable(owner.groups) if p.requires_grad]
            self._trained = {id(p) for p in trained if getattr(p, "ds_numel", p.numel())}
            self._plain = {id(p): master for p, master in plain_masters(owner.optimizer, owner.groups)}

    def gather(self, value: Tensor) -> Tensor | None:
        """Gather the master weight of a 16-bit parameter; `None` if it has none."""
        is_weight = isinstance(value, nn.Parameter) and value.requires_grad
        if not self._has_engine or not is_weight or value.dtype not in {torch.bfloat16, torch.float16}:
            return None
        master = ds_module("utils").safe_get_full_fp32_param(value)
        return self._plain.get(id(value), value.detach().float()) if master is None else master

    def load(self, value: Tensor, saved: Tensor) -> None:
        """Load the master weight of a parameter, if it has one."""
        if id(value) not in self._trained:
            return
        full = saved.to(value.device, torch.float32)
        if is_sharded(value):
            ds_module("utils").safe_set_local_fp32_param(value, _local_shard(value, full))
        elif id(value) in self._plain:
            self._plain[id(value)].copy_(full)
        else:
            ds_module("utils").safe_set_full_fp32_param(value, full)


def _trained(
    owner: DeepSpeedEngineWrapper, names: Sequence[Sequence[str]]
) -> Iterator[tuple[int, str, Tensor]]:
    """Yield the group, the name and the tensor of every trained parameter of an engine's optimizer."""
    for number, (group, tensors) in enumerate(zip(names, owner.groups, strict=True)):
        for name, tensor in zip(group, tensors, strict=True):
            if tensor.requires_grad:
                yield number, name, tensor


def _flats(owner: DeepSpeedEngineWrapper, group: int) -> list[Tensor]:
    """Return this rank's flat partitions of a group; at stage 3, where a group has none, those of all."""
    outer = owner.optimizer
    return outer.optimizer.param_groups[group]["params"] or outer.fp32_partitioned_groups_flat


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _local_shard(parameter: Any, full: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor, padded with zeros."""
    numel: int = parameter.ds_tensor.numel()
    begin = numel * dist.get_rank(parameter.ds_process_group)
    shard = full.flatten()[begin : begin + numel]
    return nn.functional.pad(shard, (0, numel - shard.numel()))


def folder_name(index: int) -> str:
    """Return the folder name of the model with an index.

    Example:
        >>> folder_name(0), folder_name(1)
        ('pytorch_model', 'pytorch_model_1')
    """
    return "pytorch_model" if index == 0 else f"pytorch_model_{index}"
