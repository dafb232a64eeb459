"""Load a checkpoint into the objects of a run, and warn about what is not restored."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_ops.weights.names import SAFETENSORS_SUFFIX
from accel_ops.weights.safetensors_file import SafetensorsFile
from accel_ops.weights.tensors import id_tensor_storage
from accel_plugins.dcp.tensors import plain_name
from accel_state.errors import CheckpointError
from accel_train.checkpoint import layout
from accel_train.checkpoint.encode import read_object
from accel_train.checkpoint.files import record_of, record_of_mapping
from accel_train.checkpoint.folder import SMALL, identity, is_being_replaced
from accel_train.checkpoint.hashed_reader import HashedBytes, HashedReader
from accel_train.checkpoint.manifest import FileRecord
from accel_train.checkpoint.rng import ENGINE_KEY, seed_apart, write_rng

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from accel_plugins.roles import Generators
    from accel_train.checkpoint.manifest import Manifest

logger = logging.getLogger(__name__)

_MOST_NAMES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint that one rank reads.

    Args:
        manifest: `None` for a checkpoint that another library wrote.
        map_location: The device to which optimizer states are read first.
        opened: The files that are read already, by name.
        records: Size and checksum of those that were hashed while they were read.
        mapped: Those that are mapped.
        is_open: Whether `opened` has all files that are needed.
        stamp: The folder's `identity` when it was verified.
    """

    folder: Path
    manifest: Manifest | None
    rank: int
    world_size: int
    device: torch.device
    map_location: Any = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    opened: dict[str, Any] = field(default_factory=dict[str, Any])
    records: dict[str, FileRecord] = field(default_factory=dict[str, FileRecord])
    mapped: dict[str, SafetensorsFile] = field(default_factory=dict[str, SafetensorsFile])
    is_open: bool = False
    stamp: tuple[int, ...] | None = None

    def is_unchanged(self) -> bool:
        """Whether the folder has held the same checkpoint since it was verified."""
        return self.stamp == identity(self.folder) and not is_being_replaced(self.folder)

    def hashes(self, name: str) -> bool:
        """Whether `open` hashes a file while it reads it. It does not read what is mapped, or a shard."""
        listed = self.manifest is not None and name in self.manifest.files and "/" not in name
        return listed and not name.endswith(SAFETENSORS_SUFFIX) and not self.options.get("mmap")

    def open(self, name: str, **options: Any) -> None:
        """Read one file, for `read` to return it later."""
        if self.manifest is None or not self.hashes(name):
            self.opened[name] = self.read(name, **options)
            return
        path = self._path(name)
        is_small = self.manifest.files[name].size < SMALL
        with HashedBytes(path) if is_small else HashedReader(path) as file:
            self.opened[name] = read_object(path, file=file, **{**options, **self.options})
            self.records[name] = file.finish()

    def record_of(self, name: str) -> FileRecord:
        """Return the size and the checksum of a file: of its mapping, if it is open, else of what is on disk.

        Raises:
            OSError: It cannot be read.
        """
        mapped = self.mapped.get(name)
        return record_of(self.folder / name) if mapped is None else record_of_mapping(mapped)

    def read(self, name: str, **options: Any) -> Any:
        """Read one file. Safetensors are mapped: they stay what they are if the file is replaced.

        Raises:
            CheckpointError: The file is absent or damaged, or holds objects that are unsafe to load.
        """
        if name in self.opened:
            return self.opened.pop(name)
        path = self._path(name)
        if name.endswith(SAFETENSORS_SUFFIX):
            file = self.mapped[name] = SafetensorsFile(path)
            return {key: file.tensor(key) for key in file.entries}
        return read_object(path, **{**options, **self.options})

    def _path(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            raise CheckpointError(
                f"The checkpoint {str(self.folder)!r} has no {name!r}. Prepare and register the same "
                "objects, in the same order, as in the run that was saved."
            )
        return path

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.folder / name).is_file()

    def weights_name(self, index: int) -> str:
        """Return the file with the weights of a model; if there is none, the one that should be there."""
        safe, plain = layout.weights_name(index, safe=True), layout.weights_name(index, safe=False)
        sharded = layout.fsdp_weights_name(index)  # what other libraries write of a model that was sharded
        return next((name for name in (safe, plain, sharded) if self.has(name)), safe)

    def position_name(self) -> str:
        """Return the file with the positions of this rank's loaders, if there is one."""
        # Positions are global, so that in another world any rank's will do, and rank 0 always has one.
        same_world = self.manifest is not None and self.manifest.world_size == self.world_size
        return layout.position_name(self.rank if same_world else 0)

    def rng_name(self) -> str | None:
        """Return the file with the RNG states that this rank reads, if there is one."""
        rank = self.rng_rank()
        return None if rank is None else layout.rng_name(rank)

    def rng_rank(self) -> int | None:
        """Return the rank whose RNG states this one reads: its own, or another if it has none."""
        saved = self.ranks()
        if not saved or self.rank in saved:
            return self.rank if saved else None
        return saved[self.rank % len(saved)]

    def ranks(self) -> list[int]:
        """Return the ranks whose RNG states were saved."""
        count = self.manifest.world_size if self.manifest is not None else len(list(self.folder.iterdir()))
        return [rank for rank in range(count) if self.has(layout.rng_name(rank))]


