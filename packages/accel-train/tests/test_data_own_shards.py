"""Iterable datasets with shards of their own give each rank its shards, and nothing else is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from accel_train.data.prepare import prepare_data_loader
from accel_train.data.shards import IterableDatasetShard

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 6


class Files(IterableDataset[int]):
    """Some files of numbers, sharded as `datasets` does it; notes which were read."""

    def __init__(self, files: list[int]) -> None:
        self.files = files
        self.read: list[int] = []

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> Files:
        size = len(self.files) // num_shards
        return Files(self.files[index * size : (index + 1) * size])

    def __iter__(self) -> Iterator[int]:
        for file in self.files:
            self.read.append(file)
            yield from range(file * SIZE, (file + 1) * SIZE)


class OlderFiles(Files):
    """The same under the name that older versions of `datasets` have."""

    num_shards = property(doc="Absent.")  # type: ignore[assignment]

    @property
    def n_shards(self) -> int:
        return len(self.files)


def prepared(rank: int, files: int, *, kind: type[Files] = Files, ranks: int = 2, **options: Any) -> Any:
    loader = DataLoader(kind(list(range(files))), batch_size=2)
    return prepare_data_loader(loader, num_processes=ranks, process_index=rank, **options)


@pytest.mark.parametrize("kind", [Files, OlderFiles])
def test_every_rank_reads_its_own_shards(kind: type[Files]) -> None:
    seen: list[int] = []
    for rank in (0, 1):
        loader = prepared(rank, 4, kind=kind)
        rows = [number for batch in loader for number in batch.tolist()]
        assert loader.dataset.read == [2 * rank, 2 * rank + 1]
        assert loader.end_of_dataloader is False or len(rows) == 2 * SIZE
        seen += rows
    assert sorted(seen) == list(range(4 * SIZE))  # what one process gets


@pytest.mark.parametrize(("files", "options"), [(3, {}), (1, {}), (4, {"split_batches": True})])
def test_others_are_read_by_every_rank(files: int, options: dict[str, Any]) -> None:
    seen: list[int] = []
    for rank in (0, 1):
        loader = prepared(rank, files, **options)
        assert isinstance(loader.dataset, IterableDatasetShard)
        for batch in loader:
            seen += batch.tolist()[: loader.real_in_batch]
    assert sorted(seen) == list(range(files * SIZE))


def test_a_position_goes_on_under_as_many_ranks_and_is_refused_under_others() -> None:
    loader = prepared(1, 4)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(4)][-1] == [18, 19]
    state = loader.state_dict()
    again = prepared(1, 4)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == [[20, 21], [22, 23]]
    with pytest.raises(ValueError, match=r"counts 'stream, 1 of 2 parts', but this loader counts 'stream'"):
        prepared(0, 4, ranks=1).load_state_dict(state)
    whole = prepared(0, 4, ranks=1)
    whole.load_epoch(state)
    assert len(list(whole)) == 4 * SIZE // 2
