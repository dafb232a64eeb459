"""Follows a script that computes with tensors without values."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage] - there is no public name
)
from torch.utils._pytree import tree_map

from accel_cli.commands.check.record import Event, File
from accel_cli.commands.estimate.trace import Ledger, storage_key
from accel_state.whereabouts import call_site, place_of

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import nn

_SCALAR = torch.ops.aten._local_scalar_dense.default
_YES = frozenset({torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default})
_COMMUNICATION = frozenset({"c10d", "_c10d_functional"})


class MadeUpValues(TorchDispatchMode):
    """Answers every question for a value, and notes the collectives that a script calls itself.

    Args:
        observer: Who is told.
    """

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _SCALAR:
            return made_up(args[0])
        if func in _YES:
            return True
        if func.namespace in _COMMUNICATION:
            self._observer.saw(func.__name__.partition(".")[0].strip("_"))
        return func(*args, **(kwargs or {}))


def made_up(tensor: Tensor) -> bool | int | float:
    """A value for a tensor that has none: one."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


@dataclass(kw_only=True)
class Observer:
    """What is seen of one rank.

    Args:
        events: What it would have done with others.
        files: What it would have written.
        models: What it has prepared.
        strategy: Which strategy would train.
        fakes: Makes tensors without values.
    """

    events: list[Event] = field(default_factory=list[Event])
    files: list[File] = field(default_factory=list[File])
    models: list[nn.Module] = field(default_factory=list["nn.Module"])
    strategy: str = ""
    fakes: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    ledger: Ledger | None = None
    _outside: int = 0

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Within it, tensors have no values."""
        with contextlib.ExitStack() as stack:
            self._stack = stack
            stack.enter_context(self.fakes)
            stack.enter_context(MadeUpValues(self))
            yield

    def prepared(self, models: Sequence[nn.Module]) -> None:
        """Begin to count what the passes of models keep."""
        self.models += models
        if self.ledger is None:
            self.ledger = self._stack.enter_context(Ledger(models[0]))
        for model in models:
            self.ledger.add_weights(model)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self.ledger.finish)

    def saw(self, kind: str) -> None:
        """Note something that all ranks have to do together."""
        if not self.is_outside:
            self.events.append(Event(kind=kind, where=here()))

    def wrote(self, name: str, nbytes: int) -> None:
        """Note a file."""
        self.files.append(File(name=name, nbytes=nbytes, where=here()))

    @property
    def is_outside(self) -> bool:
        """Whether tensors have values just now."""
        return self._outside > 0

    @contextlib.contextmanager
    def outside(self) -> Generator[None]:
        """Within it, tensors have values."""
        self._outside += 1
        try:
            with _disable_current_modes():
                yield
        finally:
            self._outside -= 1

    def without_values(self, data: Any) -> Any:
        """The same data in tensors without values, on the CPU."""
        return tree_map(
            lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf, data
        )


def here() -> str:
    """File and line of the script that is running."""
    return place_of(call_site(sys._getframe(1)))[0]  # pyright: ignore[reportPrivateUsage] - public in all but name


def nbytes_of(data: Any) -> int:
    """Bytes of all tensors in nested data, each storage once."""
    storages: dict[int, int] = {}

    def add(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            storages[storage_key(leaf)] = leaf.untyped_storage().nbytes()
        return leaf

    tree_map(add, data)
    return sum(storages.values())


def is_without_values(tensor: Any) -> bool:
    """Whether a tensor has no values."""
    return isinstance(tensor, FakeTensor)
