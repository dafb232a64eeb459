"""The private names of torch are there."""

from __future__ import annotations

import pytest

from accel_state import torch_private


@pytest.mark.parametrize("name", sorted(torch_private.NAMES))
def test_every_name_is_in_this_torch(name: str) -> None:
    assert getattr(torch_private, name) is not None


def test_a_name_that_is_not_in_the_table_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'tree_walk'"):
        _ = torch_private.tree_walk
