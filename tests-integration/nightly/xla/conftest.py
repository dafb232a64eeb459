"""Tests of XLA devices: tools/check_xla.py runs them in the environment that has torch_xla."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("torch_xla") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of several processes where there is no TPU."""
    if os.environ.get("PJRT_DEVICE") == "TPU":
        return
    why = "several processes need a TPU: PJRT's CPU client refuses them, or hangs"
    for item in items:
        if item.get_closest_marker("tpu"):
            item.add_marker(pytest.mark.skip(reason=why))
