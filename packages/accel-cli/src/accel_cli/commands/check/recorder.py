"""Follows a script that computes with tensors without values."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage] - there is no public name
)
from torch.utils._pytree import tree_map

from accel_cli.commands.check.memory_tracker import Meter
from accel_cli.commands.check.trace import Event, File
from accel_cli.commands.check.values import MadeUpValues
from accel_cli.commands.estimate.memory import Buckets
from accel_cli.commands.estimate.trace import Ledger, storage_key
from accel_state.rank_status import call_site, source_location

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The strategy of a rank.

    Args:
        name: Of the strategy; empty if no `Accelerator` was made.
        counted_as: The name that estimates have for it, if its own code does not run.
        axes: Along which the ranks divide the work.
        offloaded: Whether what stays from step to step is in main memory.
        precision: The mixed precision.
    """

    name: str = ""
    counted_as: str = ""
    axes: Mapping[str, int] = field(default_factory=dict[str, int])
    offloaded: bool = False
    precision: str = "no"


@dataclass(kw_only=True)
class CollectiveRecorder:
    """What is seen of one rank.

    Args:
        events: What it would have done with others.
        files: What it would have written.
        models: What it has prepared.
        strategy: Which strategy would train.
        fakes: Makes tensors without values.
        ledger: Counts what the passes of whole models keep.
        meter: Counts what a rank has of divided models, and all else.
        buckets: What DeepSpeed would set aside.
    """

    events: list[Event] = field(default_factory=list[Event])
    files: list[File] = field(default_factory=list[File])
    models: list[nn.Module] = field(default_factory=list["nn.Module"])
    strategy: Chosen = field(default_factory=Chosen)
    fakes: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    ledger: Ledger | None = None
    meter: Meter | None = None
    buckets: Buckets = field(default_factory=Buckets)
    _outside: int = 0
    _silent: int = 0
    _held: int = 0

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Within it, tensors have no values."""
        with contextlib.ExitStack() as stack:
            self._stack = stack
            stack.enter_context(self.fakes)
            stack.enter_context(MadeUpValues(self.saw))
            yield

    def prepared(self, models: Sequence[nn.Module], *, sharded: bool = False) -> None:
        """Begin to count what models take.

        Args:
            models: As they are after it.
            sharded: Whether the strategy's own code has divided them.
        """
        self.models += models
        if sharded:
            self._measure(models)
            return
        if self.ledger is None:
            self.ledger = self._stack.enter_context(Ledger(models[0]))
        for model in models:
            self.ledger.add_weights(model)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self.ledger.finish)

    def _measure(self, models: Sequence[nn.Module]) -> None:
        if self.meter is None:
            self.meter = self._stack.enter_context(Meter(self.fakes))
        for model in models:
            self.meter.add(model)

    @contextlib.contextmanager
    def stepping(self, optimizer: Optimizer) -> Generator[None]:
        """Within it, what comes into being is an optimizer's."""
        with contextlib.ExitStack() as stack:
            if self.ledger is not None:
                stack.enter_context(self.ledger.stepping())
            if self.meter is not None:
                stack.enter_context(self.meter.stepping(optimizer))
            yield

    @contextlib.contextmanager
    def uncounted(self) -> Generator[None]:
        """Within it, tensors that come and go take no memory of the rank."""
        meter = self.meter
        if meter is None:
            yield
            return
        before, meter.is_paused = meter.is_paused, True
        try:
            yield
        finally:
            meter.is_paused = before

    @contextlib.contextmanager
    def silence(self) -> Generator[None]:
        """Within it, what ranks do together is part of something that was noted."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    def saw(self, kind: str) -> None:
        """Note something that all ranks have to do together."""
        if not (self.is_outside or self._silent):
            self.events.append(Event(kind=kind, where=source_line()))

    def wrote(self, name: str, nbytes: int, *, form: str = "", full_nbytes: int | None = None) -> None:
        """Note a file.

        Args:
            name: Its path.
            nbytes: Its size, about.
            form: How the checkpoint is divided that it belongs to, if it does.
            full_nbytes: Bytes of the parts of all ranks, if it is one of them.
        """
        size = nbytes if full_nbytes is None else full_nbytes
        self.files.append(File(name=name, nbytes=nbytes, where=source_line(), form=form, full_nbytes=size))

    @property
    def is_outside(self) -> bool:
        """Whether tensors have values just now."""
        return self._outside > 0

    @contextlib.contextmanager
    def outside(self) -> Generator[None]:
        """Within it, tensors have values."""
        self._outside += 1
        try:
            with _disable_current_modes(), MadeUpValues(self.saw):  # what a script made before has none
                yield
        finally:
            self._outside -= 1

    def moved(self, tensor: Tensor, *, to_host: bool) -> Tensor:
        """The same in main memory, as `Tensor.cpu` would move it from a device, or back.

        Args:
            tensor: Without values.
            to_host: Whether it shall be in main memory.
        """
        counters = [one for one in (self.ledger, self.meter) if one is not None]
        if not counters or any(one.has_on_host(tensor) for one in counters) == to_host:
            return tensor
        with contextlib.ExitStack() as stack:
            for one in counters:
                stack.enter_context(one.moving(to_host=to_host))
            return tensor.clone()

    def holds_on_host(self, nbytes: int) -> None:
        """Note that something was in main memory for a while that does not come into being here."""
        self._held = max(self._held, nbytes)

    @property
    def host(self) -> int:
        """Most bytes that were in main memory because they were moved there."""
        counters = [one.host for one in (self.ledger, self.meter) if one is not None]
        return max([self._held, *counters])

    def without_values(self, data: Any) -> Any:
        """The same data in tensors without values, on the CPU."""
        return tree_map(
            lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf, data
        )


def source_line() -> str:
    """File and line of the script that is running."""
    return source_location(call_site(sys._getframe(1)))[0]  # pyright: ignore[reportPrivateUsage] - public in all but name


def nbytes_of(data: Any) -> int:
    """Bytes of all tensors in nested data, each storage once."""
    storages: dict[int, int] = {}

    def add(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            storages[storage_key(leaf)] = leaf.untyped_storage().nbytes()
        return leaf

    tree_map(add, data)
    return sum(storages.values())
