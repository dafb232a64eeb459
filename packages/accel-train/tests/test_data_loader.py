"""What a prepared loader yields, and what it tells about each batch."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from accel_plugins.parallelism.sequence import SequenceShard
from accel_state.accelerator_state import GradientState
from accel_train.data.adapter import DataLoaderShard
from accel_train.data.dispatcher import shard_of_ranks
from accel_train.data.prepare import prepare_data_loader, skip_first_batches
from accel_train.data.shards import BatchSamplerShard, IterableDatasetShard

if TYPE_CHECKING:
    from collections.abc import Iterator

# Torch counts the cores of this machine.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers(IterableDataset[int]):
    """The numbers up to a size, every worker its own."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.size) if info is None else range(info.id, self.size, info.num_workers))


class Sized(Numbers):
    def __len__(self) -> int:
        return self.size


def ranks(loader: DataLoader[Any], world: int, **options: Any) -> list[Any]:
    return [
        prepare_data_loader(loader, num_processes=world, process_index=rank, **options)
        for rank in range(world)
    ]


def real_samples(loader: Any) -> list[int]:
    """The samples of a pass without the padding, as `gather_for_metrics` finds them."""
    samples: list[int] = []
    for batch in loader:
        samples += batch.tolist()[: loader.real_in_batch]
        assert loader.batch_size_seen == len(batch)
    return samples


def test_the_last_batch_is_known_to_be_the_last_in_every_pass() -> None:
    loader = DataLoaderShard(list(range(16)), batch_size=4)
    for _ in range(2):
        assert [loader.end_of_dataloader for _ in loader] == [False, False, False, True]


def test_a_prepared_loader_is_a_torch_loader() -> None:
    loader = prepare_data_loader(DataLoader(list(range(10)), batch_size=4))
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, DataLoaderShard)
    assert len(loader) == 3
    assert loader.total_batch_size == 4
    assert loader.total_dataset_length == 10


@pytest.mark.parametrize(("size", "remainder"), [(10, 2), (12, 0), (3, 3)])
def test_the_remainder_is_what_the_last_round_has(size: int, remainder: int) -> None:
    for loader in ranks(DataLoader(list(range(size)), batch_size=2), 2):
        assert {loader.remainder for _ in loader} == {remainder}
    dropping = prepare_data_loader(DataLoader(list(range(10)), batch_size=4, drop_last=True))
    assert {dropping.remainder for _ in dropping} == {0}


def test_a_loader_is_active_only_while_it_is_iterated_over() -> None:
    state = GradientState()
    outer, inner = (DataLoaderShard(list(range(4)), batch_size=2) for _ in range(2))
    assert not state.in_dataloader
    for _ in outer:
        assert state.active_dataloader is outer
        for _ in inner:
            assert state.active_dataloader is inner
        assert state.active_dataloader is outer
        assert state.end_of_dataloader is outer.end_of_dataloader
    assert not state.in_dataloader
    assert state.remainder == -1


def _stop(loader: DataLoaderShard) -> None:
    for _ in loader:
        break


def _divide_by_zero(loader: DataLoaderShard) -> None:
    for batch in loader:
        _ = batch.tolist()[0] // 0


def _fail(loader: DataLoaderShard) -> None:
    with pytest.raises(ZeroDivisionError):
        _divide_by_zero(loader)


def _fail_in_the_dataset(loader: DataLoaderShard) -> None:
    loader.dataset.append("no number")  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        list(loader)


@pytest.mark.parametrize("end", [_stop, _fail, _fail_in_the_dataset])
def test_a_loader_is_not_active_after_its_loop_was_left(end: Any) -> None:
    loader = DataLoaderShard(list(range(7)), batch_size=2)
    end(loader)
    assert not GradientState().in_dataloader


FACTS = ("end_of_dataloader", "remainder", "real_in_batch", "batch_size_seen")
OWN_DATA = {
    "map-style": lambda: prepare_data_loader(
        DataLoader(range(14), batch_size=3), num_processes=2, process_index=1
    ),
    "stream": lambda: prepare_data_loader(
        DataLoader(Numbers(14), batch_size=3), num_processes=2, process_index=1
    ),
    "dispatched": lambda: prepare_data_loader(
        DataLoader(Numbers(14), batch_size=3), dispatch_batches=True, put_on_device=True
    ),
}


