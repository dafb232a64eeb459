"""DeepSpeed's native checkpoint folder, inside a checkpoint of `save_state`."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_plugins.deepspeed.folder import engine_folder, read_folder
from accel_plugins.deepspeed.unpickle import load_file
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Generator

    from accel_plugins.deepspeed.state import EngineState
    from accel_plugins.roles import Write


def folder_name(index: int) -> str:
    """Return the folder's name of the model with an index.

    Example:
        >>> folder_name(0), folder_name(1)
        ('pytorch_model', 'pytorch_model_1')
    """
    return "pytorch_model" if index == 0 else f"pytorch_model_{index}"


def save_engine(engine: Any, directory: Path, index: int, *, write: Write = torch.save) -> None:
    """Write the engine's native checkpoint folder. A collective over all ranks.

    Args:
        engine: The engine.
        directory: An existing directory that all ranks share.
        index: Index of the model.
        write: Called as `write(state, path)` for each file with tensors; the engine writes the others itself.
    """
    with _replaced(engine.checkpoint_engine, save=lambda state_dict, path: write(state_dict, Path(path))):
        engine.save_checkpoint(str(directory), tag=folder_name(index))


def load_engine(engine: Any, state: EngineState, directory: Path, index: int) -> None:
    """Load a native checkpoint folder, also of another world size or ZeRO stage.

    Args:
        engine: The engine.
        state: Weights and optimizer state of the engine.
        directory: The directory with the folder.
        index: Index of the model.

    Raises:
        CheckpointError: The folder is absent or damaged, or of another model.
    """
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
