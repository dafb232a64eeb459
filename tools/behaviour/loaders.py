"""Prepared data loaders under every combination of flags."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from cases import cases
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset


class Numbers(Dataset[Any]):
    """The numbers from 0 to `size - 1`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[Any]):
    """The same, one after the other."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(range(self.size))


class Varying:
    """A batch sampler with batches of one, two, three, one, … samples.

    Args:
        size: The number of samples.
        batch_size: What it says that the batches have; nothing if `None`.
    """

    def __init__(self, size: int, batch_size: int | None = None) -> None:
        self.size = size
        self.drop_last = False
        if batch_size is not None:
            self.batch_size = batch_size

    def _batches(self) -> list[list[int]]:
        batches, first, rows = [], 0, 1
        while first < self.size:
            batches.append([*range(first, min(self.size, first + rows))])
            first, rows = first + rows, rows % 3 + 1
        return batches

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Any:
        return iter(self._batches())


def accelerator_of(lib: Any, **config: Any) -> Any:
    """An accelerator on the CPU with a configuration of its loaders."""
    return lib.Accelerator(cpu=True, dataloader_config=lib.DataLoaderConfiguration(**config))


def passes(accelerator: Any, loader: Any, epochs: int = 1) -> list[Any]:
    """Every batch of some epochs, and whether it was the last one."""
    state = accelerator.gradient_state
    return [[[batch, state.end_of_dataloader] for batch in loader] for _ in range(epochs)]


@cases(
    "loaders", worlds=(1, 2), size=(1, 8, 11), drop_last=(False, True), split=(False, True), even=(False,
    True),
    dispatch=(None, True),
)  # fmt: skip
def map_style(lib: Any, *, size: int, drop_last: bool, split: bool, even: bool, dispatch: bool | None) -> Any:
    accelerator = accelerator_of(lib, split_batches=split, even_batches=even, dispatch_batches=dispatch)
    loader = accelerator.prepare(DataLoader(Numbers(size), batch_size=4, drop_last=drop_last))
    return [len(loader), passes(accelerator, loader)]


@cases("loaders", worlds=(1, 2), size=(8, 9), batch_size=(2, 4), split=(False, True), dispatch=(False, True))
def totals(lib: Any, *, size: int, batch_size: int, split: bool, dispatch: bool) -> Any:
    accelerator = accelerator_of(lib, split_batches=split, dispatch_batches=dispatch)
    loader = accelerator.prepare(DataLoader(Numbers(size), batch_size=batch_size))
    return [loader.total_batch_size, loader.total_dataset_length]


@cases(
    "loaders", worlds=(1, 2), kind=("map", "stream"), size=(8, 9), dispatch=(False, True),
    drop_last=(False, True),
)  # fmt: skip
def remainders(lib: Any, *, kind: str, size: int, dispatch: bool, drop_last: bool) -> Any:
    accelerator = accelerator_of(lib, dispatch_batches=dispatch)
    data: Any = Numbers(size) if kind == "map" else Stream(size)
    loader = accelerator.prepare(DataLoader(data, batch_size=2, drop_last=drop_last))
    last = [
        accelerator.gradient_state.remainder for _ in loader if accelerator.gradient_state.end_of_dataloader
    ]
    return [last, accelerator.gradient_state.remainder]


@cases(
    "loaders", worlds=(1, 2), size=(1, 8, 11), drop_last=(False, True), split=(False, True),
    dispatch=(None, False),
)  # fmt: skip
def iterable(lib: Any, *, size: int, drop_last: bool, split: bool, dispatch: bool | None) -> Any:
    accelerator = accelerator_of(lib, split_batches=split, dispatch_batches=dispatch)
    loader = accelerator.prepare(DataLoader(Stream(size), batch_size=4, drop_last=drop_last))
    return passes(accelerator, loader, 2)


@cases("loaders", worlds=(1, 2), size=(8, 11), kind=("map", "stream"), dispatch=(None, True))
def metrics(lib: Any, *, size: int, kind: str, dispatch: bool | None) -> Any:
    accelerator = accelerator_of(lib, dispatch_batches=dispatch)
    data: Any = Numbers(size) if kind == "map" else Stream(size)
    loader = accelerator.prepare(DataLoader(data, batch_size=4))
    rows = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    return sorted(chain.from_iterable(rows))


@cases(
    "loaders",
    worlds=(1, 2),
    size=(8, 9, 13, 14),
    rows=(1, 3, 12),
    split=(False, True),
    as_objects=(False, True),
)
def metrics_of_other_rows(lib: Any, *, size: int, rows: int, split: bool, as_objects: bool) -> Any:
    accelerator = accelerator_of(lib, split_batches=split)
    loader = accelerator.prepare(DataLoader(Numbers(size), batch_size=4))
    found = []
    for index, _ in enumerate(loader):
        values = 1000 * index + 100 * accelerator.process_index + torch.arange(rows)
        gathered = accelerator.gather_for_metrics(values.tolist() if as_objects else values)
        found.append(gathered if as_objects else gathered.tolist())
    return found


@cases(
    "loaders", worlds=(1, 2), generator=(False, True), seedable=(False, True), seed=(None, 7),
    set_epoch=(False, True),
)  # fmt: skip
def shuffled(lib: Any, *, generator: bool, seedable: bool, seed: int | None, set_epoch: bool) -> Any:
    lib.utils.set_seed(3)
    config = {"use_seedable_sampler": seedable, "data_seed": seed}
    accelerator = accelerator_of(lib, **config)
    source = torch.Generator().manual_seed(5) if generator else None
    loader = accelerator.prepare(DataLoader(Numbers(9), batch_size=2, shuffle=True, generator=source))
    if not set_epoch:
        return passes(accelerator, loader, 3)
    found = []
    for epoch in (0, 2, 2):
        loader.set_epoch(epoch)
        found.append(passes(accelerator, loader))
    return found


@cases("loaders", worlds=(1, 2), size=(6, 9), says=(None, 3), split=(False, True), even=(False, True))
def varying_batches(lib: Any, *, size: int, says: int | None, split: bool, even: bool) -> Any:
    accelerator = accelerator_of(lib, split_batches=split, even_batches=even)
    loader: Any = DataLoader(Numbers(size), batch_sampler=Varying(size, says))
    return passes(accelerator, accelerator.prepare(loader))


@cases("loaders", worlds=(1, 2), kind=("map", "stream"), skip=(0, 1, 2, 9), prepared=(False, True))
def skipped(lib: Any, *, kind: str, skip: int, prepared: bool) -> Any:
    accelerator = accelerator_of(lib, dispatch_batches=False)
    loader: Any = DataLoader(Numbers(9) if kind == "map" else Stream(9), batch_size=2)
    loader = accelerator.prepare(loader) if prepared else loader
    first = lib.skip_first_batches(loader, skip)
    return [[*first], [*loader]]


@cases("loaders", worlds=(1, 2), batch_size=(None, 3), shuffle=(False, True))
def no_automatic_batches(lib: Any, *, batch_size: int | None, shuffle: bool) -> Any:
    accelerator = accelerator_of(lib)
    return passes(
        accelerator, accelerator.prepare(DataLoader(Numbers(6), batch_size=batch_size, shuffle=shuffle))
    )


@cases("loaders", worlds=(1, 2), outer=(5, 8), inner=(2, 3))
def nested(lib: Any, *, outer: int, inner: int) -> Any:
    accelerator = accelerator_of(lib)
    first = accelerator.prepare(DataLoader(Numbers(outer), batch_size=2))
    second = accelerator.prepare(DataLoader(Numbers(inner), batch_size=2))
    state, found = accelerator.gradient_state, []
    for _ in first:
        found.append(["outer", state.end_of_dataloader, state.remainder, state.in_dataloader])
        found += [["inner", state.end_of_dataloader, state.remainder] for _ in second]
        found.append(["outer again", state.end_of_dataloader, state.remainder])
    return [found, state.in_dataloader, state.remainder]


@cases("loaders", worlds=(1, 2), workers=(0, 1), kind=("map", "stream"))
def attributes(lib: Any, *, workers: int, kind: str) -> Any:
    accelerator = accelerator_of(lib, dispatch_batches=False)
    data: Any = Numbers(6) if kind == "map" else Stream(6)
    loader = accelerator.prepare(DataLoader(data, batch_size=2, num_workers=workers))
    return [
        isinstance(loader, DataLoader), loader._is_accelerate_prepared, loader.batch_size, loader.num_workers,
        loader.iteration, loader.drop_last, type(loader).__name__, [*loader], loader.iteration,
    ]  # fmt: skip


@cases("loaders", worlds=(1,), resume_at=(0, 1, 3, 5), shuffle=(False, True))
def stateful(lib: Any, *, resume_at: int, shuffle: bool) -> Any:
    accelerator = accelerator_of(lib, use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=1)
    loader = accelerator.prepare(DataLoader(Numbers(9), batch_size=2, shuffle=shuffle))
    before = []
    state = loader.state_dict()
    for number, batch in enumerate(loader, 1):
        before.append(batch)
        if number == resume_at:
            state = loader.state_dict()
            break
    again = accelerator_of(lib, use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=1)
    other = again.prepare(DataLoader(Numbers(9), batch_size=2, shuffle=shuffle))
    other.load_state_dict(state)
    return [before, [*other], [*other]]


@cases("loaders", worlds=(1, 2), batched=(False, True))
def refused(lib: Any, *, batched: bool) -> Any:
    sampler: Any = BatchSampler(range(6), 2, drop_last=False)
    loader = DataLoader(Numbers(6), batch_sampler=sampler) if batched else [torch.ones(1)]
    return type(accelerator_of(lib).prepare_data_loader(loader)).__name__
