"""Save and load DeepSpeed engines: their native checkpoint, and full state dicts."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.modules import extract_model_from_parallel
from accel_plugins.dcp.protocol import StateForm
from accel_plugins.dcp.tensors import named_state
from accel_plugins.deepspeed.folder import engine_folder, read_folder
from accel_plugins.deepspeed.gathered import is_sharded
from accel_plugins.deepspeed.state import EngineState
from accel_plugins.deepspeed.unpickle import load_file
from accel_plugins.strategies.replicated import ReplicatedPersister
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from accel_plugins.dcp.protocol import StateAllocator
    from accel_plugins.roles import StateDict, Write
    from accel_plugins.strategies.deepspeed_step import DeepSpeedStepper
    from accel_state.runtime import Runtime

_PLAIN = ReplicatedPersister()  # of models without an engine


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedPersister:
    """Persister that gathers the sharded state of an engine, and shards it again when it is loaded."""

    runtime: Runtime
    stepper: DeepSpeedStepper

    def save_model(self, model: nn.Module, directory: Path, index: int, *, write: Write = torch.save) -> None:
        """Write the engine's native checkpoint, which includes the optimizer."""
        owner = self.stepper.owner_of(model)
        if owner is None:
            if self.runtime.topology.is_main:
                write(_PLAIN.full_state_dict(model), directory / f"{folder_name(index)}.bin")
        else:
            engine = owner.engine

            def save(state_dict: Any, path: str) -> None:  # as the engine calls it, by name
                write(state_dict, Path(path))

            with _replaced(engine.checkpoint_engine, save=save):
                engine.save_checkpoint(str(directory), tag=folder_name(index))

    def load_model(self, model: nn.Module, directory: Path, index: int) -> None:
        """Load the native checkpoint, also one that was written with another sharding."""
        owner = self.stepper.owner_of(model)
        if owner is None:
            path = directory / f"{folder_name(index)}.bin"
            state = torch.load(path, map_location="cpu", weights_only=True)
            _PLAIN.load_full_state_dict(model, state)
        else:
            load_engine(owner.engine, EngineState(owner.engine, owner.groups), directory, index)

    def save_optimizer(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        directory: Path,
        index: int,
        *,
        write: Write = torch.save,
    ) -> None:
        """Do nothing: the checkpoint of the model includes the optimizer."""

    def load_optimizer(self, optimizer: Optimizer, model: nn.Module, directory: Path, index: int) -> None:
        """Do nothing: `load_model` has loaded the optimizer."""

    def full_state_dict(self, model: nn.Module, *, keep: bool = True, exact: bool = False) -> StateDict:
        """Gather the full state dict, under the names of the unwrapped model.

        `exact` asks for the float32 master weights instead of the 16-bit weights of the model.
        """
        state = self._state_of(model)
        return _PLAIN.full_state_dict(model) if state is None else state.weights(keep=keep, exact=exact)

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        """Gather the full state dict tensor by tensor; tied tensors come together."""
        state = self._state_of(model)
        return _PLAIN.iter_full_state_dict(model) if state is None else state.iter_weights(keep=keep)

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        """Load a full state dict into the model."""
        engine = self._state_of(model)
        if engine is None:
            return _PLAIN.load_full_state_dict(model, state, **options)
        return engine.load_weights(state, **options)

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        """Gather the full state dict of the optimizer, as a run of one process has it."""
        del optimizer, models  # an engine has one of each
        return self.state.optimizer(keep=keep)

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load a full state dict into the optimizer."""
        del optimizer, models
        self.state.load_optimizer(state)

    @property
    def state(self) -> EngineState:
        """The state of the engine that is trained."""
        return EngineState(self.stepper.wrapper.engine, self.stepper.wrapper.groups)

    def _state_of(self, model: nn.Module) -> EngineState | None:
        owner = self.stepper.owner_of(model)
        if owner is not None:
            return EngineState(owner.engine, owner.groups)
        core = extract_model_from_parallel(model, keep_torch_compile=False)
        return EngineState(None, (), module=core) if any(map(is_sharded, core.parameters())) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedShards:
    """Sharded state of an engine: saved in its native format, loaded from others as full tensors."""

    persister: DeepSpeedPersister

    def form(self) -> StateForm:
        """Return `StateForm.NATIVE`."""
        return StateForm.NATIVE

    def model_tensors(self, model: nn.Module) -> StateDict:
        """Gather the full state dict, with the float32 master weights."""
        return self.persister.full_state_dict(model, exact=True)

    def load_model(self, model: nn.Module, state: StateDict, **options: Any) -> None:
        """Load a full state dict into the model."""
        self.persister.load_full_state_dict(model, state, **options)

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        """Gather the full state dict of the optimizer, keyed by parameter name."""
        state = self.persister.full_optimizer_state(optimizer, models)
        return named_state(state, self.persister.state.names())

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        """Allocate full tensors on every rank."""
        del optimizer, models
        return _full

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        """Load a state dict that is keyed by parameter name into the optimizer."""
        del optimizer, models
        self.persister.state.load_named_optimizer(state)


def _full(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    del name
    return torch.empty(shape, dtype=dtype)


def folder_name(index: int) -> str:
    """Return the folder's name of the model with an index.

    Example:
        >>> folder_name(0), folder_name(1)
        ('pytorch_model', 'pytorch_model_1')
    """
    return "pytorch_model" if index == 0 else f"pytorch_model_{index}"


def load_engine(engine: Any, state: EngineState, directory: Path, index: int) -> None:
    """Load a native checkpoint folder, also of another world size or ZeRO stage."""
    folder = engine_folder(directory, folder_name(index), index)
    saved = read_folder(folder)
    stage = int(engine.zero_optimization_stage())
    if saved.stage == stage and saved.models[0]["dp_world_size"] == engine.dp_world_size:
        del saved
        with _reading_safely(engine):
            path, _ = engine.load_checkpoint(str(directory), tag=folder.name)
        if path is None:
            raise CheckpointError(f"DeepSpeed could not load {str(folder)!r}; its log has the reason.")
        return
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


@contextmanager
def _reading_safely(engine: Any) -> Generator[None]:
    """Restrict the engine's unpickling to tensors and its own classes within the block."""

    def load(path: str, map_location: Any = None) -> Any:
        del map_location  # the engine copies tensors to its device itself
        return load_file(Path(path), for_engine=True)

    with _replaced(engine.checkpoint_engine, load=load):
        yield


@contextmanager
def _replaced(owner: Any, **methods: Any) -> Generator[None]:
    """Replace methods of an object within the block."""
    vars(owner).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(owner)[name]
