"""Build the loader of a rank from a torch loader (`prepare_data_loader`); skip its first batches."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_state import runtime
from accel_state.device_kinds import runtime_module
from accel_state.labels import RNGType
from accel_train.data.adapter import DataLoaderShard, PreparedLoader, T_co
from accel_train.data.dispatcher import DataLoaderDispatcher, SliceFn, shard_of_ranks
from accel_train.data.samplers import innermost_sampler, is_keyed, share_order
from accel_train.data.shards import (
    IterableDatasetShard,
    check_count,
    index_options,
    is_sharded_already,
)

logger = logging.getLogger(__name__)


def prepare_data_loader(
    dataloader: DataLoader[T_co],
    device: torch.device | str | int | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: SliceFn | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    *,
    micro_batches: int = 1,
    already_sharded: bool | None = None,
    shard_iterable_dataset: bool = True,
) -> DataLoaderShard[T_co] | DataLoaderDispatcher[T_co]:
    """Build the loader of this rank from a torch loader over the full data.

    The torch loader's samplers stay in use, so that later changes of them count; with several ranks, a
    sampler of torch that has no generator gets one. A prepared loader is returned unchanged. Data that is
    already sharded (see `already_sharded`) is not sharded again. An iterable dataset with a method `shard`
    whose `num_shards` (or `n_shards`) is a multiple of the number of ranks shards itself; every rank reads
    other iterable datasets in full.

    Args:
        dataloader: The loader, the same on all ranks.
        device: The device of batches; the device of this process if `None`.
        num_processes: The number of ranks that share the data; all if `None`.
        process_index: The index of this rank among these ranks.
        split_batches: Whether each batch of the loader is sharded across ranks. Otherwise every rank gets
            full batches, and the global batch is `num_processes` times as large.
        put_on_device: Whether batches are moved to the device.
        rng_types: The generators that are synchronised across ranks at the beginning of each epoch. If the
            order of samples is random, its generator is always included.
        dispatch_batches: Whether the main process reads for all ranks and scatters the batches. If `None`, it
            does for iterable datasets if batches are put on the device and there are several ranks.
        even_batches: Whether samples from the beginning complete the last batches, so that all ranks have the
            same number of batches of one size. With devices that compile again for every shape, such as
            XLA's, and with `micro_batches`, the last batch of a single rank, too.
        slice_fn_for_dispatch: As `slice_fn` of `DataLoaderDispatcher`; without effect unless batches are
            dispatched.
        use_seedable_sampler: Whether shuffling depends only on the seed and the epoch.
        data_seed: The seed of the seedable sampler; torch's seed on the main process if `None`.
        non_blocking: Whether a batch is copied to the device while the loop computes on the previous one.
        use_stateful_dataloader: Read through torchdata's `StatefulDataLoader`.
        torch_device_mesh: The device mesh. If `num_processes` and `process_index` are `None`, its axes decide
            which ranks have the same batches; and all its ranks share the order of samples.
        micro_batches: The number of equal parts into which an engine cuts every batch of a rank.
        already_sharded: Whether the loader already yields different data on each rank: each rank then reads
            all of its loader, and no sample is known to be padding. If `None`, the loader is inspected.
            Detected are a sampler or an iterable dataset with the number of ranks and the rank among its
            attributes, such as a `DistributedSampler`, an `IterableDatasetShard`, an iterable dataset that
            `datasets` has split by node, and a dataset that reads a split of Ray Data. Any other sampler
            whose indices depend on the rank needs `True`.
        shard_iterable_dataset: `False` is `already_sharded=True` if the dataset is iterable.

    Raises:
        TypeError: The argument is not a torch loader.
        ValueError: The arguments contradict each other, or do not fit the loader.

    Example:
        >>> loader = DataLoader(list(range(10)), batch_size=2)
        >>> parts = [prepare_data_loader(loader, num_processes=2, process_index=rank) for rank in (0, 1)]
        >>> [[batch.tolist() for batch in part] for part in parts]
        [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]
    """
    if isinstance(dataloader, (DataLoaderShard, DataLoaderDispatcher)):
        return dataloader
    if not isinstance(dataloader, DataLoader):
        raise TypeError(f"prepare_data_loader takes a torch.utils.data.DataLoader, but got {dataloader!r}.")
    _warn_of_own_iterations(type(dataloader))
    dataset: Any = dataloader.dataset
    is_stream = isinstance(dataset, IterableDataset)
    # 1. Determine how data is sharded across ranks, and which ranks share an order of samples.
    shard_of = [*range(runtime.active.topology.world_size)]
    shard_of = shard_of if torch_device_mesh is None else shard_of_ranks(torch_device_mesh)
    ranks = len(set(shard_of)) if num_processes is None else num_processes
    index = shard_of[runtime.active.topology.rank] if process_index is None else process_index
    together = ranks if torch_device_mesh is None else len(shard_of)
    if not shard_iterable_dataset and is_stream:
        already_sharded = True
    if already_sharded is None:
        already_sharded = is_sharded_already(dataloader, num_processes=ranks, process_index=index)
    # Each rank reads data that is sharded already with its own generator.
    world, index, together = (1, 0, 1) if already_sharded else (ranks, index, together)
    is_own = already_sharded or is_stream
    types = [kind for kind in map(RNGType, rng_types or ()) if not (is_own and kind is RNGType.GENERATOR)]
    device = (runtime.active.device if device is None else torch.device(device)) if put_on_device else None
    compiles = device is not None and runtime_module(device) is not None
    shards: dict[str, Any] = {
        "num_processes": world,
        "process_index": index,
        "split_batches": split_batches and world > 1,
        "even_batches": even_batches,
        "static_shapes": (compiles or micro_batches > 1) and dataloader.in_order,
    }
    # 2. Choose the reading ranks, and check the arguments.
    dispatch = dispatch_batches
    if dispatch is None:
        dispatch = put_on_device and together > 1 and is_stream
    drops_last = dataloader.drop_last or getattr(_indices_of(dataloader), "drop_last", False)
    _check(dataloader, shards, split_batches=split_batches, dispatch=dispatch)
    if dispatch and already_sharded:
        raise ValueError(
            "dispatch_batches=True makes the main process read for all ranks, but this data is already "
            "sharded: all ranks would get the samples of the main process. Remove dispatch_batches."
        )
    if dispatch and not put_on_device:
        raise ValueError(
            "dispatch_batches=True needs put_on_device=True (in Accelerator: device_placement=True), "
            "since batches from the main process arrive on the device."
        )
    is_seedable = use_seedable_sampler or is_keyed(innermost_sampler(_indices_of(dataloader)))
    if data_seed is not None and not is_seedable:
        logger.warning("data_seed has no effect without use_seedable_sampler=True.")
    if slice_fn_for_dispatch is not None and not dispatch and world > 1:
        logger.warning("slice_fn_for_dispatch has no effect: every process reads its own batches.")
    # 3. Make the order of samples the same on all ranks, and shard it.
    options: dict[str, Any] = loader_options(dataloader) | {
        "device": device,
        "torch_device_mesh": torch_device_mesh,
        "skip_batches": dataloader.skip_batches if isinstance(dataloader, SkipDataLoader) else 0,
        "use_stateful_dataloader": use_stateful_dataloader or is_stateful(dataloader),
        "_drop_last": drops_last,
        "_non_blocking": non_blocking,
    }
    generator, seeds, parts = None, [], 1
    if is_stream and not dispatch:
        dataset, size, parts = _shard_stream(dataloader, shards)
        options["batch_size"] = size
    elif not is_stream:
        indices, types, generator, seeds = share_order(
            _indices_of(dataloader), together, types, seedable=use_seedable_sampler, seed=data_seed
        )
        own = {} if dispatch else shards
        options |= index_options(indices, collates=dataloader.batch_sampler is not None, **own)
    # 4. Build the loader.
    if dispatch:
        return DataLoaderDispatcher(
            dataset,
            split_batches=shards["split_batches"],
            even_batches=even_batches,
            slice_fn=slice_fn_for_dispatch,
            micro_batches=micro_batches,
            **options,
        )
    loader = DataLoaderShard(dataset, rng_types=tuple(types), synchronized_generator=generator, **options)
    if loader.index_shard is not None:
        loader.index_shard.seeds = seeds
    # Our own shards know their padding.
    is_foreign = already_sharded and not isinstance(dataset, IterableDatasetShard)
    loader.dataset_parts = ranks if is_foreign else parts
    return loader


def _warn_of_own_iterations(kind: type[Any]) -> None:
    """Warn of a subclass that changes batches, or bounds an endless sampler, as it iterates."""
    owner = next(base for base in kind.__mro__ if "__iter__" in vars(base))
    if owner.__module__.partition(".")[0] not in {"torch", "torchdata", "accel_train"}:
        logger.warning(
            "A prepared loader reads the dataset itself, so that %s.__iter__ has no effect: what it does to "
            "batches is missing, and an endless sampler does not end. Change batches in the dataset or in "
            "collate_fn, or do not prepare this loader.",
            owner.__qualname__,
        )


def _check(
    dataloader: DataLoader[Any], shards: dict[str, Any], *, split_batches: bool, dispatch: bool
) -> None:
    """Refuse batches that cannot be split or completed, also on one process, to notice it early."""
    indices, world = _indices_of(dataloader), shards["num_processes"]
    size = dataloader.batch_size or getattr(indices, "batch_size", None)
    if split_batches and not size and (dataloader.batch_sampler is not None or (world > 1 and not dispatch)):
        raise ValueError(
            "split_batches=True shards every batch across the processes, and needs a `batch_size` of the "
            f"`dataloader` or of its batch sampler, which {dataloader.batch_sampler or dataloader!r} lacks: "
            "remove split_batches, or pass dispatch_batches=True, so that the main process splits them."
        )
    if split_batches and (size or 0) % world:
        raise ValueError(
            f"split_batches=True shards every batch across the processes, but batch_size={size!r} is not a "
            f"round multiple of num_processes={world!r}."
        )
    drops_last = dataloader.drop_last or getattr(indices, "drop_last", False)
    is_stream = isinstance(dataloader.dataset, IterableDataset)
    if world > 1 and shards["even_batches"] and not (is_stream or drops_last or dataloader.in_order):
        raise ValueError(
            "in_order=False with even_batches=True: the completed batch could not be recognised. "
            "Set even_batches=False (in DataLoaderConfiguration), or remove in_order."
        )


def _shard_stream(dataloader: DataLoader[Any], shards: dict[str, Any]) -> tuple[Any, int | None, int]:
    """Shard an iterable dataset; return it, the batch size, and the number of parts if it shards itself."""
    dataset: Any = dataloader.dataset
    size, world = dataloader.batch_size, shards["num_processes"]
    is_shard = isinstance(dataset, IterableDatasetShard) and dataset.num_processes > 1
    if is_shard or (world == 1 and (size is None or not shards["static_shapes"])):
        return dataset, size, 1
    # It may give each rank the same number of its shards, such as files. Every rank reads other datasets in
    # full: a rank with more shards would have more batches.
    count = getattr(dataset, "num_shards", getattr(dataset, "n_shards", 0))
    can_shard = world > 1 and not shards["split_batches"] and callable(getattr(dataset, "shard", None))
    if can_shard and isinstance(count, int) and count > 0 and count % world == 0:
        sharder: Any = dataset
        return sharder.shard(num_shards=world, index=shards["process_index"]), size, world
    shard = IterableDatasetShard(dataset, size or 1, dataloader.drop_last, mark_padding=True, **shards)
    return shard, None if size is None else shard.plan.rows, 1


_COPIED_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def loader_options(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments to rebuild a torch loader, its dataset included."""
    options = {name: getattr(dataloader, name) for name in _COPIED_OPTIONS}
    if dataloader.pin_memory_device:
        options["pin_memory_device"] = dataloader.pin_memory_device
    if is_stateful(dataloader):
        options["snapshot_every_n_steps"] = cast("Any", dataloader).snapshot_every_n_steps
    if isinstance(dataloader.dataset, IterableDataset):
        return {**options, "batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if dataloader.batch_sampler is None:
        return {**options, "batch_size": None, "sampler": dataloader.sampler}
    return {**options, "batch_sampler": dataloader.batch_sampler}


def is_stateful(dataloader: DataLoader[Any]) -> bool:
    """Return whether a loader is torchdata's `StatefulDataLoader`, without importing torchdata."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(dataloader, module.StatefulDataLoader)


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the sampler of indices of a loader, below all batch samplers.

    Args:
        dataloader: Any torch loader, prepared or not.

    Returns:
        The sampler; for an iterable dataset, the one created by torch.

    Example:
        >>> get_sampler(DataLoader(range(3), batch_size=2, shuffle=True))  # doctest: +ELLIPSIS
        <torch.utils.data.sampler.RandomSampler object at ...>
    """
    return innermost_sampler(_indices_of(dataloader))


def _indices_of(dataloader: DataLoader[Any]) -> Any:
    return dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler


def skip_first_batches(dataloader: DataLoader[T_co], num_batches: int = 0) -> PreparedLoader[T_co]:
    """Return a loader whose first iteration skips batches; later ones are complete.

    The skipped samples of a map-style dataset are not read. A position set by `load_state_dict` is dropped:
    batches count from the beginning of the epoch.

    Args:
        dataloader: A loader, prepared or not.
        num_batches: Number of batches of this rank to skip.

    Raises:
        TypeError: `dataloader` is not a torch loader.

    Example:
        >>> loader = DataLoader(list(range(5)), batch_size=2)
        >>> [batch.tolist() for batch in skip_first_batches(loader, 2)]
        [[4]]
    """
    check_count(num_batches)
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    if not isinstance(dataloader, DataLoader):
        raise TypeError(
            "skip_first_batches takes a torch.utils.data.DataLoader, prepared or not, but got "
            f"{dataloader!r}."
        )
    options = loader_options(dataloader)
    return SkipDataLoader(dataloader.dataset, num_batches, **options)


class SkipDataLoader(PreparedLoader[T_co]):
    """A torch loader that skips the first batches of its first iteration.

    Args:
        dataset: The dataset to load.
        skip_batches: Number of batches to skip. Later iterations are complete.
        use_stateful_dataloader: Read through torchdata's `StatefulDataLoader`.
        **kwargs: As for `torch.utils.data.DataLoader`.

    Example:
        >>> loader = SkipDataLoader(list(range(5)), skip_batches=1, batch_size=2)
        >>> [batch.tolist() for batch in loader], [batch.tolist() for batch in loader]
        ([[2, 3], [4]], [[0, 1], [2, 3], [4]])
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(
            dataset,
            skip_batches=check_count(skip_batches),
            use_stateful_dataloader=use_stateful_dataloader,
            **kwargs,
        )