def restore_model(
    source: Source,
    index: int,
    model: nn.Module,
    *,
    load: Callable[..., Any] | None = None,
    **options: Any,
) -> None:
    """Load the weights of a model."""
    state: Mapping[str, Any] = source.read(source.weights_name(index))
    complete = with_second_names(state, local_tensors(model))
    (load or model.load_state_dict)(complete, **options)


def warn_about_more_models(source: Source, count: int) -> None:
    """Warn about weights of models that the run does not have."""
    for safe in (True, False):
        name = layout.weights_name(count, safe=safe)
        if source.has(name):
            logger.warning(
                "%s is in the checkpoint %s, but no model is prepared for it.", name, source.folder
            )


def shortened(error: RuntimeError) -> RuntimeError:
    """Shorten the message of a `Module.load_state_dict` error that names thousands of tensors.

    Example:
        >>> len(str(shortened(RuntimeError(", ".join(["name"] * 30_000))))) < 200
        True
    """
    lines = [_first(line, ", ") for line in str(error).split("\n")]
    text = _first("\n".join(lines), "\n")
    return error if text == str(error) else type(error)(text)


def _first(text: str, separator: str) -> str:
    items = text.split(separator)
    rest = len(items) - _MOST_NAMES
    return text if rest <= 0 else separator.join([*items[:_MOST_NAMES], f"and {rest} more"])


