"""Run a test's body on every rank of a process group that is kept alive between tests."""

from __future__ import annotations

from harness.pool import close_all, distributed, trim_pools

__all__ = ["close_all", "distributed", "trim_pools"]
