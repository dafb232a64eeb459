from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_ops import (
    CannotPadNestedTensorWarning,
    DistributedOperationException,
    pad_across_processes,
    pad_input_tensors,
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=3),
    dim=st.sampled_from([0, 1, -1, -2]),
    first=st.booleans(),
)
def test_padding_equals_plain_torch(world, sizes, dim: int, first: bool) -> None:
    data = [torch.arange(1, 1 + rows * columns).view(rows, columns) for rows, columns in sizes]
    longest = max(part.shape[dim] for part in data)
    ranks = world(len(sizes))
    found = ranks.run(
        lambda rank: pad_across_processes([data[rank]], dim=dim, pad_index=-7, pad_first=first)[0]
    )
    assert len(ranks.messages) == 1
    for mine, padded in zip(data, found, strict=True):
        missing = longest - mine.shape[dim]
        shape = list(mine.shape)
        shape[dim] = missing
        parts = [mine, torch.full(shape, -7)]
        assert torch.equal(padded, torch.cat(parts[::-1] if first else parts, dim=dim))


def test_every_leaf_is_padded_to_its_own_size_in_one_message(world) -> None:
    ranks = world(2)

    def body(rank: int):
        data = {
            "a": torch.ones(1 + rank),
            "b": (torch.ones(3 - rank, 2, dtype=torch.bool), torch.tensor(rank)),
        }
        return pad_across_processes(data if rank else dict(reversed(data.items())))

    for rank, found in enumerate(ranks.run(body)):
        assert found["a"].tolist() == [1, rank]
        assert found["b"][0].dtype == torch.bool
        assert found["b"][0].tolist() == [[True] * 2, [True] * 2, [not rank] * 2]
        assert found["b"][1].item() == rank
    assert ranks.messages == ["all_gather_object"]


def test_tensors_without_the_dimension_and_long_enough_ones_are_returned_as_they_are(world) -> None:
    def body(rank: int):
        data = [torch.ones(2), torch.tensor(1.0), torch.ones(2, 3 - rank)]
        found = pad_across_processes(data, dim=1)
        return [new is old for new, old in zip(found, data, strict=True)]

    assert world(2).run(body) == [[True, True, True], [True, True, False]]


def test_nothing_is_exchanged_if_no_tensor_has_the_dimension(world) -> None:
    ranks = world(2)
    data = {"labels": torch.ones(2), "loss": torch.tensor(1.0)}
    found = ranks.run(lambda rank: pad_across_processes(data, dim=1) is data)
    assert (found, ranks.messages) == ([True, True], [])


def test_a_process_alone_gets_what_it_gives_but_only_tensors() -> None:
    data = [torch.ones(2)]
    assert pad_across_processes(data) is data
    with pytest.raises(TypeError, match=r"data\['x'\].*pad_across_processes"):
        pad_across_processes({"x": "text"})


@pytest.mark.parametrize(
    "other",
    [[torch.ones(1, 1)], [torch.ones(1)] * 2, {"x": torch.ones(1)}, [torch.ones(1, dtype=torch.bfloat16)]],
)
def test_structures_that_differ_are_an_error_on_every_rank(world, other) -> None:
    def body(rank: int) -> None:
        with pytest.raises(
            DistributedOperationException, match=r"(?s)the same operation on data.*pad_across_processes"
        ):
            pad_across_processes(other if rank else [torch.ones(1)])

    assert world(2).run(body) == [None, None]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_stays_with_a_warning(world, layout, world_size) -> None:
    def body(rank: int):
        nested = torch.nested.nested_tensor([torch.ones(1 + rank), torch.ones(2)], layout=layout)
        found = pad_across_processes({"nested": nested, "plain": torch.ones(1 + rank)})
        return found["nested"] is nested, len(found["plain"])

    with pytest.warns(CannotPadNestedTensorWarning) as warned:
        found = world(world_size).run(body)
    assert found == [(True, world_size)] * world_size
    assert sum(warning.category is CannotPadNestedTensorWarning for warning in warned) == world_size


@pytest.mark.parametrize(
    ("size", "processes"), [(5, 2), (5, 4), (3, 4), (1, 4), (8, 4), (7, 4), (63, 4), (6, 2)]
)
def test_a_batch_is_padded_to_a_multiple_with_its_last_row(size: int, processes: int) -> None:
    tensor = torch.arange(2 * size).view(size, 2)
    found = pad_input_tensors({"x": tensor, "y": tensor.t(), "scalar": torch.tensor(3)}, size, processes)
    padded = found["x"]
    assert len(padded) % processes == 0
    assert 0 <= len(padded) - size < processes
    assert torch.equal(padded[:size], tensor)
    assert all(torch.equal(row, tensor[-1]) for row in padded[size:])
    assert found["scalar"].item() == 3
    again = pad_input_tensors(tensor.t(), size, processes, dim=1)
    assert torch.equal(again.t(), padded)


def test_a_batch_of_nothing_cannot_repeat_its_last_row() -> None:
    with pytest.raises(ValueError, match="no row to repeat"):
        pad_input_tensors(torch.ones(0, 2), batch_size=3, num_processes=2)
    with pytest.raises(TypeError, match="str"):
        pad_input_tensors(["text"], batch_size=3, num_processes=2)
