"""Symptoms that users of Accelerate have reported of data loading: rows 4 to 11, and 23."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from accel_plugins.kwargs import DataLoaderConfiguration
from accel_state.accelerator_state import AcceleratorState, GradientState
from accel_train import Accelerator
from harness import distributed

NUMBERS = list(range(64))


def make_accelerator(**options):
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def prepare_shuffled(**options):
    accelerator = make_accelerator(**options)
    return accelerator, accelerator.prepare(DataLoader(NUMBERS, batch_size=4, shuffle=True))


def as_in_a_new_process(seed=99):
    """Forget the run; whatever is random goes on otherwise."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(seed)


def of_all_ranks(rows):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rows)
    return [row for part in gathered for row in part]


def rows_of(batches):
    return [row for batch in batches for row in batch.tolist()]


class RankAware:
    """A sampler whose indices depend on the rank, and only its attributes may say so."""

    def __init__(self, says_so):
        if says_so:
            self.num_replicas, self.rank = dist.get_world_size(), dist.get_rank()

    def __iter__(self):
        return iter(range(dist.get_rank(), 64, dist.get_world_size()))

    def __len__(self):
        return 64 // dist.get_world_size()


class OwnFiles(IterableDataset):
    """A stream of which every rank opens its own files."""

    def __iter__(self):
        half = 32 * dist.get_rank()
        return iter(range(half, half + 32))


@pytest.mark.parametrize("kind", ["sampler that says so", "sampler", "stream"])
@distributed(world_size=2)
def test_row_4_a_rank_aware_sampler_or_stream_is_not_cut_again(kind):
    says_so = kind == "sampler that says so"
    accelerator = make_accelerator(already_sharded=None if says_so else True)
    raw = OwnFiles() if kind == "stream" else NUMBERS
    sampler = None if kind == "stream" else RankAware(says_so)
    loader = accelerator.prepare(DataLoader(raw, batch_size=5, sampler=sampler))
    rows, metrics = [], []
    for batch in loader:
        rows += batch.tolist()
        metrics += accelerator.gather_for_metrics(batch).tolist()
    assert sorted(of_all_ranks(rows)) == sorted(metrics) == NUMBERS


def ignore_warnings_of_torchdata():
    """It calls what torch deprecates, and torch counts the cores of this machine; on the ranks, not here."""
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    warnings.filterwarnings("ignore", "This DataLoader will create")


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("stateful", [True, False])
@distributed(world_size=2)
def test_row_5_a_resumed_loader_keeps_the_permutation(tmp_path, seedable, stateful):
    ignore_warnings_of_torchdata()
    options = {
        "use_seedable_sampler": seedable,
        "use_stateful_dataloader": stateful,
        "resume_mid_epoch": True,
    }

    torch.manual_seed(3)
    accelerator, loader = prepare_shuffled(**options)
    rows_of(loader)
    batches = iter(loader)
    begun = rows_of(next(batches) for _ in range(3))
    accelerator.save_state(tmp_path)
    remainder = rows_of(batches)
    assert sorted(of_all_ranks(begun + remainder)) == NUMBERS
    as_in_a_new_process()
    accelerator, loader = prepare_shuffled(**options)
    accelerator.load_state(tmp_path)
    assert rows_of(loader) == remainder


@pytest.mark.parametrize("seedable", [False, True])
@distributed(world_size=2)
def test_row_6_the_epoch_after_load_state_is_another_permutation(tmp_path, seedable):
    torch.manual_seed(3)
    accelerator, loader = prepare_shuffled(use_seedable_sampler=seedable)
    first = rows_of(loader)
    accelerator.save_state(tmp_path)
    second = rows_of(loader)
    as_in_a_new_process()
    accelerator, loader = prepare_shuffled(use_seedable_sampler=seedable)
    accelerator.load_state(tmp_path)
    assert rows_of(loader) == second != first


