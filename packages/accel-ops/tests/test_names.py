"""Names of objects and of their parts."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from accel_ops.modules import (
    get_module_children_bottom_up,
    get_pretty_name,
    is_peft_model,
    merge_dicts,
    recursive_getattr,
)


def test_children_come_before_parents_and_shared_ones_twice():
    shared = nn.Linear(1, 1)
    inner = nn.Sequential(shared)
    model = nn.Sequential(shared, inner)
    named = get_module_children_bottom_up(model, return_fqns=True)
    assert named == [("0", shared), ("1.0", shared), ("1", inner), ("", model)]
    assert get_module_children_bottom_up(model) == [shared, shared, inner, model]
    assert all(model.get_submodule(name) is module for name, module in named)


@pytest.mark.parametrize(
    ("thing", "name"),
    [
        (nn.Linear, "Linear"),
        (nn.Sequential(), "Sequential"),
        (nn.Identity().forward, "Identity.forward"),
        (functools.partial(print), "partial"),
    ],
)
def test_things_are_called_by_their_own_name_or_their_class(thing: object, name: str) -> None:
    assert get_pretty_name(thing) == name


def test_merging_goes_as_deep_as_both_are_mappings():
    destination = {"a": {"x": 1, "y": {"z": 1}}, "b": 2, "c": {"d": 1}}
    source = {"a": {"y": {"w": 2}}, "b": {"new": 1}, "c": 5}
    merged = merge_dicts(source, destination)
    assert merged is destination
    assert merged == {"a": {"x": 1, "y": {"z": 1, "w": 2}}, "b": {"new": 1}, "c": 5}
    assert source == {"a": {"y": {"w": 2}}, "b": {"new": 1}, "c": 5}


def test_a_missing_part_is_an_error():
    with pytest.raises(AttributeError, match="nothing"):
        recursive_getattr(nn.Sequential(nn.Linear(1, 1)), "0.nothing")


def test_a_plain_model_is_not_of_peft():
    assert not is_peft_model(torch.nn.DataParallel(nn.Linear(1, 1)))
