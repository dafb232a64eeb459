"""torchdata's `StatefulDataLoader`: loaders that are one, and what its states say."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sized
from dataclasses import replace
from functools import cache
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch.utils.data import DataLoader, RandomSampler

from accel_state.errors import MissingDependencyError
from accel_train.data.reading import Reading
from accel_train.data.samplers import (
    innermost_sampler,
    is_plain_batch_sampler,
    record_source,
    restore_source,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accel_train.data.iterable_shard import BatchWithMeta
    from accel_train.data.reading import Position, StartCopy
    from accel_train.data.samplers import OrderState

    AddSamplerState = Callable[[dict[str, Any], OrderState], dict[str, Any]]

_OUR_KEYS = frozenset({"format", "epoch", "position", "source", "shards"})
_FINISHED = "_iterator_finished"  # the keys of torchdata's states, of its releases from 0.8 to 0.11
_SNAPSHOT = "_snapshot"
_MAIN = "_main_snapshot"
_SAMPLER_STATE = "_sampler_iter_state"
_PLAIN = "_plain_class"


@cache
def stateful_class(loader_class: type[Any]) -> type[Any]:
    """Return the same class of loaders, derived from torchdata's `StatefulDataLoader`, too.

    Raises:
        MissingDependencyError: torchdata is not installed.
    """
    try:
        base = import_module("torchdata.stateful_dataloader").StatefulDataLoader
    except ImportError as error:
        raise MissingDependencyError(
            "use_stateful_dataloader=True needs torchdata: pip install 'accel-train[stateful]'."
        ) from error
    if issubclass(loader_class, base):
        return loader_class
    names = {"__module__": loader_class.__module__, "__doc__": loader_class.__doc__, _PLAIN: loader_class}
    return type(loader_class.__name__, (loader_class, base), names)


def plain_class(loader_class: type[Any]) -> type[Any]:
    """Return the class of which `stateful_class` made this one, by whose name pickle finds it."""
    return vars(loader_class).get(_PLAIN, loader_class)


def remake_loader(loader_class: type[Any], stateful: bool) -> Any:
    """Make a loader without attributes, for pickle and copy."""
    return object.__new__(stateful_class(loader_class) if stateful else loader_class)


def is_stateful(dataloader: DataLoader[Any]) -> bool:
    """Whether a loader is torchdata's `StatefulDataLoader`; does not import torchdata."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(dataloader, module.StatefulDataLoader)


class MaybeStateful(DataLoader[Any]):
    """A loader of torch, and of torchdata, too, if it is made with `use_stateful_dataloader=True`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Choose the class."""
        arguments = kwargs | signature(cls.__init__).bind_partial(None, *args, **kwargs).arguments
        made = stateful_class(cls) if arguments.get("use_stateful_dataloader") else cls
        return cast("Self", object.__new__(made))


class StatefulReading(Reading):
    """A pass of torchdata's loader, which is asked for its state at every batch, before it reads on."""

    def __init__(
        self,
        iterator: Any,
        begin: Callable[[Iterator[Any]], Reading],
        add_sampler_state: AddSamplerState,
    ) -> None:
        self._iterator = iterator
        self._add_sampler_state = add_sampler_state
        self._states: deque[dict[str, Any]] = deque()
        self._state: dict[str, Any] | None = None
        self._inner = begin(self._record())
        self.batches = self._inner.batches
        self.taken = self._inner.taken

    def _record(self) -> Iterator[Any]:
        for batch in self._iterator:
            self._states.append(self._iterator.state_dict())
            yield batch

    def pairs(self, start_copy: StartCopy | None = None) -> Iterator[tuple[Any, Any]]:
        """Each of the batches, with what follows."""
        return self._inner.pairs(start_copy)

    def opened(self) -> tuple[dict[int, int], int]:
        """Take note of the order that was drawn for the first batch."""
        return self._inner.opened()

    def advance(self, loaded: BatchWithMeta | None) -> None:
        """Make the state after the batch that was taken the current one."""
        self._state = self._states.popleft()
        if self._inner.advance is not None:
            self._inner.advance(loaded)

    def position(self) -> Position:
        """Where the loader is after the batches that were `taken`."""
        self._inner.taken = self.taken
        position = self._inner.position()
        if self._state is None:
            return position
        return replace(position, torchdata=self._add_sampler_state(self._state, position.order or {}))