def local_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under every name that they have in a state dict; no hooks are run.

    Example:
        >>> import torch
        >>> sorted(local_tensors(torch.nn.Linear(1, 1)))
        ['bias', 'weight']
    """
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        transient = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage] - has no other name
        for name, buffer in module.named_buffers(recurse=False):
            if name not in transient:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return {name if "_orig_mod" in name else plain_name(name): tensor for name, tensor in found.items()}


def with_second_names(state: Mapping[str, Any], like: Mapping[str, Tensor]) -> dict[str, Any]:
    """Add all names of tied weights, which are saved under one name.

    Example:
        >>> import torch
        >>> tied = torch.zeros(1)
        >>> sorted(with_second_names({"a": torch.ones(1)}, {"a": tied, "b": tied}))
        ['a', 'b']
    """
    names: dict[object, list[str]] = {}
    for name, value in like.items():
        same: object = id(value)  # subclasses that wrap tensors, as sharded ones, may have no memory here
        if not is_traceable_wrapper_subclass(value) and value.numel() and not value.is_meta:
            begin = (id_tensor_storage(value), value.storage_offset())
            same = (begin, value.dtype, tuple(value.shape), value.stride())
        names.setdefault(same, []).append(name)
    complete = dict(state)
    for group in names.values():
        known = next((name for name in group if name in state), None)
        if known is not None:
            complete |= {name: state[known] for name in group if name not in state}
    return complete


def restore_states(
    source: Source, name_of: Callable[[int], str], loads: Sequence[Callable[[Any], Any]]
) -> None:
    """Load the state of optimizers, schedulers or registered objects."""
    for index, load in enumerate(loads):
        load(source.read(name_of(index), map_location=source.map_location))
    if source.has(name_of(len(loads))):
        logger.warning(
            "%s is in the checkpoint %s, but no object was prepared or registered for it here.",
            name_of(len(loads)),
            source.folder,
        )


def restore_positions(source: Source, dataloaders: Sequence[Any]) -> None:
    """Resume the epoch of the loaders, also with another number of ranks.

    Stateful ones, and those with `resume_mid_epoch`, go on with the next batch; others begin the epoch again.
    """
    if not dataloaders:
        return
    name = source.position_name()
    if not source.has(name):
        _restore_foreign_positions(source, dataloaders)
        return
    states = source.read(name)["loaders"]
    if len(states) != len(dataloaders):
        logger.warning(
            "The checkpoint %s knows the position of %d data loaders, and %d are prepared.",
            source.folder,
            len(states),
            len(dataloaders),
        )
    for loader, state in zip(dataloaders, states, strict=False):
        if loader.resume_mid_epoch or loader.use_stateful_dataloader:
            loader.load_state_dict(state)
        else:
            loader.load_epoch(state)


def _restore_foreign_positions(source: Source, dataloaders: Sequence[Any]) -> None:
    lost: list[int] = []
    for index, loader in enumerate(dataloaders):
        name = layout.loader_state_name(index)
        if loader.use_stateful_dataloader and source.has(name):
            loader.load_state_dict(source.read(name))
        else:
            lost.append(index)
    if lost:
        logger.warning(
            "The checkpoint %s does not say where data loader(s) %s were: they begin a new epoch.",
            source.folder,
            ", ".join(map(str, lost)),
        )
    unread = layout.sampler_name(0)
    if source.has(unread):
        logger.warning("%s holds a pickled sampler, and is not read.", source.folder / unread)


def restore_rng(source: Source, generators: Generators | None = None) -> None:
    """Restore the RNG states of this rank, and those of an engine."""
    saved_rank = source.rng_rank()
    if saved_rank is None:
        logger.warning("The checkpoint %s has no states of random numbers.", source.folder)
        return
    states: dict[str, Any] = source.read(layout.rng_name(saved_rank))
    if saved_rank == source.rank:
        complaints = write_rng(states, source.device)
        complaints += _restore_engine(states, generators)
        if complaints:
            logger.warning(
                "Random numbers of rank %d, from %s, came back in part: %s.",
                source.rank,
                source.folder,
                "; ".join(complaints),
            )
    else:
        seed_apart(states, source.rank)
        _restore_engine(states, generators)
        logger.warning(
            "The checkpoint %s is of %d rank(s): rank %d has random numbers seeded from those of rank %d.",
            source.folder,
            len(source.ranks()),
            source.rank,
            saved_rank,
        )


def _restore_engine(states: Mapping[str, Any], generators: Generators | None) -> list[str]:
    if generators is None:
        return [f"{ENGINE_KEY!r} is of an engine that is not here"] if ENGINE_KEY in states else []
    problem = generators.load_state_dict(states.get(ENGINE_KEY, {}))
    return [] if problem is None else [problem]


def step_of(source: Source) -> int:
    """Return the number of micro-batches after the last optimizer step at the time of saving."""
    if source.manifest is not None:
        return source.manifest.step
    name = layout.rng_name(0)  # where others keep it
    return int(source.read(name).get("step", 0)) if source.has(name) else 0
