"""Training: `Accelerator`, its data loaders, optimizer and scheduler wrappers. This is the export table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_train.accelerator import Accelerator as Accelerator
    from accel_train.checkpoint.layout import OPTIMIZER_NAME as OPTIMIZER_NAME
    from accel_train.checkpoint.layout import RNG_STATE_NAME as RNG_STATE_NAME
    from accel_train.checkpoint.layout import SAMPLER_NAME as SAMPLER_NAME
    from accel_train.checkpoint.layout import SCALER_NAME as SCALER_NAME
    from accel_train.checkpoint.layout import SCHEDULER_NAME as SCHEDULER_NAME
    from accel_train.checkpoint.objects import load_accelerator_state as load_accelerator_state
    from accel_train.checkpoint.objects import load_custom_state as load_custom_state
    from accel_train.checkpoint.objects import save_accelerator_state as save_accelerator_state
    from accel_train.checkpoint.objects import save_custom_state as save_custom_state
    from accel_train.checkpoint.writer import Saving as Saving
    from accel_train.data.adapter import DataLoaderAdapter as DataLoaderAdapter
    from accel_train.data.batch_shard import BatchSamplerShard as BatchSamplerShard
    from accel_train.data.dispatcher import DataLoaderDispatcher as DataLoaderDispatcher
    from accel_train.data.iterable_shard import IterableDatasetShard as IterableDatasetShard
    from accel_train.data.iterable_shard import SeekableDataset as SeekableDataset
    from accel_train.data.loader import DataLoaderShard as DataLoaderShard
    from accel_train.data.prepare import get_sampler as get_sampler
    from accel_train.data.prepare import prepare_data_loader as prepare_data_loader
    from accel_train.data.prepared import DataLoaderStateMixin as DataLoaderStateMixin
    from accel_train.data.samplers import SeedableRandomSampler as SeedableRandomSampler
    from accel_train.data.scatter import MainProcessReadError as MainProcessReadError
    from accel_train.data.skip import SkipBatchSampler as SkipBatchSampler
    from accel_train.data.skip import SkipDataLoader as SkipDataLoader
    from accel_train.data.skip import skip_first_batches as skip_first_batches
    from accel_train.forking import WorkerFailedError as WorkerFailedError
    from accel_train.launchers import PrepareForLaunch as PrepareForLaunch
    from accel_train.launchers import debug_launcher as debug_launcher
    from accel_train.launchers import notebook_launcher as notebook_launcher
    from accel_train.launching import launch as launch
    from accel_train.local_sgd import LocalSGD as LocalSGD
    from accel_train.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
    from accel_train.optimizer import move_to_device as move_to_device
    from accel_train.scheduler import AcceleratedScheduler as AcceleratedScheduler

__all__ = [
    "OPTIMIZER_NAME",
    "RNG_STATE_NAME",
    "SAMPLER_NAME",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "Accelerator",
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "LocalSGD",
    "MainProcessReadError",
    "PrepareForLaunch",
    "Saving",
    "SeedableRandomSampler",
    "SeekableDataset",
    "SkipBatchSampler",
    "SkipDataLoader",
    "WorkerFailedError",
    "debug_launcher",
    "get_sampler",
    "launch",
    "load_accelerator_state",
    "load_custom_state",
    "move_to_device",
    "notebook_launcher",
    "prepare_data_loader",
    "save_accelerator_state",
    "save_custom_state",
    "skip_first_batches",
]

_MODULES = {
    "accelerator": ("Accelerator",),
    "checkpoint.layout": (
        "OPTIMIZER_NAME",
        "RNG_STATE_NAME",
        "SAMPLER_NAME",
        "SCALER_NAME",
        "SCHEDULER_NAME",
    ),
    "checkpoint.objects": (
        "load_accelerator_state",
        "load_custom_state",
        "save_accelerator_state",
        "save_custom_state",
    ),
    "checkpoint.writer": ("Saving",),
    "data.adapter": ("DataLoaderAdapter",),
    "data.batch_shard": ("BatchSamplerShard",),
    "data.dispatcher": ("DataLoaderDispatcher",),
    "data.iterable_shard": ("IterableDatasetShard", "SeekableDataset"),
    "data.loader": ("DataLoaderShard",),
    "data.scatter": ("MainProcessReadError",),
    "data.prepare": ("get_sampler", "prepare_data_loader"),
    "data.prepared": ("DataLoaderStateMixin",),
    "data.samplers": ("SeedableRandomSampler",),
    "data.skip": ("SkipBatchSampler", "SkipDataLoader", "skip_first_batches"),
    "forking": ("WorkerFailedError",),
    "launchers": ("PrepareForLaunch", "debug_launcher", "notebook_launcher"),
    "launching": ("launch",),
    "local_sgd": ("LocalSGD",),
    "optimizer": ("AcceleratedOptimizer", "move_to_device"),
    "scheduler": ("AcceleratedScheduler",),
}

__getattr__, __dir__ = attach(
    __name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
)
