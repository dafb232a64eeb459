"""Data that is sharded across ranks before `prepare` sees it, as far as that can be recognised."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from accel_train.data.iterable_shard import IterableDatasetShard

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

logger = logging.getLogger(__name__)

_SHARD_OF = (
    ("num_replicas", "rank"),  # torch's DistributedSampler and what follows it, torchdata's among others
    ("_world_size", "_rank"),  # detectron2
    ("data_parallel_size", "data_parallel_rank"),  # Megatron-LM, NeMo
    ("world_size", "rank"),
)
"""The attributes by which samplers and streams say how many ranks read, and which of them this is."""


def is_sharded_already(
    dataloader: DataLoader[Any], *, num_processes: int, process_index: int, asked: bool | None = None
) -> bool:
    """Whether ranks get different samples from a loader without our doing.

    Recognised are samplers and iterable datasets with the number of ranks and the rank among their attributes
    (`num_replicas` and `rank`, for instance), an `IterableDatasetShard`, what
    `datasets.distributed.split_dataset_by_node` returns for an iterable dataset, and Ray Data's iterables.

    Args:
        dataloader: The loader.
        num_processes: The number of ranks that share the data.
        process_index: Which of them this is.
        asked: What the user says; `None` to look.

    Raises:
        ValueError: The data is sharded for another number of ranks, or for another rank.
    """
    if asked is not None:
        return asked
    if num_processes == 1:
        return False
    dataset: Any = dataloader.dataset
    if not isinstance(dataset, IterableDataset):
        source: Any = dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler
        while source is not None:
            if _is_shard(source, num_processes, process_index):
                return True
            source = getattr(source, "batch_sampler", getattr(source, "sampler", None))
        return False
    if isinstance(dataset, IterableDatasetShard):
        return dataset.num_processes > 1
    return (
        getattr(dataset, "_distributed", None)
        is not None  # set by datasets.distributed.split_dataset_by_node
        or type(dataset).__module__.startswith("ray.data.")
        or _is_shard(dataset, num_processes, process_index)
    )


def _is_shard(source: Any, num_processes: int, process_index: int) -> bool:
    """Whether a sampler or dataset is the shard of this rank, by its attributes."""
    for count_name, rank_name in _SHARD_OF:
        count, rank = getattr(source, count_name, None), getattr(source, rank_name, None)
        if not (isinstance(count, int) and isinstance(rank, int)) or count == 1:
            continue
        name, says = type(source).__qualname__, f"{count_name}={count!r} and {rank_name}={rank!r}"
        if (count, rank) != (num_processes, process_index):
            raise ValueError(
                f"The loader's {name} shards the data with {says}, but this is rank {process_index!r} of "
                f"{num_processes!r} that read different data. Make it with these numbers, make the loader "
                "without it, or say already_sharded=True (in DataLoaderConfiguration) to read what it yields."
            )
        logger.info(
            "The loader's %s shards the data already (%s): it is not sharded again. If that is wrong, say "
            "DataLoaderConfiguration(already_sharded=False).",
            *(name, says),
        )
        return True
    return False
