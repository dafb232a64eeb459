"""Ignore warnings of megatron-core about its own defaults, which users of accel cannot change."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def without_core_warnings() -> Generator[None]:
    """Ignore warnings that modules of megatron-core raise within the block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="megatron")
        yield
