# fmt: off
from accel_train.data.adapter import (
    DataLoaderAdapter as DataLoaderAdapter, DataLoaderShard as DataLoaderShard,
    DataLoaderStateMixin as DataLoaderStateMixin,
)
from accel_train.data.dispatcher import DataLoaderDispatcher as DataLoaderDispatcher
from accel_train.data.prepare import (
    SkipDataLoader as SkipDataLoader, get_sampler as get_sampler,
    prepare_data_loader as prepare_data_loader, skip_first_batches as skip_first_batches,
)
from accel_train.data.samplers import SeedableRandomSampler as SeedableRandomSampler
from accel_train.data.shards import (
    BatchSamplerShard as BatchSamplerShard, IterableDatasetShard as IterableDatasetShard,
    SkipBatchSampler as SkipBatchSampler,
)
