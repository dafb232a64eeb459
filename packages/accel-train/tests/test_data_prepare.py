"""What `prepare_data_loader` makes of its arguments."""

from __future__ import annotations

import sys
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_state.errors import MissingDependencyError
from accel_state.labels import RNGType
from accel_train.data.adapter import DataLoaderShard
from accel_train.data.dispatcher import DataLoaderDispatcher
from accel_train.data.prepare import get_sampler, prepare_data_loader, skip_first_batches
from accel_train.data.samplers import SeedableRandomSampler
from accel_train.data.shards import IterableDatasetShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class TimesTen(DataLoader[int]):
    def __iter__(self) -> Any:
        return (batch * 10 for batch in super().__iter__())


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_the_iterations_of_a_subclass_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def warned(loader: Any) -> list[str]:
        caplog.clear()
        prepare_data_loader(loader)
        return [record.getMessage() for record in caplog.records if "__iter__" in record.getMessage()]

    class Named(DataLoader[int]):
        pass

    (message,) = warned(TimesTen(range(4), batch_size=2))
    assert "TimesTen" in message
    assert not warned(Named(range(4), batch_size=2))
    assert not warned(skip_first_batches(DataLoader(range(4), batch_size=2), 1))
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    assert not warned(torchdata.StatefulDataLoader(range(4), batch_size=2))


def pair(make: Callable[[], DataLoader[Any]], **options: Any) -> list[Any]:
    """What two ranks make of their loaders, each with random numbers of its own."""
    loaders: list[Any] = []
    for rank in (0, 1):
        torch.manual_seed(rank)
        loaders.append(prepare_data_loader(make(), num_processes=2, process_index=rank, **options))
    return loaders


def test_a_prepared_loader_is_given_back() -> None:
    loader = prepare_data_loader(DataLoader([1, 2]))
    assert prepare_data_loader(loader, num_processes=2, process_index=1) is loader


def test_only_torch_loaders_are_taken() -> None:
    with pytest.raises(TypeError, match="got \\[1, 2\\]"):
        prepare_data_loader([1, 2])  # pyright: ignore[reportArgumentType]


def test_a_seedable_sampler_does_not_change_the_given_loader() -> None:
    loader = DataLoader(list(range(8)), batch_size=2, shuffle=True)
    sampler = get_sampler(loader)
    pair(lambda: loader, use_seedable_sampler=True)
    assert get_sampler(loader) is sampler
    assert sampler.generator is None


class Limited(BatchSampler):
    """Yields only the first batches, as a curriculum does."""

    limit = 4

    def __len__(self) -> int:
        return self.limit

    def __iter__(self) -> Iterator[list[int]]:
        return islice(super().__iter__(), self.limit)


@pytest.mark.parametrize("world", [1, 2])
def test_later_changes_of_a_sampler_count(world: int) -> None:
    weighted = WeightedRandomSampler([1.0, 0, 0, 0], num_samples=8)
    loader = prepare_data_loader(
        DataLoader(range(4), batch_size=2, sampler=weighted), num_processes=world, process_index=0
    )
    weighted.weights = torch.tensor([0.0, 0, 0, 1])
    assert {number for batch in loader for number in batch.tolist()} == {3}

    subset = SubsetRandomSampler([0, 1, 2, 3])
    loader = prepare_data_loader(
        DataLoader(range(8), batch_size=2, sampler=subset), num_processes=world, process_index=0
    )
    subset.indices = [4, 5, 6, 7]
    assert min(number for batch in loader for number in batch.tolist()) >= 4


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_later_changes_of_a_batch_sampler_count(world: int, seedable: bool) -> None:
    limited = Limited(RandomSampler(range(16)), batch_size=2, drop_last=False)
    loader = prepare_data_loader(
        DataLoader(range(16), batch_sampler=limited),
        num_processes=world,
        process_index=0,
        use_seedable_sampler=seedable,
    )
    assert len(list(loader)) == 4 // world
    limited.limit = 8
    assert len(list(loader)) == len(loader) == 8 // world


def test_the_options_of_the_loader_are_kept() -> None:
    loader = DataLoader(
        list(range(4)), batch_size=2, num_workers=2, prefetch_factor=5, timeout=7, persistent_workers=True
    )
    prepared = prepare_data_loader(loader)
    assert (prepared.num_workers, prepared.prefetch_factor, prepared.timeout) == (2, 5, 7)
    assert prepared.persistent_workers
    assert prepared.collate_fn is loader.collate_fn


