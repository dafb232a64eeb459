"""A world of several ranks inside one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from accel_state.testing import ThreadRanks

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def world() -> Callable[..., ThreadRanks]:
    """Make a world: `world(2).run(body)` calls `body(rank)` on two ranks."""
    return lambda size, **options: ThreadRanks(size=size, **options)
