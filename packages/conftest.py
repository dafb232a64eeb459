# ruff: noqa: INP001 - packages/ is a folder, not a package
"""What the unit tests of all packages share."""

from __future__ import annotations

from shared_test_rules import leaves_nothing_behind, one_thread, pytest_collection_modifyitems

__all__ = ["leaves_nothing_behind", "one_thread", "pytest_collection_modifyitems"]

# A `sitecustomize` acts when it is imported.
collect_ignore_glob = ["accel-compat/src/accel_compat/startup/*"]
