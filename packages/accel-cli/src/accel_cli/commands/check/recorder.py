"""Record the collectives, files and memory of a script that runs on fake tensors."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import sys
from collections.abc import Sized
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage] - there is no public name
)
from torch.utils._pytree import tree_leaves, tree_map

from accel_cli.commands.check.memory_tracker import Meter
from accel_cli.commands.check.trace import Chosen, Event, File, Loader
from accel_cli.commands.check.values import MadeUpValues, is_without_values
from accel_cli.commands.estimate.memory import Buckets
from accel_cli.commands.estimate.trace import Ledger, storage_key
from accel_state.rank_status import call_site, source_location

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import nn
    from torch.optim import Optimizer


_MOST_INDICES = 2**20


@dataclass(kw_only=True)
class CollectiveRecorder:
    """Recorder of one rank.

    Args:
        fakes: The mode of fake tensors.
        ledger: Tracks the memory of passes of unsharded models.
        meter: Tracks the memory of sharded models and everything else.
        buckets: The buckets that DeepSpeed would allocate.
        on_rank: Elements of parameters that Megatron would keep on the rank.
        fp8: The title of the library that would multiply matrices in 8 bits.
    """

    events: list[Event] = field(default_factory=list[Event])
    files: list[File] = field(default_factory=list[File])
    loaders: dict[int, Loader] = field(default_factory=dict[int, Loader])
    models: list[nn.Module] = field(default_factory=list["nn.Module"])
    strategy: Chosen = field(default_factory=Chosen)
    fakes: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    ledger: Ledger | None = None
    meter: Meter | None = None
    buckets: Buckets = field(default_factory=Buckets)
    on_rank: int = 0
    fp8: str = ""
    _outside: int = 0
    _silent: int = 0
    _held: int = 0

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Run the block on fake tensors."""
        with contextlib.ExitStack() as stack:
            self._stack = stack
            stack.enter_context(self.fakes)
            stack.enter_context(MadeUpValues(self.saw))
            yield

    def prepared(self, models: Sequence[nn.Module], *, sharded: bool = False) -> None:
        """Track the memory of prepared models."""
        self.models += models
        if sharded:
            if self.meter is None:
                self.meter = self._stack.enter_context(Meter(self.fakes))
            for model in models:
                self.meter.add(model)
            return
        if self.ledger is None:
            self.ledger = self._stack.enter_context(Ledger(models[0]))
        for model in models:
            self.ledger.add_weights(model)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self.ledger.finish)

    @contextlib.contextmanager
    def stepping(self, optimizer: Optimizer) -> Generator[None]:
        """Attribute tensors that are created within the block to the optimizer."""
        with contextlib.ExitStack() as stack:
            if self.ledger is not None:
                stack.enter_context(self.ledger.stepping())
            if self.meter is not None:
                stack.enter_context(self.meter.stepping(optimizer))
            yield

    @contextlib.contextmanager
    def uncounted(self) -> Generator[None]:
        """Leave tensors that are created and freed within the block uncounted."""
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
        """Record no collectives within the block: they belong to one that is recorded already."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    def saw(self, kind: str) -> None:
        """Record a collective."""
        if not (self.is_outside or self._silent):
            counters = [one for one in (self.ledger, self.meter) if one is not None]
            nbytes = sum(one.device_bytes for one in counters)
            self.events.append(Event(kind=kind, where=source_line(), nbytes=nbytes))

    def wrote(self, name: str, nbytes: int, *, form: str = "", full_nbytes: int | None = None) -> None:
        """Record a file."""
        size = nbytes if full_nbytes is None else full_nbytes
        self.files.append(File(name=name, nbytes=nbytes, where=source_line(), form=form, full_nbytes=size))

    def made_loader(self, loader: Any, shard: int) -> None:
        """Record a prepared loader."""
        sampler = loader.get_sampler()
        # The indices of torch's samplers do not depend on the rank.
        is_custom = loader.is_sharded and not type(sampler).__module__.startswith("torch.")
        indices = ""
        if is_custom and isinstance(sampler, Sized) and len(sampler) <= _MOST_INDICES:
            indices = _digest(repr(sorted(copy.deepcopy(sampler))).encode())  # pyright: ignore[reportArgumentType] - it iterates
        self.loaders[id(loader)] = Loader(where=source_line(), shard=shard, indices=indices)

    def read_batch(self, loader: Any, batch: Any) -> None:
        """Record a batch of a prepared loader, if its tensors have values of several kinds."""
        known = self.loaders.get(id(loader))
        leaves = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.numel() > 1)
        tensors = [leaf.contiguous().flatten() for leaf in leaves if not is_without_values(leaf)]
        if known is not None and any(bool((leaf != leaf[0]).any()) for leaf in tensors):
            values = b"".join(leaf.view(torch.uint8).numpy().tobytes() for leaf in tensors)
            self.loaders[id(loader)] = replace(known, batches=(*known.batches, _digest(values)))

    @property
    def is_outside(self) -> bool:
        """Whether tensors are real at present."""
        return self._outside > 0

    @contextlib.contextmanager
    def outside(self) -> Generator[None]:
        """Run the block on real tensors."""
        self._outside += 1
        try:
            with _disable_current_modes(), MadeUpValues(self.saw):  # tensors of before are fake
                yield
        finally:
            self._outside -= 1

    def moved(self, tensor: Tensor, *, to_host: bool) -> Tensor:
        """Copy a tensor to the host, as `Tensor.cpu` does, or to the device."""
        counters = [one for one in (self.ledger, self.meter) if one is not None]
        if not counters or any(one.has_on_host(tensor) for one in counters) == to_host:
            return tensor
        with contextlib.ExitStack() as stack:
            for one in counters:
                stack.enter_context(one.moving(to_host=to_host))
            return tensor.clone()

    def holds_on_host(self, nbytes: int) -> None:
        """Record a temporary use of host memory for which no tensor exists in the check."""
        self._held = max(self._held, nbytes)

    @property
    def host(self) -> int:
        """Peak of the bytes that were moved to the host."""
        counters = [one.host for one in (self.ledger, self.meter) if one is not None]
        return max([self._held, *counters])

    def without_values(self, data: Any) -> Any:
        """Replace the tensors of nested data by fake ones on the CPU."""
        return tree_map(
            lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf, data
        )


def _digest(values: bytes) -> str:
    return hashlib.sha256(values).hexdigest()


def source_line() -> str:
    """Return file and line of the script that is running."""
    return source_location(call_site(sys._getframe(1)))[0]  # pyright: ignore[reportPrivateUsage] - public in all but name


def nbytes_of(data: Any) -> int:
    """Sum the bytes of all tensors in nested data, each storage once."""
    storages: dict[int, int] = {}

    def add(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            storages[storage_key(leaf)] = leaf.untyped_storage().nbytes()
        return leaf

    tree_map(add, data)
    return sum(storages.values())