def facts_of(loader: Any) -> tuple[Any, ...]:
    state = GradientState()
    assert (state.end_of_dataloader, state.remainder) == (loader.end_of_dataloader, loader.remainder)
    return (*(getattr(loader, name) for name in FACTS), loader.state_dict())


@pytest.mark.parametrize("kind", OWN_DATA)
def test_facts_and_position_are_those_of_the_iteration_at_hand_within_another_over_the_same_loader(
    kind: str,
) -> None:
    torch.manual_seed(0)
    (loader := OWN_DATA[kind]()).set_epoch(0)
    expected = [(batch.tolist(), facts_of(loader)) for batch in loader]
    (loader := OWN_DATA[kind]()).set_epoch(0)
    found = []
    for batch in loader:
        before = facts_of(loader)
        loader.set_epoch(0)
        assert [(inner.tolist(), facts_of(loader)) for inner in loader] == expected
        assert facts_of(loader) == before
        found.append((batch.tolist(), before))
    assert found == expected
    assert not GradientState().in_dataloader
    both = []
    loader.set_epoch(0)
    first = iter(loader)
    one = [(next(first).tolist(), facts_of(loader))]
    loader.set_epoch(0)
    for batch in loader:  # two iterations in turn
        both.append((batch.tolist(), facts_of(loader)))
        one += [(other.tolist(), facts_of(loader)) for other in itertools.islice(first, 1)]
    assert both == expected
    assert one == expected


@pytest.mark.parametrize("taken", [1, 2])
def test_an_iterator_that_is_left_open_does_not_stay_the_active_one(taken: int) -> None:
    state = GradientState()
    outer, inner = (DataLoaderShard(list(range(size)), batch_size=2) for size in (8, 4))
    ends = []
    for number, _ in enumerate(outer):
        assert state.active_dataloader is outer
        ends.append(state.end_of_dataloader)
        if number == 1:
            left = iter(inner)
            for _ in range(taken):
                next(left)
            assert state.active_dataloader is inner
    assert ends == [False, False, False, True]
    assert state.active_dataloader is (inner if taken == 1 else None)
    left.close()
    assert not state.in_dataloader


@pytest.mark.parametrize("options", ["", "use_stateful_dataloader=True"])
def test_an_iterator_that_is_open_at_the_end_of_the_program_is_no_error(options: str) -> None:
    if options:
        pytest.importorskip("torchdata.stateful_dataloader")
    program = (
        "from torch.utils.data import DataLoader\n"
        "from accel_train.data.prepare import prepare_data_loader\n"
        f"left = iter(prepare_data_loader(DataLoader(range(8), batch_size=2), {options}))\n"
        "next(left)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "Traceback" not in done.stderr


WITH_WORKERS = {(0, 1, 2), (13, 1, 2), (1, 2, 2), (13, 2, 2)}
ITERABLE_WITH_WORKERS = {(Numbers, 1, 3), (Numbers, 2, 1), (Numbers, 2, 3), (Sized, 1, 1), (Sized, 2, 3)}


def few_with_workers(chosen, *values):
    """All combinations; those with workers, 0.1 s to fork each, are thorough unless chosen."""
    return [
        pytest.param(
            *values_of_case,
            marks=[pytest.mark.thorough] * (values_of_case[-1] > 0 and values_of_case not in chosen),
        )
        for values_of_case in itertools.product(*values)
    ]


@pytest.mark.parametrize(
    ("size", "world", "workers"), few_with_workers(WITH_WORKERS, (0, 1, 7, 12, 13), (1, 2, 3), (0, 2))
)
def test_map_style_samples_come_once_without_the_padding(size: int, world: int, workers: int) -> None:
    loaders = ranks(DataLoader(list(range(size)), batch_size=2, num_workers=workers), world)
    assert sorted(sample for loader in loaders for sample in real_samples(loader)) == list(range(size))
    assert len({len(list(loader)) for loader in loaders}) == 1


@pytest.mark.parametrize(
    ("kind", "world", "workers"),
    few_with_workers(ITERABLE_WITH_WORKERS, (Numbers, Sized), (1, 2, 3), (0, 1, 3)),
)
def test_iterable_samples_come_once_without_the_padding(
    kind: type[Numbers], world: int, workers: int
) -> None:
    loaders = ranks(DataLoader(kind(29), batch_size=2, num_workers=workers), world)
    assert sorted(sample for loader in loaders for sample in real_samples(loader)) == list(range(29))
    assert len({len(list(loader)) for loader in loaders}) == 1


@pytest.mark.parametrize(("size", "workers"), few_with_workers({(13, 2)}, (1, 7, 12, 13), (0, 2)))
def test_with_static_shapes_all_batches_of_one_rank_are_full(size: int, workers: int) -> None:
    batches = BatchSampler(range(size), batch_size=4, drop_last=False)
    shard = BatchSamplerShard(batches, static_shapes=True)
    stream = IterableDatasetShard(Numbers(size), 4, mark_padding=True, static_shapes=True)
    map_style = DataLoaderShard(list(range(size)), batch_sampler=shard, num_workers=workers)
    iterable = DataLoaderShard(stream, batch_size=4, num_workers=workers)
    for loader in (map_style, iterable):
        assert {len(batch) for batch in loader} == {4}
        assert sorted(real_samples(loader)) == list(range(size))
    assert map_style.remainder == size % 4
    assert len(map_style) == -(-size // 4)
    resumed = skip_first_batches(map_style, len(map_style) - 1)
    assert real_samples(resumed) == list(range(size))[-(size % 4 or 4) :]


def test_with_static_shapes_a_batch_sampler_whose_order_is_unknown_is_completed_too() -> None:
    class Pairs:
        batch_size = 4

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[5, 4, 3, 2], [1, 0]])

    shard: Any = BatchSamplerShard(Pairs(), static_shapes=True)
    loader = DataLoaderShard(list(range(6)), batch_sampler=shard)
    assert [batch.tolist() for batch in loader] == [[5, 4, 3, 2], [1, 0, 5, 4]]
    assert (loader.real_in_batch, loader.batch_size_seen) == (2, 4)


