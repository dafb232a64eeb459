"""Samplers and shards by themselves: one process plays every rank."""

from __future__ import annotations

from typing import Any

import torch
from cases import cases
from loaders import Numbers, Stream, Varying, accelerator_of
from torch.utils.data import BatchSampler, DataLoader


@cases(
    "samplers", size=(1, 7, 8, 12), batch_size=(4,), drop_last=(False, True), split=(False, True),
    even=(False, True), world=(2, 4),
)  # fmt: skip
def batch_shard(
    lib: Any, *, size: int, batch_size: int, drop_last: bool, split: bool, even: bool, world: int
) -> Any:
    batches = BatchSampler(range(size), batch_size, drop_last)
    shards = [
        lib.data_loader.BatchSamplerShard(batches, world, rank, split_batches=split, even_batches=even)
        for rank in range(world)
    ]
    return [[*map(len, shards)], [[*shard] for shard in shards]]


@cases(
    "samplers", size=(1, 7, 12), batch_size=(4,), drop_last=(False, True), split=(False, True),
    world=(2, 4),
)  # fmt: skip
def iterable_shard(lib: Any, *, size: int, batch_size: int, drop_last: bool, split: bool, world: int) -> Any:
    return [
        [*lib.data_loader.IterableDatasetShard(Stream(size), batch_size, drop_last, world, rank, split)]
        for rank in range(world)
    ]


@cases("samplers", size=(6, 9), says=(None, 3), even=(False, True), world=(2, 3))
def varying_shard(lib: Any, *, size: int, says: int | None, even: bool, world: int) -> Any:
    return [
        [*lib.data_loader.BatchSamplerShard(Varying(size, says), world, rank, even_batches=even)]
        for rank in range(world)
    ]


@cases("samplers", seed=(None, 5), generator=(False, True), replacement=(False, True), epochs=(False, True))
def seedable(lib: Any, *, seed: int | None, generator: bool, replacement: bool, epochs: bool) -> Any:
    torch.manual_seed(11)
    sampler = lib.data_loader.SeedableRandomSampler(
        Numbers(7),
        replacement=replacement,
        generator=torch.Generator().manual_seed(4) if generator else None,
        data_seed=seed,
    )
    found = []
    for epoch in (3, 3, 1):
        if epochs:
            sampler.set_epoch(epoch)
        found.append([*sampler])
    return [found, sampler.epoch, sampler.initial_seed]


@cases("samplers", skip=(0, 1, 3, 9))
def skip_batch_sampler(lib: Any, *, skip: int) -> Any:
    sampler = lib.data_loader.SkipBatchSampler(BatchSampler(range(7), 2, drop_last=False), skip)
    return [[*sampler], sampler.total_length]


@cases("samplers", skip=(0, 2))
def skip_data_loader(lib: Any, *, skip: int) -> Any:
    loader = lib.data_loader.SkipDataLoader(Numbers(7), skip_batches=skip, batch_size=2)
    return [len(loader), [*loader]]


@cases("samplers", shuffle=(False, True), batch_sampler=(False, True), prepared=(False, True))
def found_sampler(lib: Any, *, shuffle: bool, batch_sampler: bool, prepared: bool) -> Any:
    indices: Any = BatchSampler(range(6), 2, drop_last=False)
    loader: Any = DataLoader(Numbers(6), batch_size=2, shuffle=shuffle)
    loader = DataLoader(Numbers(6), batch_sampler=indices) if batch_sampler else loader
    loader = accelerator_of(lib).prepare(loader) if prepared else loader
    return type(lib.data_loader.get_sampler(loader)).__name__


@cases("samplers", kind=("number", "tensor", "nested", "text"), first=(0, 1), last=(2, 5))
def sliced(lib: Any, *, kind: str, first: int, last: int) -> Any:
    values: dict[str, Any] = {
        "number": 3,
        "tensor": torch.arange(4),
        "nested": {"a": torch.arange(6).view(3, 2), "b": [torch.arange(3), (torch.ones(4),)]},
        "text": ["a", "b", "c"],
    }
    return lib.utils.slice_tensors(values[kind], slice(first, last))
