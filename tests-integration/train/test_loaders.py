"""Loaders on several ranks: every sample once, however data is read, sharded, broken off and continued."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_ops.collectives import gather
from accel_state.accelerator_state import GradientState
from accel_state.partial_state import PartialState
from accel_train.data.prepare import prepare_data_loader, skip_first_batches
from accel_train.data.scatter import MainProcessReadError
from harness import distributed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SIZE = 37


class Stream(IterableDataset[int]):
    """Numbers, every worker its own; only rank 0 may read if so told."""

    def __init__(self, size: int, only_main: bool = False) -> None:
        self.size = size
        self.only_main = only_main

    def __iter__(self) -> Iterator[int]:
        assert not self.only_main or dist.get_rank() == 0
        info = get_worker_info()
        return iter(range(self.size) if info is None else range(info.id, self.size, info.num_workers))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


class Failing(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise OSError("disk on fire")


def everyone(samples: list[int]) -> list[int]:
    """The samples of all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, samples)
    return [sample for part in gathered for sample in part]


def read(loader: Any, batches: Any = None) -> list[int]:
    """What this rank gets without the padding."""
    samples: list[int] = []
    for batch in loader if batches is None else batches:
        samples += batch.tolist()[: loader.real_in_batch]
    return samples


LOADERS: dict[str, tuple[Callable[[], DataLoader[Any]], dict[str, Any]]] = {
    "map": (lambda: DataLoader(list(range(SIZE)), batch_size=4), {}),
    "shuffled": (
        lambda: DataLoader(list(range(SIZE)), batch_size=4, shuffle=True),
        {"rng_types": ["generator"]},
    ),
    "seeded": (
        lambda: DataLoader(list(range(SIZE)), batch_size=4, shuffle=True),
        {"use_seedable_sampler": True},
    ),
    "workers": (lambda: DataLoader(list(range(SIZE)), batch_size=4, shuffle=True, num_workers=1), {}),
    "iterable": (lambda: DataLoader(Stream(SIZE), batch_size=4), {"dispatch_batches": False}),
    "iterable with workers": (
        lambda: DataLoader(Stream(SIZE), batch_size=4, num_workers=2),
        {"dispatch_batches": False},
    ),
    "dispatched": (lambda: DataLoader(Stream(SIZE, only_main=True), batch_size=4), {}),
    "dispatched map": (
        lambda: DataLoader(list(range(SIZE)), batch_size=4, shuffle=True),
        {"dispatch_batches": True},
    ),
    "dispatched with workers": (lambda: DataLoader(Stream(SIZE), batch_size=4, num_workers=2), {}),
}


def prepared(name: str, **more: Any) -> Any:
    make, options = LOADERS[name]
    PartialState(cpu=True)
    return prepare_data_loader(make(), put_on_device=True, **options, **more)


def check_every_sample_comes_once(name: str, split: bool, even: bool) -> None:
    torch.manual_seed(dist.get_rank())  # ranks agree on an order nevertheless
    loader = prepared(name, split_batches=split, even_batches=even)
    orders: list[list[int]] = []
    for _ in range(2):
        samples: list[int] = []
        lengths = 0
        ends: list[bool] = []
        for batch in loader:
            assert GradientState().active_dataloader is loader
            assert loader.batch_size_seen == len(batch)
            samples += batch.tolist()[: loader.real_in_batch]
            lengths += 1
            ends.append(loader.end_of_dataloader)
            if even and lengths == 1:
                # Raw collectives agree in shape.
                assert len(gather(batch)) == dist.get_world_size() * len(batch)
        assert ends[-1:] == [True] * min(lengths, 1)
        assert not any(ends[:-1])
        if even:
            assert len(set(everyone([lengths]))) == 1
        orders.append(everyone(samples))
        assert sorted(orders[-1]) == list(range(SIZE))
    if "shuffled" in name or name in {"seeded", "dispatched map", "workers"}:
        assert orders[0] != orders[1]


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", LOADERS)
@distributed(world_size=2)
def test_every_sample_comes_once_on_two_ranks(name: str, split: bool, even: bool) -> None:
    check_every_sample_comes_once(name, split, even)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", LOADERS)
@distributed(world_size=4)
def test_every_sample_comes_once_on_four_ranks(name: str, split: bool) -> None:
    check_every_sample_comes_once(name, split, even=True)


@distributed(world_size=2)
def test_leaving_a_dispatched_loop_early_leaves_the_ranks_in_step() -> None:
    loader = prepared("dispatched")
    for _ in range(2):
        next(iter(loader))
    assert sorted(everyone(read(loader))) == list(range(SIZE))


@distributed(world_size=2)
def test_dispatched_loaders_may_be_nested() -> None:
    outer, inner = prepared("dispatched"), prepared("dispatched map")
    rows: list[int] = []
    for batch in outer:
        rows += batch.tolist()[: outer.real_in_batch]
        assert sorted(everyone(read(inner))) == list(range(SIZE))
    assert sorted(everyone(rows)) == list(range(SIZE))


@distributed(world_size=2)
def test_an_error_while_reading_is_an_error_on_every_rank() -> None:
    PartialState(cpu=True)
    loader = prepare_data_loader(DataLoader(Failing(), batch_size=1), put_on_device=True)
    samples: list[int] = []
    with pytest.raises(OSError if dist.get_rank() == 0 else MainProcessReadError, match="disk on fire"):  # noqa: PT012
        for batch in loader:
            samples += batch.tolist()
    assert everyone(samples) == [0, 2, 1, 3]