@pytest.mark.parametrize("dataset", [list(range(11)), Numbers(11)])
def test_without_even_batches_nothing_is_padded(dataset: Any) -> None:
    loaders = ranks(DataLoader(dataset, batch_size=2), 3, even_batches=False)
    batches = [[batch.tolist() for batch in loader] for loader in loaders]
    assert batches == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10]]]


@pytest.mark.parametrize("dataset", [list(range(11)), Numbers(11)])
def test_split_batches_splits_each_batch(dataset: Any) -> None:
    loaders = ranks(DataLoader(dataset, batch_size=4), 2, split_batches=True)
    batches = [[batch.tolist() for batch in loader] for loader in loaders]
    assert batches == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 0]]]
    assert [loader.total_batch_size for loader in loaders] == [4, 4]


@pytest.mark.parametrize("dataset", [list(range(11)), Numbers(11)])
def test_drop_last_drops_rounds_that_are_not_complete(dataset: Any) -> None:
    loaders = ranks(DataLoader(dataset, batch_size=2, drop_last=True), 3)
    batches = [[batch.tolist() for batch in loader] for loader in loaders]
    assert batches == [[[0, 1]], [[2, 3]], [[4, 5]]]


def test_batches_that_the_dataset_makes_are_dealt_whole() -> None:
    loaders = ranks(DataLoader([torch.tensor([i]) for i in range(5)], batch_size=None), 2)  # pyright: ignore[reportArgumentType]
    assert [real_samples(loader) for loader in loaders] == [[0, 2, 4], [1, 3]]
    assert [len(loader) for loader in loaders] == [3, 3]
    stream = ranks(DataLoader(Numbers(5), batch_size=None, collate_fn=lambda n: torch.tensor([n])), 2)
    assert [real_samples(loader) for loader in stream] == [[0, 2, 4], [1, 3]]


class Squares:
    """A dataset that is asked for many indices at once."""

    def __getitem__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices) ** 2

    def __len__(self) -> int:
        return 7


def test_a_batch_sampler_in_place_of_the_sampler_is_sharded() -> None:
    sampler = BatchSampler(range(7), batch_size=2, drop_last=False)
    loaders = ranks(DataLoader(Squares(), batch_size=None, sampler=sampler), 2)  # pyright: ignore[reportArgumentType]
    assert [real_samples(loader) for loader in loaders] == [[0, 1, 16, 25], [4, 9, 36]]


