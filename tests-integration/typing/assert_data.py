"""The types of loaders, optimizers, schedulers and trackers; read by type checkers, never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from accel_plugins.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from accel_state.labels import LoggerType
from accel_trackers.general import GeneralTracker
from accel_trackers.registry import filter_trackers, get_available_trackers
from accel_trackers.tensorboard import TensorBoardTracker
from accel_train.data.adapter import DataLoaderShard, PreparedLoader
from accel_train.data.dispatcher import DataLoaderDispatcher
from accel_train.data.prepare import prepare_data_loader, skip_first_batches

Batch = dict[str, Tensor]


def loaders(
    plain: DataLoader[Batch], shard: DataLoaderShard[Batch], main: DataLoaderDispatcher[Batch]
) -> None:
    """A prepared loader gives the batches of the one that it wraps."""
    prepared = prepare_data_loader(plain, put_on_device=True)
    assert_type(prepared, DataLoaderShard[Batch] | DataLoaderDispatcher[Batch])
    for batch in prepared:
        assert_type(batch, Batch)
    for batch in shard:
        assert_type(batch, Batch)
    for batch in main:
        assert_type(batch, Batch)
    assert_type(skip_first_batches(plain, 1), PreparedLoader[Batch])
    assert_type(shard.skipping(1), DataLoaderShard[Batch])
    assert_type((len(shard), shard.total_batch_size, shard.total_dataset_length), tuple[int, int, int])
    assert_type((shard.iteration, shard.stride, shard.remainder), tuple[int, int, int])
    assert_type((shard.end_of_dataloader, shard.is_sharded), tuple[bool, bool])
    assert_type(shard.batch_size_seen, int | None)
    assert_type(shard.set_epoch(2), None)
    assert_type(shard.state_dict(), dict[str, Any])
    assert_type(shard.load_state_dict({}), None)
    assert_type(shard.dataset, Dataset[Batch])


def wrappers(optimizer: AcceleratedOptimizer, scheduler: AcceleratedScheduler) -> None:
    """The wrappers have the interface of torch's classes."""
    assert_type(optimizer.step(), float | None)
    assert_type(optimizer.zero_grad(set_to_none=True), None)
    assert_type(optimizer.step_was_skipped, bool)
    assert_type((optimizer.param_groups, optimizer.defaults), tuple[list[dict[str, Any]], dict[str, Any]])
    assert_type(optimizer.state_dict(), dict[str, Any])
    assert_type(optimizer.load_state_dict({}), None)
    assert_type(optimizer.add_param_group({"params": []}), None)
    assert_type(scheduler.step(), None)
    assert_type((scheduler.get_last_lr(), scheduler.get_lr()), tuple[list[float], list[float]])
    assert_type(scheduler.state_dict(), dict[str, Any])
    assert_type(scheduler.load_state_dict({}), None)


def trackers(tracker: TensorBoardTracker, image: Tensor) -> None:
    """Methods of a tracker keep their types under the decorators."""
    assert_type((tracker.name, tracker.run_id), tuple[str, str | None])
    assert_type((tracker.requires_logging_directory, tracker.main_process_only), tuple[bool, bool])
    assert_type(tracker.start(), None)
    assert_type(tracker.store_init_configuration({"lr": 0.1}), None)
    assert_type(tracker.log({"loss": 0.5}, step=1), None)
    assert_type(tracker.log_images({"image": image}, step=1), None)
    assert_type(tracker.log_table("rows", columns=["a"], data=[[1]]), None)
    assert_type(tracker.log_histograms({"weights": image}), None)
    assert_type(tracker.log_text({"prompt": "text"}), None)
    assert_type(tracker.log_artifact(Path("model"), "weights"), None)
    assert_type((tracker.flush(), tracker.finish()), tuple[None, None])
    assert_type(tracker.resume_arguments("id"), dict[str, Any])
    assert_type(get_available_trackers(), list[LoggerType | str])
    assert_type(filter_trackers("all", "logs"), list[str | GeneralTracker])
    tracker.log(0.5)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