@distributed(world_size=2)
def test_all_ranks_draw_the_same_numbers_after_a_dispatched_pass() -> None:
    torch.manual_seed(3)
    for _ in prepared("dispatched map"):
        pass
    assert len(set(everyone([int(torch.randint(1 << 60, ()))]))) == 1


@distributed(world_size=2)
def test_lists_of_objects_are_dispatched_too() -> None:
    PartialState(cpu=True)
    samples = [{"id": i, "text": str(i)} for i in range(7)]
    loader = prepare_data_loader(DataLoader(samples, batch_size=2), put_on_device=True, dispatch_batches=True)  # pyright: ignore[reportArgumentType]
    ids: list[int] = []
    for batch in loader:
        assert batch["text"] == [str(i) for i in batch["id"].tolist()]
        ids += batch["id"].tolist()[: loader.real_in_batch]
    assert sorted(everyone(ids)) == list(range(7))


@distributed(world_size=2)
def test_batches_that_the_dataset_makes_are_not_taken_for_one_sample() -> None:
    PartialState(cpu=True)
    batches = [{"id": torch.arange(3) + 3 * i, "scale": torch.ones(1)} for i in range(3)]
    loader = prepare_data_loader(
        DataLoader(batches, batch_size=None), put_on_device=True, dispatch_batches=True
    )  # pyright: ignore[reportArgumentType]
    ids: list[int] = []
    for batch in loader:
        ids += batch["id"].tolist()[: loader.real_in_batch]
    assert sorted(everyone(ids)) == list(range(9))


def run_a_stage(name: str, folder: Path, stage: int) -> None:
    """Read two batches after those of the stages before; in the last stage, all."""
    loader = prepared(name, data_seed=5 if name == "seeded" else None)
    torch.manual_seed(17 * stage + dist.get_rank())
    if stage > 0:
        loader.load_state_dict(torch.load(folder / f"{stage - 1}-0.pt", weights_only=True))
    batches = iter(loader)
    samples = read(loader, batches if stage == 2 else islice(batches, 2))
    torch.save(loader.state_dict(), folder / f"{stage}-{dist.get_rank()}.pt")
    (folder / f"{stage}-{dist.get_rank()}.json").write_text(json.dumps(samples))


@distributed(world_size=1)
def _stage_of_one(name: str, folder: Path, stage: int) -> None:
    run_a_stage(name, folder, stage)


@distributed(world_size=2)
def _stage_of_two(name: str, folder: Path, stage: int) -> None:
    run_a_stage(name, folder, stage)


@distributed(world_size=3)
def _stage_of_three(name: str, folder: Path, stage: int) -> None:
    run_a_stage(name, folder, stage)


STAGES = {1: _stage_of_one, 2: _stage_of_two, 3: _stage_of_three}


@pytest.mark.parametrize("worlds", [(1, 3, 2), (3, 2, 1)])
@pytest.mark.parametrize("name", LOADERS)
def test_an_epoch_continued_by_other_numbers_of_ranks_is_seen_once(
    name: str, worlds: tuple[int, ...], tmp_path: Path
) -> None:
    for stage, world in enumerate(worlds):
        STAGES[world](name=name, folder=tmp_path, stage=stage)
    seen = [sample for file in tmp_path.glob("*.json") for sample in json.loads(file.read_text())]
    assert sorted(seen) == list(range(SIZE))


@pytest.mark.parametrize("name", LOADERS)
@distributed(world_size=2)
def test_what_is_left_comes_in_the_same_order(name: str) -> None:
    torch.manual_seed(dist.get_rank())
    loader = prepared(name)
    list(loader)
    batches = iter(loader)
    list(islice(batches, 2))
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]

    torch.manual_seed(7)
    again = prepared(name)
    again.load_state_dict(state)
    torch.manual_seed(9)
    expected = torch.get_rng_state()
    assert [batch.tolist() for batch in again] == rest
    assert torch.equal(torch.get_rng_state(), expected), "going on draws no random numbers"


def every_other(batch: torch.Tensor, rows: slice, *, process_index: int, num_processes: int) -> torch.Tensor:
    assert batch[rows].shape[0] * num_processes == batch.shape[0]
    return batch[process_index::num_processes]


@distributed(world_size=2)
def test_a_slice_function_decides_who_gets_what() -> None:
    loader = prepared("dispatched", slice_fn_for_dispatch=every_other)
    batches = [batch.tolist() for batch in loader]
    rank = dist.get_rank()
    assert batches[:2] == [[rank, rank + 2, rank + 4, rank + 6], [rank + 8, rank + 10, rank + 12, rank + 14]]


@distributed(world_size=2)
def test_skipping_batches_of_a_dispatched_loader_leaves_out_whole_rounds() -> None:
    for name in ("dispatched", "dispatched with workers"):
        whole = [batch.tolist() for batch in prepared(name)]
        assert [batch.tolist() for batch in skip_first_batches(prepared(name), 2)] == whole[2:]


@pytest.mark.parametrize("dataset", [range, SizedStream])
@pytest.mark.parametrize("split", [True, False])
@distributed(world_size=2)
def test_the_length_of_a_dispatched_loader_is_what_each_rank_gets_without_padding(
    split: bool, dataset: Callable[[int], Any]
) -> None:
    PartialState(cpu=True)
    for size in range(10):
        loader: Any = prepare_data_loader(
            DataLoader(dataset(size), batch_size=2),
            put_on_device=True,
            dispatch_batches=True,
            even_batches=False,
            split_batches=split,
        )
        assert len(loader) == len(list(loader))
