"""Over an epoch, `gather_for_metrics` brings every sample exactly once, on every rank."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from accel_plugins.kwargs import DataLoaderConfiguration
from accel_state.errors import DistributedOperationException
from accel_train import Accelerator
from harness import distributed


class Ids(Dataset):
    """Sample `i` is its own id, and a name for it."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"id": torch.tensor(index), "row": torch.full((2,), index), "name": f"sample {index}"}


class Stream(IterableDataset):
    """The same without a length."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(Ids(self.size)[index] for index in range(self.size))


class Blocks(IterableDataset):
    """Whole batches of many sizes, which no sampler has planned."""

    def __init__(self, sizes=(4, 1, 3, 2)):
        self.sizes = sizes

    def __iter__(self):
        return iter(torch.arange(sum(self.sizes)).split(self.sizes))


class Uneven(BatchSampler):
    """Batches of many sizes, and no `batch_size`."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __iter__(self):
        return iter([part.tolist() for part in torch.arange(sum(self.sizes)).split(self.sizes)])


LOADERS = {
    "map-style": lambda size, batch: DataLoader(Ids(size), batch_size=batch),
    "shuffled": lambda size, batch: DataLoader(Ids(size), batch_size=batch, shuffle=True),
    "batch sampler": lambda size, batch: DataLoader(
        Ids(size), batch_sampler=BatchSampler(RandomSampler(Ids(size)), batch, drop_last=False)
    ),
    "iterable": lambda size, batch: DataLoader(Stream(size), batch_size=batch),
    "workers": lambda size, batch: DataLoader(Ids(size), batch_size=batch, num_workers=1),
    "iterable, workers": lambda size, batch: DataLoader(Stream(size), batch_size=batch, num_workers=1),
}
WAYS = {
    "default": {},
    "dispatched": {"dispatch_batches": True},
    "sharded": {"dispatch_batches": False},
    "uneven": {"even_batches": False},
    "split": {"split_batches": True},
    "split, dispatched": {"split_batches": True, "dispatch_batches": True},
}


def collected(loader, accelerator):
    ids, rows, names, objects = [], [], [], []
    for batch in loader:
        together = accelerator.gather_for_metrics({"id": batch["id"], "row": batch["row"]})
        ids += together["id"].tolist()
        rows += together["row"][:, 1].tolist()
        names += accelerator.gather_for_metrics(batch["name"])
        objects += accelerator.gather_for_metrics(list(batch["id"].unbind()), use_gather_object=True)
    return ids, rows, names, [int(one) for one in objects]


def check_once(kind, way, size, batch):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**WAYS[way]))
    loader = accelerator.prepare(LOADERS[kind](size, batch))
    for _ in range(2):
        ids, rows, names, objects = collected(loader, accelerator)
        assert Counter(ids) == Counter(range(size))
        assert rows == ids == objects
        assert names == [f"sample {one}" for one in ids]


def sizes(way, batch, world_size):
    """Whole rounds; one sample over; one missing; a last batch that leaves ranks empty; next to nothing."""
    rows = batch * world_size
    if way == "uneven":  # ranks with different numbers of batches cannot gather every batch
        return [2 * rows, 2 * rows - 1]
    return sorted({2 * rows, 2 * rows + 1, 2 * rows - 1, rows + batch, 1, world_size - 1})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [kind for kind in LOADERS if "workers" not in kind])
@distributed(world_size=2)
def test_every_sample_comes_exactly_once_on_two_ranks(kind, way):
    for size in sizes(way, 4, 2):
        check_once(kind, way, size, 4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "kind",
    [
        "iterable",
        *(
            pytest.param(kind, marks=pytest.mark.thorough)
            for kind in ("map-style", "shuffled", "batch sampler")
        ),
    ],
)
@distributed(world_size=4)
def test_every_sample_comes_exactly_once_on_four_ranks(kind, way):
    for size in sizes(way, 4, 4):
        check_once(kind, way, size, 4)


@pytest.mark.parametrize("way", ["default", "dispatched", "sharded"])
@pytest.mark.parametrize("kind", [kind for kind in LOADERS if "workers" in kind])
@distributed(world_size=2)
def test_every_sample_comes_exactly_once_from_worker_processes(kind, way):
    check_once(kind, way, 11, 4)


@distributed(world_size=3)
def test_every_sample_comes_exactly_once_on_three_ranks():
    for size in sizes("default", 2, 3):
        check_once("map-style", "default", size, 2)
        check_once("iterable", "sharded", size, 2)


def evaluate_losses(accelerator, loader):
    losses = []
    for batch in loader:
        values = accelerator.gather_for_metrics({"loss": batch["id"].float().mean(), "id": batch["id"]})
        losses.append(values["loss"])
        yield values["id"]
    assert all(loss.shape == (dist.get_world_size(),) for loss in losses)


@distributed(world_size=2)
def test_a_number_per_rank_is_gathered_as_it_is():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Ids(9), batch_size=4))
    assert torch.cat(list(evaluate_losses(accelerator, loader))).sort().values.tolist() == list(range(9))