class Lengths:
    """A batch sampler without a batch size."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0], [1, 2, 3], [4, 5]])

    def __len__(self) -> int:
        return 3


def test_a_batch_sampler_of_any_kind_is_sharded() -> None:
    loader = DataLoader(list(range(6)), batch_sampler=Lengths())  # pyright: ignore[reportArgumentType]
    loaders = ranks(loader, 2, even_batches=False)
    assert [[batch.tolist() for batch in loader] for loader in loaders] == [[[0], [4, 5]], [[1, 2, 3]]]
    evened = [[batch.tolist() for batch in loader] for loader in ranks(loader, 2)]
    assert evened == [[[0], [4, 5]], [[1, 2, 3], [0]]], "the first batch is repeated whole"


def test_the_users_collate_function_gets_the_samples() -> None:
    def collate(samples: list[int]) -> str:
        return "+".join(map(str, samples))

    assert list(prepare_data_loader(DataLoader(list(range(3)), batch_size=2, collate_fn=collate))) == [
        "0+1",
        "2",
    ]
    loaders = ranks(DataLoader(Numbers(3), batch_size=2, collate_fn=collate), 2)
    assert [list(loader) for loader in loaders] == [["0+1"], ["2+0"]]
    sizes = [loader.batch_size_seen for loader in loaders for _ in loader]
    assert sizes == [None, 2], "what padded a batch knows how large it is"


def test_workers_may_live_on() -> None:
    loader = prepare_data_loader(
        DataLoader(list(range(7)), batch_size=2, num_workers=2, persistent_workers=True), num_processes=1
    )
    first = [batch.tolist() for batch in loader]
    assert first == [[0, 1], [2, 3], [4, 5], [6]]
    assert [batch.tolist() for batch in loader] == first


class Epochs(IterableDataset[int]):
    """Four times the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 4)


def test_the_epoch_reaches_workers_that_live_on() -> None:
    loader = DataLoader(Epochs(), batch_size=2, num_workers=1, persistent_workers=True)
    prepared = prepare_data_loader(loader, num_processes=2, process_index=0)
    for epoch in range(3):
        assert [batch.tolist() for batch in prepared] == [[epoch, epoch]]


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True, "put_on_device": True}])
def test_the_epoch_reaches_workers_of_a_stream_that_is_not_sharded(
    context: str, options: dict[str, Any]
) -> None:
    loader = DataLoader(
        Epochs(), batch_size=4, num_workers=1, persistent_workers=True, multiprocessing_context=context
    )
    prepared = prepare_data_loader(loader, **options)
    assert [batch.tolist() for _ in range(2) for batch in prepared] == [[0] * 4, [1] * 4]
    prepared.set_epoch(7)
    assert [batch.tolist() for batch in prepared] == [[7] * 4]
    again = copy.copy(prepared)
    again.set_epoch(3)
    assert [batch.tolist() for batch in again] == [[3] * 4]
    assert [batch.tolist() for batch in skip_first_batches(again)] == [[4] * 4]


def test_passes_are_epochs_unless_told_otherwise() -> None:
    loader = prepare_data_loader(
        DataLoader(list(range(20)), batch_size=20, shuffle=True), use_seedable_sampler=True, data_seed=3
    )
    orders = [next(iter(loader)).tolist() for _ in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert loader.iteration == 3
    loader.set_epoch(1)
    assert next(iter(loader)).tolist() == orders[1]


def test_batches_are_moved_to_the_device() -> None:
    loader = prepare_data_loader(
        DataLoader([{"x": torch.ones(1), "name": "a"}] * 2, batch_size=2), device="meta", put_on_device=True
    )
    (batch,) = list(loader)
    assert batch["x"].device.type == "meta"
    assert batch["name"] == ["a", "a"]


def test_batches_that_are_on_the_cpu_are_not_touched() -> None:
    made: list[Any] = []

    def collate(samples: list[int]) -> tuple[torch.Tensor, ...]:
        made.append((torch.tensor(samples), torch.tensor(samples)))
        return made[-1]

    loader = prepare_data_loader(
        DataLoader(list(range(4)), batch_size=2, collate_fn=collate), device="cpu", put_on_device=True
    )
    assert all(batch is original for batch, original in zip(loader, made, strict=True))


def test_ranks_that_compute_parts_of_the_same_layers_get_the_same_samples() -> None:
    mesh = SimpleNamespace(mesh=torch.arange(4).reshape(2, 2), mesh_dim_names=("dp_shard", "tp"))
    assert shard_of_ranks(mesh) == [0, 0, 1, 1]
    other = SimpleNamespace(
        mesh=torch.arange(8).reshape(2, 2, 2), mesh_dim_names=("dp_replicate", "tp", "cp")
    )
    assert shard_of_ranks(other) == [0, 0, 0, 0, 1, 1, 1, 1]
    mixed = SimpleNamespace(mesh=torch.arange(4).reshape(2, 2), mesh_dim_names=("tp", "dp_shard"))
    assert shard_of_ranks(mixed) == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="mesh_dim_names"):
        shard_of_ranks(SimpleNamespace(mesh=torch.arange(2), mesh_dim_names=None))


