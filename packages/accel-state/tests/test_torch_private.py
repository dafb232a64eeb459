"""The private names of torch are there."""

from __future__ import annotations

import pytest
import torch

from accel_state import torch_private


@pytest.mark.parametrize("name", sorted(torch_private.NAMES))
def test_every_name_is_in_this_torch(name: str) -> None:
    assert getattr(torch_private, name) is not None


def test_a_name_that_is_not_in_the_table_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'tree_walk'"):
        _ = torch_private.tree_walk


def test_tensors_cut_within_the_guard_have_versions_of_their_own() -> None:
    with torch_private.not_views():
        first, second = torch.zeros(4).split(2)
    first.add_(1)
    assert (first._version, second._version) == (1, 0)