def test_iterable_datasets_are_dispatched_to_several_ranks_on_a_device() -> None:
    loader = DataLoader(Numbers(), batch_size=2)
    several = {"num_processes": 2, "process_index": 0}
    assert type(prepare_data_loader(loader, put_on_device=True, **several)) is DataLoaderDispatcher
    assert type(prepare_data_loader(loader, **several)) is DataLoaderShard
    assert (
        type(prepare_data_loader(loader, put_on_device=True, dispatch_batches=False, **several))
        is DataLoaderShard
    )
    assert type(prepare_data_loader(loader, put_on_device=True)) is DataLoaderShard
    listed = DataLoader(list(range(10)), batch_size=2)
    assert type(prepare_data_loader(listed, put_on_device=True, **several)) is DataLoaderShard
    dispatched = prepare_data_loader(listed, put_on_device=True, dispatch_batches=True, **several)
    assert type(dispatched) is DataLoaderDispatcher


def test_dispatching_needs_a_device() -> None:
    with pytest.raises(ValueError, match="needs put_on_device=True"):
        prepare_data_loader(DataLoader(Numbers()), dispatch_batches=True)


@pytest.mark.parametrize("dispatch", [True, False])
@pytest.mark.parametrize("dataset", [list(range(10)), Numbers()])
def test_a_batch_that_does_not_divide_cannot_be_split(dispatch: bool, dataset: Any) -> None:
    with pytest.raises(ValueError, match="batch_size=3 is not a round multiple of num_processes=2"):
        prepare_data_loader(
            DataLoader(dataset, batch_size=3),
            num_processes=2,
            process_index=0,
            split_batches=True,
            put_on_device=True,
            dispatch_batches=dispatch,
        )


class Varying:
    """A batch sampler whose batches have several sizes."""

    def __iter__(self):
        return iter([[0, 1], [2, 3, 4, 5]])

    def __len__(self):
        return 2


@pytest.mark.parametrize("dispatch", [True, False])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_batches_of_no_known_size_cannot_be_split(dispatch: bool, num_processes: int) -> None:
    loader = DataLoader(list(range(6)), batch_sampler=Varying())
    with pytest.raises(ValueError, match=r"needs a `batch_size`.*Varying object"):
        prepare_data_loader(
            loader,
            num_processes=num_processes,
            process_index=0,
            split_batches=True,
            put_on_device=True,
            dispatch_batches=dispatch,
        )


@pytest.mark.parametrize("dataset", [list(range(10)), Numbers()])
def test_batches_of_the_dataset_cannot_be_split(dataset: Any) -> None:
    with pytest.raises(ValueError, match="dispatch_batches=True"):
        prepare_data_loader(
            DataLoader(dataset, batch_size=None), num_processes=2, process_index=0, split_batches=True
        )


def test_data_that_is_sharded_already_is_not_sharded_again() -> None:
    shards = [IterableDatasetShard(Numbers(), 2, num_processes=2, process_index=rank) for rank in (0, 1)]
    loaders = [
        prepare_data_loader(
            DataLoader(shard, batch_size=2), num_processes=2, process_index=rank, put_on_device=True
        )
        for rank, shard in enumerate(shards)
    ]
    assert [[batch.tolist() for batch in loader] for loader in loaders] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [0, 1]],
    ]


def test_a_dataset_that_datasets_has_split_by_node_is_not_sharded_again() -> None:
    dataset = Numbers()
    dataset._distributed = object()  # pyright: ignore[reportAttributeAccessIssue]
    loader = prepare_data_loader(
        DataLoader(dataset, batch_size=5), num_processes=2, process_index=1, put_on_device=True
    )
    assert type(loader) is DataLoaderShard
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


class StreamSplitDataIterator:
    """The name of what Ray Data's `streaming_split` returns; Ray is no dependency of the tests."""


class RowsOfRay(Numbers):
    """A stream that reads a split of Ray Data, or a whole dataset of it."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source


@pytest.mark.parametrize(
    ("source", "batches"), [(StreamSplitDataIterator(), [0, 1, 2]), (object(), [3, 4, 5])]
)
def test_a_dataset_that_reads_a_split_of_ray_data_is_not_sharded_again(
    source: Any, batches: list[int]
) -> None:
    loader = prepare_data_loader(
        DataLoader(RowsOfRay(source), batch_size=3), num_processes=2, process_index=1, dispatch_batches=False
    )
    assert next(iter(loader)).tolist() == batches


class RankAware(Sampler[int]):
    """Every second index; nothing says so."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 8, 2))

    def __len__(self) -> int:
        return 4


