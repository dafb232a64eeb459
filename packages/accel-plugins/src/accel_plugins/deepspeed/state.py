"""State of DeepSpeed's engines: full weights and optimizer state, and the engine's own folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_ops.modules import extract_model_from_parallel, replaced_attributes
from accel_plugins.deepspeed.folder import engine_folder, load_file, read_folder
from accel_plugins.deepspeed.library import GatheredParameters, ds_module, is_flattened, is_sharded
from accel_plugins.full_parameters import FullParameters, ParameterSource, iter_gathered, named_parameters_of
from accel_plugins.sharding.shards import group_tied_names
from accel_plugins.sharding.state import StateAllocator, StateForm, names_to_indices, state_by_name
from accel_plugins.strategy import StateDict
from accel_plugins.unsharded import States, Write, load_in_place
from accel_state.errors import CheckpointError, UnsupportedError, some_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.deepspeed.strategy import DeepSpeedStrategy


@final
class EngineState:
    """Weights and optimizer state of one engine. Every method is a collective over all ranks.

    A sharded model may have no engine. `groups` are the optimizer's original parameters, group by group.
    """

    def __init__(
        self, engine: Any, groups: Sequence[Sequence[Tensor]] = (), *, module: nn.Module | None = None
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._module: nn.Module = engine.module if module is None else module

    @torch.no_grad()
    def iter_weights(self, *, keep: bool, exact: bool = False) -> Iterator[dict[str, Any]]:
        """Gather the full state dict tensor by tensor, tied names together; empty on ranks without `keep`.

        `exact` requests the float32 master weights of 16-bit parameters.
        """
        to_host = any(map(is_sharded, self._module.parameters()))
        for names, value in group_tied_names(self._module.state_dict(keep_vars=True)):
            full = self._full(value, keep=keep, exact=exact, to_host=to_host)
            yield dict.fromkeys(names, full) if keep else {}
            del full  # It is freed before the next tensor is gathered.

    def names_of_weights(self) -> list[str]:
        """Return the names of the state dict, in the order of the model."""
        return [*self._module.state_dict(keep_vars=True)]

    def sources(self) -> list[ParameterSource]:
        """Return the parameters of the model for `iter_gathered`."""
        return [
            _source(names, parameter)
            for names, parameter in named_parameters_of(self._module.state_dict(keep_vars=True))
        ]

    @torch.no_grad()
    def load_weights(self, state: Mapping[str, Any], *, strict: bool = True, assign: bool = False) -> Any:
        """Load a full state dict into the model and the float32 master weights."""
        if assign:
            raise UnsupportedError(
                "load_state_dict(assign=True): DeepSpeed's engine keeps its own tensors. Remove assign."
            )
        # 1. Refuse a state dict that does not fit.
        current = self._module.state_dict(keep_vars=True)
        missing, unexpected = sorted(current.keys() - state.keys()), sorted(state.keys() - current.keys())
        problems = [f"missing keys {missing}, unexpected keys {unexpected}"] if missing or unexpected else []
        shapes = [name for name in current if name in state and isinstance(current[name], torch.Tensor)]
        problems = problems if strict else []
        for name in shapes:
            saved, own = (
                tuple(state[name].shape),
                tuple(getattr(current[name], "ds_shape", current[name].shape)),
            )
            if saved != own:
                problems.append(f"{name} has the shape {saved} in the state dict and {own} in the model")
        if problems:
            raise RuntimeError(
                f"The state dict does not fit {type(self._module).__name__}: "
                f"{some_of(problems, most=20, width=300)}."
            )
        # 2. Copy the weights, and exact values to the master weights.
        seen: set[int] = set()
        for name in shapes:
            value = current[name]
            if id(value) not in seen:
                seen.add(id(value))
                with GatheredParameters([value], modifier_rank=0):
                    if not is_sharded(value) or dist.get_rank() == 0:
                        value.copy_(_read(state[name]))
        outer = None if self._engine is None else self._engine.optimizer
        refresh: Callable[[], None] | None = getattr(outer, "refresh_fp32_params", None)
        if refresh is not None:
            refresh()
        utils, masters = ds_module("utils"), self._masters()
        for name in shapes:
            value = current[name]
            if not self._has_master(value):
                continue
            full = _read(state[name]).to(value.device, torch.float32)
            if is_sharded(value):
                utils.safe_set_local_fp32_param(value, _local_shard(value, full))
            elif id(value) in masters:
                masters[id(value)].copy_(full)
            else:
                utils.safe_set_full_fp32_param(value, full)
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    @torch.no_grad()
    def optimizer(self, *, keep: bool) -> dict[str, Any]:
        """Gather the optimizer's full state dict, as in a single process; empty on ranks without `keep`."""
        outer = self._engine.optimizer
        if not is_flattened(outer):
            base = getattr(outer, "optimizer", outer)
            return base.state_dict() if keep else {}
        numbers = count()
        groups = [
            {**group, "params": [*islice(numbers, len(tensors))]}
            for tensors, group in zip(self._groups, outer.optimizer.param_groups, strict=False)
        ]
        get_state = ds_module("utils").safe_get_full_optimizer_state
        states: dict[int, Any] = {}
        for group, index, tensor in self._trained():
            flat = next((flat for flat in self._flats(group) if flat in outer.optimizer.state), None)
            if flat is None:
                continue
            entry: dict[str, Any] = {}
            for name, value in outer.optimizer.state[flat].items():
                if _is_flat(value) and value.shape != flat.shape:
                    raise UnsupportedError(
                        f"The optimizer's state {name!r} has shape {tuple(value.shape)} for parameters that "
                        "DeepSpeed has flattened into one, and cannot be split by parameter. Save the "
                        "engine's own folder."
                    )
                if _is_flat(value):
                    full = get_state(tensor, name)
                    entry[name] = _on_host(full) if keep else None
                elif value is not None:  # Each parameter has its own step.
                    entry[name] = value.clone() if isinstance(value, torch.Tensor) else value
            states |= {index: entry} if keep and entry else {}
        return {"state": states, "param_groups": groups} if keep else {}

    @torch.no_grad()
    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Load an optimizer's full state dict, the same on every rank."""
        outer = self._engine.optimizer
        if not is_flattened(outer):
            load_in_place(getattr(outer, "optimizer", outer), state)
            return
        saved: Sequence[Mapping[str, Any]] = state["param_groups"]
        counts = [len(group["params"]) for group in saved]
        if counts != [len(group) for group in self._groups]:
            raise CheckpointError(
                f"The checkpoint has the state of an optimizer with groups of {counts} parameters, but the "
                f"prepared one has groups of {[len(group) for group in self._groups]}. Build it as in "
                "the saved run."
            )
        for group, before in zip(outer.optimizer.param_groups, saved, strict=False):
            group.update({name: value for name, value in before.items() if name != "params"})
        utils = ds_module("utils")
        order = [index for group in saved for index in group["params"]]
        for number, position, tensor in self._trained():
            flats, entry = self._flats(number), state["state"].get(order[position], {})
            # 1. Allocate the state of flat partitions as zeros, and link it to the parameters.
            for flat in flats:
                current = outer.optimizer.state[flat]
                for name, value in entry.items():
                    if not _is_flat(value):
                        current[name] = value.clone() if isinstance(value, torch.Tensor) else value
                    elif name not in current:
                        current[name] = torch.zeros_like(flat)
            if not is_sharded(tensor):
                utils.lazy_init_hp_params_optimizer_state([tensor], flats[0], outer.optimizer.state)
            # 2. Copy the values.
            for name, value in entry.items():
                if not _is_flat(value):
                    continue
                full = value.to(tensor.device, torch.float32)
                if is_sharded(tensor):
                    utils.safe_set_local_optimizer_state(tensor, _local_shard(tensor, full), name)
                else:
                    utils.safe_set_full_optimizer_state(tensor, full, name)

    def _trained(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the group, the number and the tensor of every trained parameter."""
        number = 0
        for group, tensors in enumerate(self._groups):
            for tensor in tensors:
                if tensor.requires_grad:
                    yield group, number, tensor
                number += 1

    def _flats(self, group: int) -> list[Tensor]:
        """Return this rank's flat partitions of a group; at stage 3, where a group has none, those of all."""
        outer = self._engine.optimizer
        return outer.optimizer.param_groups[group]["params"] or outer.fp32_partitioned_groups_flat

    def _masters(self) -> dict[int, Tensor]:
        """Return the master weights of 16-bit parameters that are not flattened, by the parameter's id."""
        if self._engine is None or is_flattened(self._engine.optimizer):
            return {}
        outer = self._engine.optimizer
        groups = getattr(outer, "optimizer", outer).param_groups
        return {
            id(small): large
            for tensors, group in zip(self._groups, groups, strict=False)
            for small, large in zip([t for t in tensors if t.requires_grad], group["params"], strict=False)
            if small.shape == large.shape
        }

    def names(self) -> list[list[str]]:
        """Return the names of the optimizer's parameters, group by group."""
        names = {id(value): name for name, value in self._module.named_parameters()}
        return [[names[id(tensor)] for tensor in group] for group in self._groups]

    def load_named_optimizer(self, state: Mapping[str, Any]) -> None:
        """Load an optimizer's full state dict with parameters by name."""
        current = self.names()
        saved = state["param_groups"]
        known = {name for group in saved for name in group["params"]}
        lost = sorted({name for group in current for name in group} - known)
        trained = {name for name, value in self._module.named_parameters() if value.requires_grad}
        if len(saved) != len(current) or trained & {*lost}:
            raise CheckpointError(
                f"The checkpoint has the state of an optimizer of {len(saved)} group(s), without "
                f"{', '.join(lost) or 'further parameters'}; the prepared one has {len(current)} group(s). "
                "Build it as in the saved run."
            )
        self.load_optimizer(names_to_indices(state, current))

    def _has_master(self, value: Any) -> bool:
        is_weight = isinstance(value, torch.nn.Parameter) and value.requires_grad
        return is_weight and value.dtype in {torch.bfloat16, torch.float16} and self._engine is not None

    def _full(self, value: Any, *, keep: bool, exact: bool, to_host: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if exact and self._has_master(value):
            master = ds_module("utils").safe_get_full_fp32_param(value)
            if master is None:
                master = self._masters().get(id(value), value.detach().float())
            return _on_host(master) if keep else None
        if not is_sharded(value):
            return (_on_host(value) if to_host else value.detach()) if keep else None
        with GatheredParameters([value]):
            return _on_host(value.detach().clone()) if keep else None


def _is_flat(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _read(value: Any) -> Tensor:
    """Return a tensor, or read it from a safetensors slice."""
    return value if isinstance(value, torch.Tensor) else value[:]


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _local_shard(parameter: Any, full: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor, padded with zeros."""
    numel: int = parameter.ds_tensor.numel()
    flat = full.flatten()
    begin = numel * dist.get_rank(parameter.ds_process_group)
    shard = flat[begin : begin + numel]
    return torch.nn.functional.pad(shard, (0, numel - shard.numel()))


def _source(names: Sequence[str], parameter: Any) -> ParameterSource:
    if not is_sharded(parameter):
        return ParameterSource(
            names=names, shape=parameter.shape, dtype=parameter.dtype, full=parameter.detach()
        )
    return ParameterSource(
        names=names,
        shape=parameter.ds_shape,
        dtype=parameter.dtype,
        groups=(parameter.ds_process_group,),
        write=partial(_write_shard, parameter),
    )


def _write_shard(parameter: Any, full: Tensor) -> None:
    """Write this rank's flat shard; the engine gathers parameters that are quantised or on disk."""
    shard, group = parameter.ds_tensor, parameter.ds_process_group
    if shard.dtype == parameter.dtype and shard.numel() == shard.ds_numel:
        begin = shard.numel() * dist.get_rank(group)
        target = full.view(-1)[begin : begin + shard.numel()]
        target.copy_(shard[: target.numel()])
        return
    with GatheredParameters([parameter]):
        if dist.get_rank(group) == 0:
            full.copy_(parameter)


class DeepSpeedStates(States):
    """Gathers the sharded state of an engine, and shards it again at load; saved in its native format."""

    is_sharded = True

    def __init__(self, strategy: DeepSpeedStrategy) -> None:
        self.strategy = strategy

    def save_native(
        self, model: nn.Module, directory: Path, index: int, *, write: Write = torch.save
    ) -> None:
        """Write the engine's native checkpoint, which includes the optimizer."""
        owner = self.strategy.engine_of(model)
        if owner is None:
            if self.strategy.runtime.topology.is_main:
                write(super().full_state_dict(model), directory / f"{folder_name(index)}.bin")
        else:
            engine = owner.engine

            def save(state_dict: Any, path: str) -> None:  # The engine passes both by name.
                write(state_dict, Path(path))

            with replaced_attributes(engine.checkpoint_engine, {"save": save}):
                engine.save_checkpoint(str(directory), tag=folder_name(index))

    def load_native(self, model: nn.Module, directory: Path, index: int) -> None:
        """Load a native checkpoint, written with any sharding."""
        owner = self.strategy.engine_of(model)
        if owner is None:
            path = directory / f"{folder_name(index)}.bin"
            super().load_full_state_dict(model, torch.load(path, map_location="cpu", weights_only=True))
            return
        engine, state = owner.engine, EngineState(owner.engine, owner.groups)
        folder = cast(
            "Path", engine_folder(directory, folder_name(index), index)
        )  # It is local, as `directory`.
        saved = read_folder(folder)
        # 1. Have the engine load a checkpoint of the same world size and ZeRO stage.
        stage = int(engine.zero_optimization_stage())
        if saved.stage == stage and saved.models[0]["dp_world_size"] == engine.dp_world_size:
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
        state.load_weights(saved.weights())
        if engine.optimizer is not None:
            numbered = saved.numbered_optimizer()
            if numbered is None:
                state.load_named_optimizer(saved.optimizer())
            else:
                state.load_optimizer(numbered)
        for name in ("global_steps", "global_samples", "skipped_steps"):
            if name in saved.models[0]:
                setattr(engine, name, saved.models[0][name])
        schedule = saved.models[0].get("lr_scheduler")
        if schedule is not None and engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(schedule)

    def full_state_dict(self, model: nn.Module, *, keep: bool = True, exact: bool = False) -> StateDict:
        """Gather the full state dict, under the names of the unwrapped model.

        `exact` requests the float32 master weights instead of the 16-bit weights of the model.
        """
        state = self._state_of(model)
        if state is None:
            return super().full_state_dict(model)
        parts = state.iter_weights(keep=keep, exact=exact)
        full = dict(chain.from_iterable(part.items() for part in parts))
        return {name: full[name] for name in state.names_of_weights() if name in full}

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        state = self._state_of(model)
        return super().iter_full_state_dict(model) if state is None else state.iter_weights(keep=keep)

    def iter_full_parameters(self, model: nn.Module, request: FullParameters) -> Iterator[tuple[str, Tensor]]:
        state = self._state_of(model)
        if state is None:
            return super().iter_full_parameters(model, request)
        return iter_gathered(state.sources(), request, self.strategy.runtime.device)

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        own = self._state_of(model)
        if own is None:
            return super().load_full_state_dict(model, state, **options)
        return own.load_weights(state, **options)

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        del optimizer, models  # An engine has one of each.
        return self.state.optimizer(keep=keep)

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        del optimizer, models
        self.state.load_optimizer(state)

    @property
    def state(self) -> EngineState:
        """The state of the trained engine."""
        return EngineState(self.strategy.wrapper.engine, self.strategy.wrapper.groups)

    def _state_of(self, model: nn.Module) -> EngineState | None:
        owner = self.strategy.engine_of(model)
        if owner is not None:
            return EngineState(owner.engine, owner.groups)
        core = extract_model_from_parallel(model, keep_torch_compile=False)
        return EngineState(None, (), module=core) if any(map(is_sharded, core.parameters())) else None

    def form(self) -> StateForm:
        return StateForm.NATIVE

    def model_tensors(self, model: nn.Module) -> StateDict:
        """Gather the full state dict, with the float32 master weights."""
        return self.full_state_dict(model, exact=True)

    def load_model(self, model: nn.Module, state: StateDict, **options: Any) -> Any:
        return self.load_full_state_dict(model, state, **options)

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        """Gather the full state dict of the optimizer, keyed by parameter name."""
        state = self.full_optimizer_state(optimizer, models)
        return state_by_name(state, self.state.names())

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        """Allocate full tensors on every rank."""
        del optimizer, models
        return lambda _name, _key, shape, dtype: torch.empty(shape, dtype=dtype, device="cpu")

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        """Load a state dict that is keyed by parameter name into the optimizer."""
        del optimizer, models
        self.state.load_named_optimizer(state)


def folder_name(index: int) -> str:
    """Return the folder name of the model with an index.

    Example:
        >>> folder_name(0), folder_name(1)
        ('pytorch_model', 'pytorch_model_1')
    """
    return "pytorch_model" if index == 0 else f"pytorch_model_{index}"
