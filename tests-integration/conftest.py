"""What all integration tests share: pools of ranks end with the session, nothing leaks from a test."""

from __future__ import annotations

from harness import close_all
from shared_test_rules import (
    leaves_nothing_behind,
    one_thread,
    pytest_collection_finish,
    pytest_collection_modifyitems,
)

__all__ = [
    "leaves_nothing_behind",
    "one_thread",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
]


def pytest_sessionfinish() -> None:
    """End the ranks."""
    close_all()
