"""Override `even_batches` of prepared loaders within a context."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

logger = logging.getLogger(__name__)


@contextmanager
def override_even_batches(loaders: Iterable[Any], even_batches: bool | None) -> Generator[None]:
    """Give loaders another `even_batches` until the context ends.

    Args:
        loaders: Prepared loaders. For one whose data is sharded elsewhere a warning says that this has no
            effect.
        even_batches: The value; `None` leaves all as they are.
    """
    sharders: list[Any] = []
    if even_batches is not None:
        for loader in loaders:
            if (sharder := loader.sharder) is None:
                logger.warning(
                    "even_batches=%r has no effect on %s: nothing shards its data across the processes.",
                    even_batches,
                    type(loader).__name__,
                )
            else:
                sharders.append(sharder)
    before = [sharder.even_batches for sharder in sharders]
    try:
        for sharder in sharders:
            sharder.even_batches = bool(even_batches)
        yield
    finally:
        for sharder, value in zip(sharders, before, strict=True):
            sharder.even_batches = value