def as_state_dict(state: dict[str, Any], *, finished: bool) -> dict[str, Any]:
    """Return torchdata's part of a state; empty where it has none.

    Example:
        >>> as_state_dict({"_num_yielded": 2, "format": 1, "position": None}, finished=True)
        {'_num_yielded': 2, '_iterator_finished': True}
    """
    own = {name: value for name, value in state.items() if name not in _OUR_KEYS}
    return own | {_FINISHED: finished} if own else {}


def is_finished(state: dict[str, Any]) -> bool:
    """Whether a state of torchdata is that of a pass that has ended."""
    return bool(state.get(_FINISHED))


def batches_yielded(state: dict[str, Any]) -> int:
    """Return how many batches of the pass a loader of torchdata had yielded.

    Example:
        >>> batches_yielded({"_num_yielded": 2})
        2
        >>> batches_yielded({"_snapshot": {"_snapshot_step": 4}, "_steps_since_snapshot": 1})
        5
    """
    if _SNAPSHOT in state:
        return state[_SNAPSHOT]["_snapshot_step"] + state["_steps_since_snapshot"]
    if "_num_yielded" in state:
        return state["_num_yielded"]
    raise ValueError(
        f"This is neither a position of a data loader of accel nor a state of torchdata's "
        f"StatefulDataLoader: it has the keys {sorted(state)!r}."
    )


def order_of(state: dict[str, Any]) -> dict[str, Any] | None:
    """Return what replays the order of the epoch, where torchdata's own samplers have kept it."""
    main = state[_SNAPSHOT][_MAIN] if _SNAPSHOT in state else state
    saved = (
        main.get(_SAMPLER_STATE) or {}
    )  # of a batch sampler, or of the sampler itself with batch_size=None
    generator = (saved.get("sampler_iter_state") or saved).get("generator")
    return {"generator": generator} if isinstance(generator, torch.Tensor) else None


def with_sampler_state(
    state: dict[str, Any], batch_sampler: Any, order: OrderState, *, single: bool
) -> dict[str, Any]:
    """Return a state of torchdata with the state that its own samplers would have.

    A loader of torchdata that makes its batches itself goes by that, and begins anew without it.

    Args:
        state: The state of a loader that reads the batches of a sampler of ours.
        batch_sampler: The batch sampler behind that, not sharded across ranks.
        order: What replays the order of the epoch.
        single: Whether the loader gives single samples, and not batches.
    """
    theirs: Any = import_module("torchdata.stateful_dataloader.sampler")
    if not is_plain_batch_sampler(batch_sampler) and type(batch_sampler) is not theirs.BatchSampler:
        return state
    main = state[_SNAPSHOT][_MAIN] if _SNAPSHOT in state else state
    sampler: Any = batch_sampler.sampler
    samples = main["_sampler_iter_yielded"] * batch_sampler.batch_size
    if isinstance(sampler, Sized):
        samples = min(samples, len(sampler))
    is_shuffled = "generator" in order and type(sampler) in {RandomSampler, theirs.RandomSampler}
    shuffled = {"yielded": samples, "generator": order["generator"]} if is_shuffled else None
    if single:
        main = {**main, _SAMPLER_STATE: shuffled}
    else:
        iterated: dict[str, Any] = {} if shuffled is None else {"sampler_iter_state": shuffled}
        if type(sampler) is theirs.StatefulDistributedSampler:
            iterated["sampler_state"] = {"yielded": samples}
        main = {**main, _SAMPLER_STATE: {"samples_yielded": samples, **iterated}}
    return {**state, _SNAPSHOT: {**state[_SNAPSHOT], _MAIN: main}} if _SNAPSHOT in state else main


def state_before_first_pass(
    loader: Any, ask: Callable[[], dict[str, Any]], add_sampler_state: AddSamplerState
) -> dict[str, Any]:
    """Ask torchdata for the state of a loader that has not begun; nothing random is drawn for it.

    torchdata opens a pass for that, which is closed again: it would not see an epoch that is set later.
    """
    sampler = innermost_sampler(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler)
    source = record_source(sampler)
    attributes: dict[str, Any] = getattr(sampler, "__dict__", {})
    before = dict(attributes)
    generator, loader.generator = loader.generator, torch.Generator()
    try:
        with torch.random.fork_rng(devices=[]):
            state = ask()
    finally:
        loader.generator = generator
        restore_source(sampler, source)
        attributes.update(before)  # workers have read ahead, and an epoch may have ended
        vars(loader).update(_iterator=None, _initial_iter_for_state_dict=False)
    return as_state_dict(add_sampler_state(state, source), finished=False)
