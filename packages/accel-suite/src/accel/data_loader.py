"""Data loaders that give each process its share.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_train.data.adapter import DataLoaderAdapter
    from accel_train.data.batch_shard import BatchSamplerShard
    from accel_train.data.dispatcher import DataLoaderDispatcher
    from accel_train.data.iterable_shard import IterableDatasetShard
    from accel_train.data.loader import DataLoaderShard
    from accel_train.data.prepare import get_sampler, prepare_data_loader
    from accel_train.data.prepared import DataLoaderStateMixin
    from accel_train.data.samplers import SeedableRandomSampler
    from accel_train.data.skip import SkipBatchSampler, SkipDataLoader, skip_first_batches

__all__ = [
    "BatchSamplerShard", "DataLoaderAdapter", "DataLoaderDispatcher", "DataLoaderShard",
    "DataLoaderStateMixin", "IterableDatasetShard", "SeedableRandomSampler", "SkipBatchSampler",
    "SkipDataLoader", "get_sampler", "prepare_data_loader", "skip_first_batches",
]

_EXPORTS = {
    **dict.fromkeys(("DataLoaderAdapter",), "accel_train.data.adapter"),
    **dict.fromkeys(("BatchSamplerShard",), "accel_train.data.batch_shard"),
    **dict.fromkeys(("DataLoaderDispatcher",), "accel_train.data.dispatcher"),
    **dict.fromkeys(("IterableDatasetShard",), "accel_train.data.iterable_shard"),
    **dict.fromkeys(("DataLoaderShard",), "accel_train.data.loader"),
    **dict.fromkeys(("get_sampler", "prepare_data_loader"), "accel_train.data.prepare"),
    **dict.fromkeys(("DataLoaderStateMixin",), "accel_train.data.prepared"),
    **dict.fromkeys(("SeedableRandomSampler",), "accel_train.data.samplers"),
    **dict.fromkeys(("SkipBatchSampler", "SkipDataLoader", "skip_first_batches"), "accel_train.data.skip"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