def test_the_sampler_can_be_looked_at_and_replaced() -> None:
    loader = prepare_data_loader(DataLoader(list(range(4)), batch_size=2), num_processes=2, process_index=1)
    assert list(loader.get_sampler()) == [0, 1, 2, 3]
    loader.set_sampler([3, 2, 1, 0])
    assert [batch.tolist() for batch in loader] == [[1, 0]]


def test_skipping_concerns_the_next_pass_only() -> None:
    loader = prepare_data_loader(DataLoader(list(range(7)), batch_size=2), num_processes=1)
    skipped = skip_first_batches(loader, 2)
    assert (len(skipped), len(loader)) == (2, 4)
    assert [batch.tolist() for batch in skipped] == [[4, 5], [6]]
    assert len(skipped) == 4
    assert len(list(skipped)) == 4
    assert len(list(loader)) == 4


@pytest.mark.parametrize("dataset", [list(range(7)), Numbers(7)], ids=["map-style", "iterable"])
def test_the_size_of_a_padded_batch_does_not_depend_on_the_tensors_in_it(dataset: Any) -> None:
    def with_weights_of_classes(labels: list[int]) -> dict[str, torch.Tensor]:
        return {"weights": torch.ones(99), "labels": torch.tensor(labels)}

    loader = DataLoader(dataset, batch_size=2, collate_fn=with_weights_of_classes)
    sizes = [
        [part.batch_size_seen for _ in part if part.real_in_batch is not None]
        for part in ranks(loader, 2, dispatch_batches=False)
    ]
    assert sizes == [[], [2]]


def test_sequences_are_checked_and_sharded_before_batches_are_copied_to_the_device():
    rows = [{"input_ids": torch.arange(4), "attention_mask": torch.ones(4)} for _ in range(3)]
    loader = DataLoaderShard(rows, batch_size=2, device=torch.device("meta"))
    loader.shard_sequences = SequenceShard(size=2, rank=1)  # reads values, which a meta tensor does not have
    batches = [*loader]
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(2, 2), (1, 2)]
    assert all(value.is_meta for batch in batches for value in batch.values())


def _batches(loader: Any) -> list[list[int]]:
    torch.manual_seed(1)  # decides the order where the loader has no generator of its own
    return [batch.tolist() for batch in loader]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
@pytest.mark.parametrize("kind", ["seedable", "generator", "stream", "dispatched", "workers", "stateful"])
def test_a_copy_of_a_loader_reads_by_itself_also_where_the_loader_is_in_a_pass(
    kind: str, copied: Any
) -> None:
    if kind == "stateful":
        pytest.importorskip("torchdata")
    generator = torch.Generator().manual_seed(3) if kind == "generator" else None
    workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": True} if kind == "workers" else {}
    data: Any = Numbers(6) if kind == "stream" else list(range(6))
    order = {} if kind == "stream" else {"shuffle": True, "generator": generator}
    loader = prepare_data_loader(
        DataLoader(data, batch_size=2, **order, **workers),
        use_seedable_sampler=kind == "seedable",
        use_stateful_dataloader=kind == "stateful",
        dispatch_batches=kind == "dispatched",
        put_on_device=kind == "dispatched",
    )
    before = copied(loader)
    during: Any = None
    torch.manual_seed(1)
    expected: list[list[int]] = []
    for batch in loader:
        expected.append(batch.tolist())
        if during is None:
            during = copied(loader)
            assert GradientState().active_dataloader is loader
    assert type(during) is type(loader)
    assert _batches(before) == expected
    # A generator of the loader's own has drawn the pass under way; what the copy draws is the next one.
    assert (_batches(during) == expected) == (generator is None)
    during.set_epoch(7)
    assert loader.iteration == 1
    for _ in during:
        assert GradientState().active_dataloader is during