class RankAwareStream(IterableDataset[int]):
    """Every second number, with the number of ranks and the rank as attributes."""

    def __init__(self, rank: int) -> None:
        self.world_size, self.rank = 2, rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 8, 2))


def _distributed_sampler(rank: int) -> DataLoader[Any]:
    data: Any = list(range(8))
    return DataLoader(data, batch_size=3, sampler=DistributedSampler(data, 2, rank, shuffle=False))


def _own_shards(make: Callable[[int], DataLoader[Any]], **options: Any) -> list[DataLoaderShard]:
    return [
        prepare_data_loader(  # type: ignore[misc]
            make(rank), num_processes=2, process_index=rank, put_on_device=True, **options
        )
        for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (_distributed_sampler, {}),
        (lambda rank: DataLoader(RankAwareStream(rank), batch_size=3), {}),
        (
            lambda rank: DataLoader(list(range(8)), batch_size=3, sampler=RankAware(rank)),
            {"already_sharded": True},
        ),
        (lambda rank: DataLoader(list(range(rank, 8, 2)), batch_size=3), {"already_sharded": True}),
    ],
)
def test_every_sample_of_data_that_is_sharded_already_comes_once(make: Any, options: dict[str, Any]) -> None:
    loaders = _own_shards(make, **options)
    assert [[batch.tolist() for batch in loader] for loader in loaders] == [
        [[0, 2, 4], [6]],
        [[1, 3, 5], [7]],
    ]
    assert (loaders[0].total_batch_size, loaders[0].sharder) == (6, None)
    for _ in loaders[1]:
        assert loaders[1].remainder == -1  # nothing is padding, and the sizes of the others are not known
        assert loaders[1].real_in_batch is None
    batches = iter(loaders[0])
    next(batches)
    state = loaders[0].state_dict()
    again, _ = _own_shards(make, **options)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == [[6]]
    whole = prepare_data_loader(make(0), already_sharded=False)
    with pytest.raises(ValueError, match="1 of 2 parts"):
        whole.load_state_dict(state)


class SilentStream(RankAwareStream):
    """Every second number; nothing says so."""

    def __init__(self, rank: int) -> None:
        self.first = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, 8, 2))


def test_iterable_datasets_alone_are_left_as_they_are_without_shard_iterable_dataset() -> None:
    streams = _own_shards(
        lambda rank: DataLoader(SilentStream(rank), batch_size=3), shard_iterable_dataset=False
    )
    assert [[batch.tolist() for batch in loader] for loader in streams] == [
        [[0, 2, 4], [6]],
        [[1, 3, 5], [7]],
    ]
    mapped = _own_shards(lambda _: DataLoader(list(range(4)), batch_size=2), shard_iterable_dataset=False)
    assert [[batch.tolist() for batch in loader] for loader in mapped] == [[[0, 1]], [[2, 3]]]


def test_a_sampler_that_shards_is_sharded_again_only_on_request() -> None:
    loaders = _own_shards(_distributed_sampler, already_sharded=False, even_batches=False)
    assert [[batch.tolist() for batch in loader] for loader in loaders] == [[[0, 2, 4]], [[7]]]
    assert len(list(prepare_data_loader(_distributed_sampler(0)))) == 2


def test_the_order_of_a_shard_stays_the_ranks_own() -> None:
    generators = [torch.Generator().manual_seed(rank) for rank in (0, 1)]
    loaders = _own_shards(
        lambda rank: DataLoader(list(range(8)), shuffle=True, generator=generators[rank]),
        already_sharded=True,
        rng_types=["generator", "torch"],
    )
    assert [loader.rng_types for loader in loaders] == [(RNGType.TORCH,)] * 2


def test_a_shard_for_other_ranks_is_refused() -> None:
    loader = _distributed_sampler(0)
    with pytest.raises(ValueError, match=r"num_replicas=2 and rank=0, but this is rank 1 of 2"):
        prepare_data_loader(loader, num_processes=2, process_index=1)
    with pytest.raises(ValueError, match="rank 0 of 4"):
        prepare_data_loader(loader, num_processes=4, process_index=0)
    assert len(list(prepare_data_loader(loader, num_processes=4, process_index=0, already_sharded=True))) == 2


def test_data_that_is_sharded_already_cannot_be_dispatched() -> None:
    with pytest.raises(ValueError, match="dispatch_batches=True makes the main process read"):
        _own_shards(_distributed_sampler, dispatch_batches=True)


