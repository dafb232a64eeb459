"""Changing for a while whether prepared loaders fill up their last batches."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accel_train.data.batch_shard import BatchSamplerShard, EpochRest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

logger = logging.getLogger(__name__)


@contextmanager
def evenness(loaders: Iterable[Any], even_batches: bool | None) -> Generator[None]:
    """Give loaders another `even_batches` until the context ends.

    Args:
        loaders: Prepared loaders. Those of iterable datasets, and those that the main process reads for all,
            always yield equally many batches: a warning says so.
        even_batches: The value; `None` leaves all as they are.
    """
    shards: list[BatchSamplerShard] = []
    if even_batches is not None:
        for loader in loaders:
            if (shard := _shard_of(loader)) is None:
                logger.warning(
                    "even_batches=%r does not apply to %s: only loaders of map-style datasets, read by every "
                    "process, can be uneven.",
                    even_batches,
                    type(loader).__name__,
                )
            else:
                shards.append(shard)
    before = [shard.even_batches for shard in shards]
    try:
        for shard in shards:
            shard.even_batches = bool(even_batches)
        yield
    finally:
        for shard, value in zip(shards, before, strict=True):
            shard.even_batches = value


def _shard_of(loader: Any) -> BatchSamplerShard | None:
    part = loader.batch_sampler
    while isinstance(part, EpochRest):
        part = part.batch_sampler
    return part if isinstance(part, BatchSamplerShard) else None
