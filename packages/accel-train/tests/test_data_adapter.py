"""A pass that is saved goes on where it was: the same samples, in the same order, each once."""

from __future__ import annotations

import io
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, Sampler, SubsetRandomSampler, get_worker_info

from accel_train.data.prepare import SkipDataLoader, prepare_data_loader, skip_first_batches
from accel_train.data.shards import SkipBatchSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Torch counts the cores of this machine.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Stream(IterableDataset[int]):
    """Numbers; every worker has its own, of which one has fewer."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.first: int | None = None

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None:
            return iter(range(self.size))
        first = info.id if self.first is None else self.first
        return iter(range(first, self.size - 7 * (first == 1), info.num_workers))


class Recording:
    """A dataset that notes what is read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Global(Sampler[int]):
    """Draws its order from torch's own generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(23).tolist())

    def __len__(self) -> int:
        return 23


def _plain(**options: Any) -> DataLoader[Any]:
    return DataLoader(list(range(23)), batch_size=2, **options)


def _first_of_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.first = worker  # pyright: ignore[reportAttributeAccessIssue]


def _batches() -> list[list[int]]:
    return [[0], [1, 2, 3], [4, 5], [6], [7, 8, 9, 10], [11, 12]]


LOADERS: dict[str, tuple[Callable[[], DataLoader[Any]], dict[str, Any]]] = {
    "sequential": (_plain, {}),
    "shuffled": (lambda: _plain(shuffle=True), {}),
    "generator": (lambda: _plain(shuffle=True, generator=torch.Generator().manual_seed(3)), {}),
    "seeded": (lambda: _plain(shuffle=True), {"use_seedable_sampler": True, "data_seed": 5}),
    "subset": (lambda: _plain(sampler=SubsetRandomSampler(range(0, 23, 2))), {}),
    "own sampler": (lambda: _plain(sampler=Global()), {}),
    "own batches": (lambda: DataLoader(list(range(13)), batch_sampler=_batches()), {}),
    "single": (lambda: DataLoader(list(range(9)), batch_size=None, shuffle=True), {}),
    "workers": (lambda: _plain(shuffle=True, num_workers=2), {}),
    "living workers": (lambda: _plain(shuffle=True, num_workers=2, persistent_workers=True), {}),
    "stream": (lambda: DataLoader(Stream(23), batch_size=2), {}),
    "stream with workers": (lambda: DataLoader(Stream(29), batch_size=2, num_workers=3), {}),
    "stream with an init function": (
        lambda: DataLoader(Stream(29), batch_size=2, num_workers=2, worker_init_fn=_first_of_worker),
        {},
    ),
    "dispatched": (lambda: _plain(shuffle=True), {"dispatch_batches": True, "put_on_device": True}),
    "dispatched stream": (
        lambda: DataLoader(Stream(23), batch_size=2, num_workers=2),
        {"dispatch_batches": True, "put_on_device": True},
    ),
}


def flat(batch: Any) -> list[int]:
    return torch.as_tensor(batch).reshape(-1).tolist()


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        pytest.param(name, taken, marks=[pytest.mark.thorough] * (taken == 1 and "workers" in name))
        for name in LOADERS
        for taken in (1, 4)
    ],
)
def test_what_is_left_of_a_pass_and_the_passes_after_it_come_as_without_the_break(
    name: str, taken: int
) -> None:
    make, options = LOADERS[name]
    torch.manual_seed(1)
    loader = prepare_data_loader(make(), **options)
    list(loader)  # not the first epoch
    batches = iter(loader)
    seen = [flat(batch) for batch in islice(batches, taken)]
    state = through_a_file({"loader": loader.state_dict(), "rng": torch.get_rng_state()})
    remaining = [flat(batch) for batch in batches]
    following = [flat(batch) for batch in loader]

    torch.manual_seed(2)
    again = prepare_data_loader(make(), **options)
    torch.set_rng_state(state["rng"])
    again.load_state_dict(state["loader"])
    assert again.iteration == 1
    assert [flat(batch) for batch in again] == remaining
    assert [flat(batch) for batch in again] == following
    assert remaining == [] or seen[0] != remaining[0]


@given(
    world=st.integers(1, 3),
    other=st.integers(1, 3),
    steps=st.integers(0, 6),
    size=st.integers(1, 3),
    kind=st.sampled_from(["map", "shuffled", "stream", "batches"]),
)
@settings(max_examples=60, deadline=None)
def test_an_epoch_goes_on_with_another_number_of_ranks(
    world: int, other: int, steps: int, size: int, kind: str
) -> None:
    makers: dict[str, Callable[[], DataLoader[Any]]] = {
        "map": lambda: DataLoader(list(range(19)), batch_size=size),
        "shuffled": lambda: DataLoader(list(range(19)), batch_size=size, shuffle=True),
        "stream": lambda: DataLoader(Stream(19), batch_size=size),
        "batches": lambda: DataLoader(
            list(range(19)), batch_sampler=[[i, i + 1] for i in range(0, 18, 2)] + [[18]]
        ),
    }
    options: dict[str, Any] = {
        "use_seedable_sampler": True,
        "data_seed": 1,
        "even_batches": kind != "batches",
    }
    seen: list[int] = []
    states: list[dict[str, Any]] = []
    for rank in range(world):
        loader = prepare_data_loader(makers[kind](), num_processes=world, process_index=rank, **options)
        batches = iter(loader)
        for batch in islice(batches, steps):
            seen += batch.tolist()[: loader.real_in_batch]
        states.append(through_a_file(loader.state_dict()))
        batches.close()  # pyright: ignore[reportAttributeAccessIssue]
    for rank in range(other):
        loader = prepare_data_loader(makers[kind](), num_processes=other, process_index=rank, **options)
        loader.load_state_dict(states[0])
        if loader.iteration == 0:  # else the epoch was complete
            for batch in loader:
                seen += batch.tolist()[: loader.real_in_batch]
    if steps and kind != "batches":
        assert all(state == states[0] for state in states)
    assert sorted(seen) == list(range(19))


@pytest.mark.parametrize(
    "world",
    [
        *[(1, 2, 1), (2, 1, 2)],
        *(pytest.param(sizes, marks=pytest.mark.thorough) for sizes in [(1, 3, 2), (3, 1, 2), (2, 3, 1)]),
    ],
)
def test_an_epoch_of_a_stream_with_workers_is_seen_once_by_changing_numbers_of_ranks(
    world: tuple[int, int, int],
) -> None:
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for stage, ranks in enumerate(world):
        before = state
        for rank in range(ranks):
            loader = prepare_data_loader(
                DataLoader(Stream(37), batch_size=2, num_workers=2), num_processes=ranks, process_index=rank
            )
            if before is not None:
                loader.load_state_dict(before)
            batches = iter(loader)
            for batch in batches if stage == 2 else islice(batches, 3):
                seen += batch.tolist()[: loader.real_in_batch]
            state = loader.state_dict()
    assert sorted(seen) == sorted([*range(0, 37, 2), *range(1, 30, 2)])


def test_nothing_is_read_that_was_consumed() -> None:
    dataset = Recording(1000)
    loader = prepare_data_loader(
        DataLoader(dataset, batch_size=10, shuffle=True), use_seedable_sampler=True, data_seed=1
    )
    state = {"format": 1, "epoch": 2, "position": None}
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    state["position"]["consumed"] = [980]
    dataset.read.clear()
    loader.load_state_dict(state)
    assert len(list(loader)) == 2
    assert len(dataset.read) == 20


def test_a_state_between_passes_is_the_beginning_of_the_next() -> None:
    loader = prepare_data_loader(_plain())
    list(loader)
    state = loader.state_dict()
    assert state == {"format": 1, "epoch": 1, "position": None, "source": {}}
    other = prepare_data_loader(_plain())
    other.load_state_dict(state)
    assert len(list(other)) == 12
    assert other.iteration == 2


def test_a_state_that_was_loaded_can_be_saved_again() -> None:
    loader = prepare_data_loader(_plain())
    next(iter(loader))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    other = prepare_data_loader(_plain())
    other.load_state_dict(state)
    assert other.state_dict() == state


def test_the_state_at_the_last_batch_has_nothing_left() -> None:
    loader = prepare_data_loader(_plain())
    for _ in loader:
        state = loader.state_dict()
    other = prepare_data_loader(_plain())
    other.load_state_dict(state)  # pyright: ignore[reportPossiblyUnboundVariable]
    assert list(other) == []
    assert len(list(other)) == 12


def test_another_epoch_gives_up_a_loaded_position(caplog: pytest.LogCaptureFixture) -> None:
    loader = prepare_data_loader(_plain())
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    other = prepare_data_loader(_plain())
    other.load_state_dict(state)
    other.set_epoch(0)
    assert len(list(other)) == 11
    other.load_state_dict(state)
    other.set_epoch(4)
    assert len(list(other)) == 12
    assert "drops the loaded position in epoch 0" in caplog.text


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"some": 1}, r"the keys \['some'\]"),
        ({"format": 99, "epoch": 0, "position": None}, "format=99"),
        (
            {
                "format": 1,
                "epoch": 0,
                "position": {"unit": "stream", "consumed": [0], "next_worker": 0, "order": None},
            },
            "counts 'stream', but this loader counts 'samples'",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_data_loader(_plain()).load_state_dict(state)


def test_another_number_of_workers_is_refused_for_a_stream() -> None:
    loader = prepare_data_loader(DataLoader(Stream(9), batch_size=2, num_workers=2))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    other = prepare_data_loader(DataLoader(Stream(9), batch_size=2, num_workers=1))
    with pytest.raises(ValueError, match="Pass num_workers=2"):
        other.load_state_dict(state)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("skip", [0, 1, 3, 50])
def test_skipping_leaves_out_the_first_batches(name: str, skip: int) -> None:
    make, options = LOADERS[name]
    torch.manual_seed(1)
    whole = [flat(batch) for batch in prepare_data_loader(make(), **options)]
    torch.manual_seed(1)
    assert [
        flat(batch) for batch in skip_first_batches(prepare_data_loader(make(), **options), skip)
    ] == whole[skip:]
    torch.manual_seed(1)
    plain = [flat(batch) for batch in make()]
    torch.manual_seed(1)
    assert [flat(batch) for batch in skip_first_batches(make(), skip)] == plain[skip:]


def test_skipping_counts_epochs_and_positions_with_the_loader_it_came_from() -> None:
    loader = prepare_data_loader(_plain(shuffle=True), use_seedable_sampler=True, data_seed=1)
    remaining = skip_first_batches(loader, 2)
    batches = iter(remaining)
    next(batches)
    assert loader.state_dict() == remaining.state_dict()
    assert loader.state_dict()["position"]["consumed"] == [6]
    list(batches)
    assert loader.iteration == remaining.iteration == 1


def test_skipping_after_loading_counts_from_the_beginning_of_the_same_order() -> None:
    loader = prepare_data_loader(_plain(shuffle=True))
    batches = iter(loader)
    whole = [flat(next(batches)) for _ in range(3)]
    state = loader.state_dict()
    whole += [flat(batch) for batch in batches]

    other = prepare_data_loader(_plain(shuffle=True))
    other.load_state_dict(state)
    assert [flat(batch) for batch in skip_first_batches(other, 3)] == whole[3:]
    assert len(list(other)) == len(whole)

    other.load_state_dict(state)
    twice = skip_first_batches(skip_first_batches(other, 2), 1)
    assert len(twice) == len(whole) - 3
    assert [flat(batch) for batch in twice] == whole[3:]


@pytest.mark.parametrize("workers", [0, 2])
def test_skipping_after_loading_counts_from_the_beginning_of_a_stream(workers: int) -> None:
    loader, other = (
        prepare_data_loader(DataLoader(Stream(20), batch_size=2, num_workers=workers)) for _ in range(2)
    )
    batches = iter(loader)
    whole = [flat(next(batches)) for _ in range(2)]
    other.load_state_dict(loader.state_dict())
    whole += [flat(batch) for batch in batches]
    assert [flat(batch) for batch in skip_first_batches(other, 3)] == whole[3:]
    assert [flat(batch) for batch in other] == whole


def test_skipping_twice_adds_up() -> None:
    once = skip_first_batches(prepare_data_loader(_plain()), 2)
    assert flat(next(iter(skip_first_batches(once, 1)))) == [6, 7]


def test_skip_loaders_and_samplers_say_how_much_is_left() -> None:
    sampler = SkipBatchSampler(_batches(), 2)
    assert list(sampler) == _batches()[2:]
    assert (len(sampler), sampler.total_length) == (4, 6)
    loader = SkipDataLoader(list(range(9)), skip_batches=2, batch_size=2)
    assert len(loader) == 3
    assert [flat(batch) for batch in loader] == [[4, 5], [6, 7], [8]]


def test_skipping_a_prepared_skip_loader_keeps_what_it_skips() -> None:
    skipping = SkipDataLoader(list(range(9)), skip_batches=1, batch_size=2)
    loaders = [prepare_data_loader(skipping, num_processes=2, process_index=rank) for rank in (0, 1)]
    assert [[flat(batch) for batch in loader] for loader in loaders] == [[[4, 5], [8, 0]], [[6, 7], [1, 2]]]


@pytest.mark.parametrize("skip", [skip_first_batches, lambda _, n: SkipBatchSampler([], n)])
def test_a_negative_number_of_batches_is_refused(skip: Any) -> None:
    with pytest.raises(ValueError, match="-1"):
        skip(_plain(), -1)


def test_only_torch_loaders_can_skip() -> None:
    with pytest.raises(TypeError, match=r"torch\.utils\.data\.DataLoader"):
        skip_first_batches([1, 2], 1)  # pyright: ignore[reportArgumentType]


def test_after_a_whole_dispatched_pass_the_next_epoch_begins() -> None:
    def loader() -> Any:
        return prepare_data_loader(
            DataLoader(range(6), batch_size=2), dispatch_batches=True, put_on_device=True
        )

    first, second = loader(), loader()
    assert len(list(first)) == 3
    second.load_state_dict(first.state_dict())
    assert second.iteration == 1
    assert [batch.tolist() for batch in second] == [[0, 1], [2, 3], [4, 5]]


class DrawnStream(IterableDataset[int]):
    """Shuffles with its own generator: at once, or while it is read."""

    def __init__(self, lazily: bool) -> None:
        self.generator = torch.Generator().manual_seed(42)
        self.lazily = lazily

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(12))
        if not self.lazily:
            return iter(torch.randperm(12, generator=self.generator).tolist())
        return (
            numbers.pop(int(torch.randint(len(numbers), (), generator=self.generator))) for _ in range(12)
        )


def drawn_loader(lazily: bool, workers: int = 0, **options: Any) -> Any:
    plain = DataLoader(DrawnStream(lazily), batch_size=2, num_workers=workers)
    return prepare_data_loader(plain, put_on_device=True, **options)


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"workers": 1},
        {"dispatch_batches": True},
        {"num_processes": 2, "process_index": 1, "dispatch_batches": False},
    ],
    ids=str,
)
def test_a_stream_that_shuffles_with_its_generator_is_resumed_and_skipped_in_its_order(
    options: dict[str, Any], lazily: bool
) -> None:
    whole = drawn_loader(lazily, **options)
    epochs = [[flat(batch) for batch in whole] for _ in range(3)]
    skipped = skip_first_batches(drawn_loader(lazily, **options), 2)
    assert [[flat(batch) for batch in skipped] for _ in range(2)] == [epochs[0][2:], epochs[1]]
    for epoch in (0, 1):
        broken_off = drawn_loader(lazily, **options)
        for _ in range(epoch):
            list(broken_off)
        batches = iter(broken_off)
        next(batches)
        state = through_a_file(broken_off.state_dict())
        resumed, restarted, skipping = (drawn_loader(lazily, **options) for _ in range(3))
        resumed.load_state_dict(state)
        assert [flat(batch) for batch in resumed] == epochs[epoch][1:]
        assert [flat(batch) for batch in resumed] == epochs[epoch + 1]
        restarted.load_epoch(state)
        assert [flat(batch) for batch in restarted] == epochs[epoch]
        skipping.load_state_dict(state)
        rest = skip_first_batches(skipping, 2)
        assert [flat(batch) for batch in rest] == epochs[epoch][2:]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_stream_that_shuffles_with_its_generator_is_resumed_by_another_number_of_ranks(
    before: int, after: int
) -> None:
    def loaders(world: int) -> list[Any]:
        ranks = [{"num_processes": world, "process_index": rank} for rank in range(world)]
        return [drawn_loader(lazily=False, dispatch_batches=False, **rank) for rank in ranks]

    first = loaders(before)
    passes = [iter(loader) for loader in first]
    seen = [number for batches in passes for number in flat(next(batches))]
    for loader in (second := loaders(after)):
        loader.load_state_dict(through_a_file(first[0].state_dict()))
    seen += [
        number for loader in second for batch in loader for number in flat(batch)[: loader.real_in_batch]
    ]
    assert sorted(seen) == list(range(12))


class WorkerSeed(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return iter([info.seed] * 3)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_a_resumed_epoch_are_seeded_by_the_generator_and_draw_nothing_from_it(
    persistent: bool,
) -> None:
    def loader() -> Any:
        options: dict[str, Any] = {"num_workers": 1, "persistent_workers": persistent}
        return prepare_data_loader(DataLoader(WorkerSeed(), batch_size=1, **options))

    next(batches := iter(broken_off := loader()))
    state = broken_off.state_dict()
    batches.close()
    seeds: set[int] = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        (resumed := loader()).load_state_dict(state)
        before = torch.get_rng_state()
        seeds |= {int(batch) for batch in resumed}
        assert torch.equal(torch.get_rng_state(), before)
        if persistent:
            seeds |= {int(batch) for batch in resumed}
            assert torch.equal(torch.get_rng_state(), before)
    assert len(seeds) == 2