@pytest.mark.parametrize("size", [9, 13], ids=["padding on both ranks", "padding on rank 1"])
@pytest.mark.parametrize("as_objects", [False, True])
@distributed(world_size=2)
def test_of_an_incomplete_last_batch_no_more_rows_than_samples_are_kept(as_objects, size):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Ids(size), batch_size=4))
    found = []
    for batch in loader:
        repeated = batch["id"][:1].repeat(4 * 3)
        data = repeated.tolist() if as_objects else repeated
        found.append(len(accelerator.gather_for_metrics(data)))
    assert found == [24, size - 8]


@pytest.mark.parametrize(("size", "last"), [(9, [0]), (14, [0, 0, 0, 1, 1, 1])], ids=["of rank 0", "of both"])
@pytest.mark.parametrize("as_objects", [False, True])
@distributed(world_size=2)
def test_other_rows_than_those_of_the_batch_are_cut_after_they_were_gathered(as_objects, size, last):
    """As in Accelerate: `transformers.Trainer` repeats the loss of a batch, and weighs it so."""
    accelerator = Accelerator(cpu=True)
    found = []
    for _ in accelerator.prepare(DataLoader(Ids(size), batch_size=4)):
        ranks = torch.full((3,), accelerator.process_index)
        gathered = accelerator.gather_for_metrics(ranks.tolist() if as_objects else ranks)
        found.append(gathered if as_objects else gathered.tolist())
    assert found[-1] == last


@distributed(world_size=2)
def test_an_object_that_is_no_list_cannot_be_trimmed_on_any_rank():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Ids(13), batch_size=4))
    outcomes = []
    for _ in loader:
        try:
            outcomes.append(accelerator.gather_for_metrics({"text": "a"}, use_gather_object=True))
        except (ValueError, DistributedOperationException) as error:
            outcomes.append(str(error))
    assert outcomes[0] == [{"text": "a"}] * 2, "there is no padding in the first batch"
    assert "ends in padding" in outcomes[1]
    assert accelerator.gather(torch.ones(1)).tolist() == [1, 1], "the ranks are still in step"


@distributed(world_size=2)
def test_outside_of_a_loader_it_gathers_everything():
    accelerator = Accelerator(cpu=True)
    list(accelerator.prepare(DataLoader(Ids(3), batch_size=4)))
    assert accelerator.gather_for_metrics(torch.arange(2)).tolist() == [0, 1, 0, 1]
    assert accelerator.gather_for_metrics(["a"]) == ["a", "a"]


@distributed(world_size=2)
def test_the_innermost_loader_counts():
    accelerator = Accelerator(cpu=True)
    outer = accelerator.prepare(DataLoader(Ids(8), batch_size=2))
    inner = accelerator.prepare(DataLoader(Ids(5), batch_size=2))
    for _ in outer:
        found = [one for batch in inner for one in accelerator.gather_for_metrics(batch["id"]).tolist()]
        assert sorted(found) == list(range(5))


@pytest.mark.parametrize("sizes", [(4, 1, 3, 2), (4, 4, 4, 3), (2, 5, 3)], ids=str)
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("dispatched", [True, False])
@distributed(world_size=2)
def test_whole_batches_of_many_sizes_are_sharded_and_gathered_once(dispatched, even, sizes):
    config = DataLoaderConfiguration(dispatch_batches=dispatched, even_batches=even)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    # A rank with fewer batches gathers nothing for the others' last ones.
    for loader in (
        DataLoader(Blocks(sizes), batch_size=None),
        DataLoader(range(sum(sizes)), batch_sampler=Uneven(sizes)),
    ):
        ids = []
        batches = iter(accelerator.prepare(loader))
        for _ in range(-(-len(sizes) // 2)):
            batch = next(batches, torch.empty(0, dtype=torch.int64))
            ids += accelerator.gather_for_metrics(batch).tolist()
        assert next(batches, None) is None
        assert sorted(ids) == list(range(sum(sizes)))


def with_weights_of_classes(samples):
    return {"weights": torch.ones(99), "id": torch.stack([sample["id"] for sample in samples])}


@pytest.mark.parametrize("kind", [Ids, Stream])
@distributed(world_size=2)
def test_a_batch_may_hold_tensors_of_any_length(kind):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    loader = accelerator.prepare(DataLoader(kind(7), batch_size=2, collate_fn=with_weights_of_classes))
    ids = [one for batch in loader for one in accelerator.gather_for_metrics(batch["id"]).tolist()]
    assert sorted(ids) == list(range(7))


@distributed(world_size=2)
def test_the_padding_of_a_stateful_loader_is_not_gathered():
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    for size in range(1, 10):
        loader = accelerator.prepare(DataLoader(Ids(size), batch_size=2))
        assert [*map(sorted, collected(loader, accelerator)[:2])] == [[*range(size)]] * 2
