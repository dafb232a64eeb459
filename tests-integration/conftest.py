"""What all integration tests share: pools of ranks end with the session, nothing leaks from a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness import close_all, trim_pools
from shared_test_rules import (
    leaves_nothing_behind,
    one_thread,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    simulated,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "leaves_nothing_behind",
    "one_thread",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "simulated",
]


@pytest.fixture(autouse=True, scope="module")
def few_idle_threads() -> Iterator[None]:
    """After the tests of a file, end the ranks whose many threads would keep a core busy while they wait."""
    yield
    trim_pools()


def pytest_sessionfinish() -> None:
    """End the ranks."""
    close_all()
