# fmt: off
from accel_train.data.adapter import DataLoaderAdapter as DataLoaderAdapter
from accel_train.data.batch_shard import BatchSamplerShard as BatchSamplerShard
from accel_train.data.dispatcher import DataLoaderDispatcher as DataLoaderDispatcher
from accel_train.data.iterable_shard import IterableDatasetShard as IterableDatasetShard
from accel_train.data.loader import DataLoaderShard as DataLoaderShard
from accel_train.data.prepare import get_sampler as get_sampler, prepare_data_loader as prepare_data_loader
from accel_train.data.prepared import DataLoaderStateMixin as DataLoaderStateMixin
from accel_train.data.samplers import SeedableRandomSampler as SeedableRandomSampler
from accel_train.data.skip import (
    SkipBatchSampler as SkipBatchSampler, SkipDataLoader as SkipDataLoader,
    skip_first_batches as skip_first_batches,
)