@pytest.mark.parametrize("seedable", [False, True])
@distributed(world_size=2)
def test_row_7_the_epoch_after_skipped_batches_is_another_permutation(tmp_path, seedable):
    torch.manual_seed(3)
    accelerator, loader = prepare_shuffled(use_seedable_sampler=seedable)
    batches = iter(loader)
    begun = rows_of(next(batches) for _ in range(3))
    accelerator.save_state(tmp_path)
    first, second = begun + rows_of(batches), rows_of(loader)
    as_in_a_new_process()
    accelerator, loader = prepare_shuffled(use_seedable_sampler=seedable)
    accelerator.load_state(tmp_path)
    assert begun + rows_of(accelerator.skip_first_batches(loader, 3)) == first
    assert rows_of(loader) == second != first


@distributed(world_size=2)
def test_row_8_what_workers_have_prefetched_is_neither_repeated_nor_lost():
    ignore_warnings_of_torchdata()

    def prepare():
        accelerator = make_accelerator(use_stateful_dataloader=True)
        return accelerator.prepare(DataLoader(NUMBERS, batch_size=2, num_workers=2))

    loader = prepare()
    batches = iter(loader)
    begun = rows_of(next(batches) for _ in range(5))
    state = loader.state_dict()
    batches.close()
    resumed = prepare()
    resumed.load_state_dict(state)
    assert sorted(of_all_ranks(begun + rows_of(resumed))) == NUMBERS


@pytest.mark.parametrize("dispatch", [None, False])
@distributed(world_size=2)
def test_row_9_a_stream_of_datasets_without_its_first_rows_can_be_read_twice(dispatch):
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"n": NUMBERS}).to_iterable_dataset().with_format("torch")
    accelerator = make_accelerator(dispatch_batches=dispatch)
    loader = accelerator.prepare(DataLoader(stream.skip(54).take(8), batch_size=2))
    for _ in range(2):
        assert sorted(of_all_ranks(rows_of(batch["n"] for batch in loader))) == list(range(54, 62))


def with_text(rows):
    return {
        "ids": torch.tensor(rows),
        "text": [f"row {row}" for row in rows],
        "even": [row % 2 == 0 for row in rows],
        "digits": [[int(digit) for digit in str(row)] for row in rows],
    }


class Stream(IterableDataset):
    """Rows, the same on every rank."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@distributed(world_size=2)
def test_row_10_dispatched_batches_may_hold_texts_flags_and_lists():
    accelerator = make_accelerator(dispatch_batches=True)
    loader = accelerator.prepare(DataLoader(Stream(NUMBERS), batch_size=4, collate_fn=with_text))
    rows = []
    for batch in loader:
        rows += batch["ids"].tolist()
        assert batch == {
            "ids": batch["ids"],
            **{k: v for k, v in with_text(batch["ids"].tolist()).items() if k != "ids"},
        }
    assert sorted(of_all_ranks(rows)) == NUMBERS


@pytest.mark.parametrize("dispatch", [None, False])
@distributed(world_size=2)
def test_row_11_a_stream_of_finished_batches_of_unequal_length_comes_once(dispatch):
    finished = [torch.arange(first, last) for first, last in ((0, 3), (3, 4), (4, 9), (9, 11), (11, 17))]
    accelerator = make_accelerator(dispatch_batches=dispatch)
    loader = accelerator.prepare(DataLoader(Stream(finished), batch_size=None))
    rows = []
    for batch in loader:
        rows += batch.tolist()[: loader.real_in_batch]
    assert sorted(of_all_ranks(rows)) == list(range(17))


@distributed(world_size=2)
def test_row_23_the_mean_over_tokens_is_that_of_one_big_batch():
    generator = torch.Generator().manual_seed(5)
    lengths = [[3, 7], [9, 1]]  # of the micro-batches of each rank
    inputs = [[torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in own] for own in lengths]
    labels = [[torch.randint(3, (n,), generator=generator) for n in own] for own in lengths]

    def make_model():
        torch.manual_seed(0)
        return torch.nn.Linear(4, 3, dtype=torch.float64)

    expected, rank = make_model(), dist.get_rank()
    flat = [torch.cat([part for own in parts for part in own]) for parts in (inputs, labels)]
    cross_entropy(expected(flat[0]), flat[1]).backward()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(make_model())
    for rows, targets in zip(inputs[rank], labels[rank], strict=True):
        with accelerator.accumulate(model):
            loss = cross_entropy(model(rows), targets, reduction="sum")
            accelerator.backward(loss, num_items=len(targets))
    torch.testing.assert_close(model.module.weight.grad, expected.weight.grad)