def test_batches_out_of_order_cannot_be_padded() -> None:
    loader = DataLoader(list(range(8)), in_order=False)
    with pytest.raises(ValueError, match="in_order=False"):
        prepare_data_loader(loader, num_processes=2, process_index=0)
    prepare_data_loader(loader, num_processes=2, process_index=0, even_batches=False)


SHUFFLED: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffle": lambda: DataLoader(list(range(20)), batch_size=3, shuffle=True),
    "generator": lambda: DataLoader(list(range(20)), batch_size=3, shuffle=True, generator=torch.Generator()),
    "subset": lambda: DataLoader(list(range(20)), batch_size=3, sampler=SubsetRandomSampler(range(20))),
    "batches": lambda: DataLoader(
        list(range(20)), batch_sampler=BatchSampler(RandomSampler(range(20)), 3, drop_last=False)
    ),
}


@pytest.mark.parametrize("name", SHUFFLED)
@pytest.mark.parametrize("given", [None, ["generator"], ["cuda"]])
def test_a_random_order_has_a_source_that_ranks_share(name: str, given: Any) -> None:
    loaders = pair(SHUFFLED[name], rng_types=given)
    for loader in loaders:
        assert isinstance(loader.synchronized_generator, torch.Generator)
        assert loader.synchronized_generator is loader.get_sampler().generator
        assert RNGType.GENERATOR in loader.rng_types
    loaders[1].synchronized_generator.set_state(loaders[0].synchronized_generator.get_state())
    loaders[0].rng_types = loaders[1].rng_types = ()  # "cuda" is not here
    seen = [
        sample for loader in loaders for batch in loader for sample in batch.tolist()[: loader.real_in_batch]
    ]
    assert sorted(seen) == list(range(20))


def test_weights_are_sampled_from_a_shared_source() -> None:
    loaders = pair(lambda: DataLoader([0, 1], sampler=WeightedRandomSampler([1.0, 2.0], 8)))
    assert all(loader.synchronized_generator is not None for loader in loaders)


def test_an_order_from_torchs_generator_is_shared_with_it() -> None:
    (loader, _) = pair(SHUFFLED["shuffle"], rng_types=["torch"])
    assert loader.synchronized_generator is None
    assert loader.rng_types == (RNGType.TORCH,)


def test_what_is_not_random_shares_nothing() -> None:
    (loader, _) = pair(lambda: DataLoader(list(range(4))), rng_types=["generator"])
    assert loader.rng_types == ()
    (stream, _) = pair(lambda: DataLoader(Numbers()), rng_types=["generator", "torch"])
    assert stream.rng_types == (RNGType.TORCH,)


def test_alone_the_order_is_that_of_torch() -> None:
    torch.manual_seed(3)
    plain = [batch.tolist() for batch in SHUFFLED["shuffle"]()]
    torch.manual_seed(3)
    assert [
        batch.tolist() for batch in prepare_data_loader(SHUFFLED["shuffle"](), rng_types=["generator"])
    ] == plain


@pytest.mark.parametrize("name", ["shuffle", "generator", "batches"])
def test_a_seedable_sampler_gives_ranks_one_order_without_talking(name: str) -> None:
    loaders = pair(SHUFFLED[name], use_seedable_sampler=True, data_seed=11, rng_types=["generator"])
    for _ in range(2):
        seen = [
            sample
            for loader in loaders
            for batch in loader
            for sample in batch.tolist()[: loader.real_in_batch]
        ]
        assert sorted(seen) == list(range(20))
    for loader in loaders:
        assert isinstance(loader.get_sampler(), SeedableRandomSampler)
        assert loader.get_sampler().initial_seed == 11
        assert loader.rng_types == ()


def test_a_seed_without_a_seedable_sampler_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    prepare_data_loader(SHUFFLED["shuffle"](), data_seed=3)
    assert "data_seed has no effect" in caplog.text


def test_a_slice_function_without_dispatching_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    pair(SHUFFLED["shuffle"], slice_fn_for_dispatch=lambda batch, *_, **__: batch)
    assert "slice_fn_for_dispatch has no effect" in caplog.text


def test_a_stateful_loader_needs_torchdata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata", ModuleType("torchdata"))
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(MissingDependencyError, match="accel-train\\[stateful\\]"):
        prepare_data_loader(DataLoader([1, 2]), use_stateful_dataloader=True)
