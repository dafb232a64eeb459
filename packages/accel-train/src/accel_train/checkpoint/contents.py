"""The contents of a checkpoint: the objects of a run, each with its file."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from accel_train.checkpoint import layout
from accel_train.checkpoint.encode import write_object, write_weights
from accel_train.checkpoint.rng import ENGINE_KEY, read_rng

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from accel_plugins.roles import Generators


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file that this rank writes.

    Args:
        name: Inside the checkpoint.
        read: Called once; returns the state tree that is written.
        write: Called as `write(state, sink)`, with that tree or a copy of it.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any, Any], None] = write_object

    def write_to(self, sink: Any) -> None:
        """Write the state as it is now."""
        self.write(self.read(), sink)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The objects whose state makes a checkpoint."""

    weights: Sequence[Mapping[str, Any]] = ()
    optimizers: Sequence[Mapping[str, Any]] = ()
    schedulers: Sequence[Any] = ()
    dataloaders: Sequence[Any] = ()
    custom: Sequence[Any] = ()
    scaler: Mapping[str, Any] = field(default_factory=dict[str, Any])
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    generators: Generators | None = None


def shared_parts(contents: Contents, *, safe: bool) -> list[Part]:
    """List the files that one rank writes for all."""
    parts = [
        Part(
            name=layout.weights_name(index, safe=safe),
            read=partial(dict, state),
            write=partial(write_weights, safe=safe),
        )
        for index, state in enumerate(contents.weights)
    ]
    parts += [
        Part(name=layout.optimizer_name(index), read=partial(dict, state))
        for index, state in enumerate(contents.optimizers)
    ]
    for name_of, objects in (
        (layout.scheduler_name, contents.schedulers),
        (layout.custom_name, contents.custom),
    ):
        parts += [Part(name=name_of(index), read=one.state_dict) for index, one in enumerate(objects)]
    parts += [
        Part(name=layout.loader_state_name(index), read=loader.torchdata_state)
        for index, loader in enumerate(contents.dataloaders)
        if loader.use_stateful_dataloader and loader.torchdata_state()
    ]
    if contents.scaler:
        parts.append(Part(name=layout.SCALER_NAME, read=partial(dict, contents.scaler)))
    if contents.recipe:
        parts.append(Part(name=layout.RECIPE_NAME, read=partial(dict, contents.recipe)))
    return parts


def rank_files(contents: Contents, *, rank: int, device: torch.device) -> list[Part]:
    """List the files that every rank writes: the positions of its loaders and its RNG states."""
    parts: list[Part] = []
    if contents.dataloaders:
        parts.append(
            Part(
                name=layout.position_name(rank),
                read=lambda: {"loaders": [loader.state_dict() for loader in contents.dataloaders]},
            )
        )
    parts.append(Part(name=layout.rng_name(rank), read=partial(_read_rng, contents, device)))
    return parts


def _read_rng(contents: Contents, device: torch.device) -> dict[str, Any]:
    engine = None if contents.generators is None else contents.generators.state_dict()
    return read_rng(device) | ({ENGINE_KEY: engine} if engine else {})
