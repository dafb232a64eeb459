"""With torchdata, the state of an iterable dataset is kept, and nothing is read in vain."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from accel_train.data.prepare import prepare_data_loader

if TYPE_CHECKING:
    from collections.abc import Iterator

# torchdata calls what newer versions of torch deprecate.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]
stateful = pytest.importorskip("torchdata.stateful_dataloader")


class Counting(IterableDataset[int]):
    """Numbers; it knows where it is, and counts what was read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.position = 0
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < self.size:
            self.position += 1
            self.read += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def prepare(**options: Any) -> Any:
    return prepare_data_loader(
        DataLoader(Counting(13), batch_size=2, **options), use_stateful_dataloader=True
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_left_and_the_next_pass_come_as_without_the_break(workers: int) -> None:
    loader = prepare(num_workers=workers)
    assert isinstance(loader.base_dataloader, stateful.StatefulDataLoader)
    batches = iter(loader)
    assert len(list(islice(batches, 3))) == 3
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    again = prepare(num_workers=workers)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == rest
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in loader]


def test_a_dataset_with_a_state_is_not_read_from_its_beginning() -> None:
    loader = prepare()
    batches = iter(loader)
    list(islice(batches, 5))
    again = prepare()
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [[10, 11], [12]]
    assert again.dataset.read == 3


def test_the_state_is_that_of_the_batch_at_hand_not_of_the_one_read_ahead() -> None:
    loader = prepare()
    for number, _ in enumerate(loader):
        again = prepare()
        again.load_state_dict(loader.state_dict())
        assert len(list(again)) == 6 - number
        loader.adjust_state_dict_for_prefetch()


def test_the_end_of_a_stateful_loader_is_known() -> None:
    loader = prepare()
    for _ in range(2):
        assert [loader.end_of_dataloader for _ in loader] == [False] * 6 + [True]


def test_a_stateful_loader_stays_one_and_its_own_state_is_taken() -> None:
    raw = stateful.StatefulDataLoader(Counting(13), batch_size=2)
    next(iter(raw))
    batches = iter(raw)
    next(batches)
    prepared = prepare_data_loader(raw)
    assert prepared.use_stateful_dataloader
    prepared.load_state_dict(raw.state_dict())
    expected = [batch.tolist() for batch in batches]
    assert [batch.tolist() for batch in prepared] == expected


def test_map_style_positions_hold_for_any_number_of_ranks() -> None:
    loader = DataLoader(list(range(13)), batch_size=2)
    one = prepare_data_loader(loader, use_stateful_dataloader=True)
    batches = iter(one)
    seen = next(batches).tolist()
    for rank in (0, 1):
        other = prepare_data_loader(loader, num_processes=2, process_index=rank, use_stateful_dataloader=True)
        other.load_state_dict(one.state_dict())
        for batch in other:
            seen += batch.tolist()[: other.real_in_batch]
    assert sorted(seen) == list(range(13))


def test_the_state_of_a_stream_belongs_to_its_number_of_processes() -> None:
    loader = prepare()
    next(iter(loader))
    batches = iter(loader)
    next(batches)
    divided = prepare_data_loader(
        DataLoader(Counting(13), batch_size=2), num_processes=2, process_index=0, use_stateful_dataloader=True
    )
    with pytest.raises(ValueError, match="one of 1 process"):
        divided.load_state_dict(loader.state_dict())
