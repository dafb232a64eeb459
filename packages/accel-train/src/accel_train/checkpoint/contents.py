"""What a checkpoint consists of: the objects of a run, each with its file."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from accel_train.checkpoint import layout
from accel_train.checkpoint.encode import write_object, write_weights
from accel_train.checkpoint.rng import read_rng
from accel_train.checkpoint.saving import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The objects whose state makes a checkpoint.

    Args:
        weights: The state dict of every model.
        optimizers: The state dict of every optimizer.
        schedulers: In the order of preparation; each with `state_dict`, as all that follow.
        dataloaders: In the order of preparation.
        custom: Registered objects.
        scaler: The state of the loss scaler; empty without one.
    """

    weights: Sequence[Mapping[str, Any]] = ()
    optimizers: Sequence[Mapping[str, Any]] = ()
    schedulers: Sequence[Any] = ()
    dataloaders: Sequence[Any] = ()
    custom: Sequence[Any] = ()
    scaler: Mapping[str, Any] = field(default_factory=dict[str, Any])


def shared_parts(contents: Contents, *, safe: bool) -> list[Part]:
    """What one rank writes for all.

    Args:
        contents: The objects.
        safe: Whether weights are written as safetensors.
    """
    parts = [
        Part(name=layout.weights_name(index, safe=safe), write=partial(_weights, state, safe))
        for index, state in enumerate(contents.weights)
    ]
    parts += [
        Part(name=layout.optimizer_name(index), write=partial(_object, partial(dict, state)))
        for index, state in enumerate(contents.optimizers)
    ]
    for name_of, objects in (
        (layout.scheduler_name, contents.schedulers),
        (layout.custom_name, contents.custom),
    ):
        parts += [
            Part(name=name_of(index), write=partial(_state_of, one)) for index, one in enumerate(objects)
        ]
    if contents.scaler:
        parts.append(Part(name=layout.SCALER_NAME, write=partial(_object, partial(dict, contents.scaler))))
    return parts


def own_parts(contents: Contents, *, rank: int, device: torch.device) -> list[Part]:
    """What every rank writes for itself: where its loaders are, and its random numbers.

    Args:
        contents: The objects.
        rank: Index of this process.
        device: Of this process.
    """
    parts: list[Part] = []
    if contents.dataloaders:
        write = partial(_object, partial(_positions, contents.dataloaders))
        parts.append(Part(name=layout.position_name(rank), write=write))
    parts.append(Part(name=layout.rng_name(rank), write=partial(_object, partial(read_rng, device))))
    return parts


def _positions(dataloaders: Sequence[Any]) -> dict[str, Any]:
    return {"loaders": [loader.state_dict() for loader in dataloaders]}


def _weights(
    state: Mapping[str, Any], safe: bool, sink: Any, to_host: Callable[[Tensor], Tensor] | None
) -> None:
    write_weights(state, sink, safe=safe, to_host=to_host)


def _state_of(one: Any, sink: Any, to_host: Callable[[Tensor], Tensor] | None) -> None:
    write_object(one.state_dict(), sink, to_host=to_host)


def _object(read: Callable[[], Any], sink: Any, to_host: Callable[[Tensor], Tensor] | None) -> None:
    write_object(read(), sink, to_host=to_host)
