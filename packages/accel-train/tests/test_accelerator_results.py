"""What is cut off before results are gathered."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from accel_train import Accelerator
from accel_train.accelerator.metrics import trim_objects


def test_any_number_of_objects_is_cut_to_the_real_samples():
    assert trim_objects(["a", "b"], real=0) == []
    assert [len(trim_objects(["a"] * rows, real=3)) for rows in (2, 3, 6)] == [2, 3, 3]


@pytest.mark.parametrize("data", ["text", {"a": 1}, 3])
def test_objects_that_are_no_list_cannot_be_trimmed(data):
    with pytest.raises(ValueError, match="Pass a list with one object per sample"):
        trim_objects(data, real=1)


def test_tuples_of_objects_are_cut_too():
    assert trim_objects(("a", "b"), real=1) == ("a",)


@pytest.mark.parametrize("as_objects", [False, True])
def test_whatever_rows_a_tensor_has_the_last_batch_gives_as_many_as_it_has_samples(as_objects):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(list(range(5)), batch_size=2))
    gathered = [
        accelerator.gather_for_metrics(torch.cat([batch, batch]), use_gather_object=as_objects).tolist()
        for batch in loader
    ]
    assert gathered == [[0, 1, 0, 1], [2, 3, 2, 3], [4]]


@pytest.mark.parametrize("as_objects", [False, True])
def test_rows_of_a_batch_with_two_for_each_sample_are_cut_to_its_samples(as_objects):
    """As in Accelerate: `transformers.Trainer` weighs the losses of such batches, of preferences, by it."""
    loader = torch.utils.data.DataLoader(
        range(7), batch_size=4, collate_fn=lambda rows: torch.tensor(rows * 2)
    )
    accelerator = Accelerator(cpu=True)
    gathered = [
        len(accelerator.gather_for_metrics(batch.clone(), use_gather_object=as_objects))
        for batch in accelerator.prepare(loader)
    ]
    assert gathered == [8, 3]


def test_nested_tensors_keep_the_rows_of_real_samples_and_numbers_stay():
    loader = torch.utils.data.DataLoader(
        range(7), batch_size=4, collate_fn=lambda rows: torch.tensor(rows * 2)
    )
    accelerator = Accelerator(cpu=True)
    for batch in accelerator.prepare(loader):
        data = {"a": batch, "b": (batch[:, None], [torch.ones(4, 2)]), "loss": torch.tensor(3.0)}
        found = accelerator.gather_for_metrics(data)
    assert found["a"].tolist() == [4, 5, 6]
    assert found["b"][0].shape == (3, 1)
    assert found["b"][1][0].shape == (3, 2)
    assert found["loss"].item() == 3


class Named(NamedTuple):
    ids: torch.Tensor
    texts: list[str]


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: Named(rows, ["x"] * len(rows)),
        lambda rows: (rows, "s"),
        lambda rows: [rows, ["x"] * len(rows)],
        lambda rows: (["a"] * len(rows), rows.tolist()),
    ],
)
def test_fields_of_one_process_come_as_they_are_also_of_a_shorter_last_batch(make):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(list(range(3)), batch_size=2))
    for batch in loader:
        data = make(batch)
        assert accelerator.gather_for_metrics(data) is data


def test_fields_are_not_cut_as_if_they_were_samples():
    with pytest.raises(ValueError, match="Pass a list with one object per sample"):
        trim_objects((["a", "b"], [1, 2]), real=1)
