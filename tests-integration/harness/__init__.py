"""Run a test's body on every rank of a process group that is kept alive between tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from harness.pool import close_all, distributed, trim_pools

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["cases", "chosen_params", "close_all", "distributed", "trim_pools"]


def cases(names: Iterable[str], *, always: set[str]) -> list[Any]:
    """The parameters of a test, of which some run always and the others with `tools/check.py --all`."""
    found = [*names]
    assert always <= {*found}, f"unknown: {always - {*found}}"
    return [pytest.param(name, marks=[] if name in always else [pytest.mark.thorough]) for name in found]


def chosen_params(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The parameters of the chosen tests of a file, for a fixture that runs all of them."""
    return [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
