"""Build the loader of a rank from a torch loader (`prepare_data_loader`); skip its first batches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_state import runtime
from accel_state.device_kinds import runtime_module
from accel_state.labels import RNGType
from accel_train.data.adapter import DataLoaderShard, PreparedLoader
from accel_train.data.dispatcher import DataLoaderDispatcher, SliceFn, shard_of_ranks
from accel_train.data.reading import INDEXING, T_co, is_stateful, loader_options, shard_indices
from accel_train.data.samplers import SharedOrder, innermost_sampler, replace_sampler, sync_shuffle
from accel_train.data.shards import BatchSamplerShard, IterableDatasetShard, is_sharded_already
from accel_train.data.transfer import warn_of_padding

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
        logger.debug("%r is already prepared.", dataloader)
        return dataloader
    if not isinstance(dataloader, DataLoader):
        raise TypeError(f"prepare_data_loader takes a torch.utils.data.DataLoader, but got {dataloader!r}.")
    _warn_of_own_iterations(type(dataloader))
    # 1. Determine how data is sharded across ranks.
    world, index, together = _data_parallel_shape(torch_device_mesh, num_processes, process_index)
    if not shard_iterable_dataset and isinstance(dataloader.dataset, IterableDataset):
        already_sharded = True
    is_shard = is_sharded_already(dataloader, num_processes=world, process_index=index, asked=already_sharded)
    ranks, rng_types = world, [RNGType(kind) for kind in rng_types or ()]
    if is_shard:  # each rank reads its own data, with its own generator
        world, index, together = 1, 0, 1
        rng_types = [kind for kind in rng_types if kind is not RNGType.GENERATOR]
    if split_batches:
        _check_batch_size(dataloader, world)
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
    if is_shard and dispatch_batches:
        raise ValueError(
            "dispatch_batches=True makes the main process read for all ranks, but this data is already "
            "sharded: all ranks would get the samples of the main process. Remove dispatch_batches."
        )
    dispatch = _dispatches(dataloader, dispatch_batches, put_on_device=put_on_device, several=together > 1)
    if data_seed is not None and not use_seedable_sampler:
        logger.warning("data_seed has no effect without use_seedable_sampler=True.")
    if slice_fn_for_dispatch is not None and not dispatch and world > 1:
        logger.warning("slice_fn_for_dispatch has no effect: every process reads its own batches.")
    # 3. Make the order of samples the same on all ranks.
    order = _order(
        dataloader, shards, together, rng_types=rng_types, seedable=use_seedable_sampler, seed=data_seed
    )
    # 4. Build the loader.
    options = loader_options(dataloader) | order.options()
    options |= {"torch_device_mesh": torch_device_mesh, "_non_blocking": non_blocking}
    options["skip_batches"] = dataloader.skip_batches if isinstance(dataloader, SkipDataLoader) else 0
    options |= {"_drop_last": _drops_last(dataloader), "device": device}
    options["use_stateful_dataloader"] = use_stateful_dataloader or is_stateful(dataloader)
    if dispatch:
        options |= {name: shards[name] for name in ("split_batches", "even_batches")}
        options |= {"slice_fn": slice_fn_for_dispatch, "micro_batches": micro_batches}
        return DataLoaderDispatcher(dataloader.dataset, **options)
    options |= {"rng_types": order.rng_types, "synchronized_generator": order.generator}
    loader = _shard(dataloader, options, shards, warns=compiles)
    if order.seeds and loader.sharder is not None:
        loader.sharder.seeds = order.seeds
    # Our own shards know their padding.
    if is_shard and not isinstance(dataloader.dataset, IterableDatasetShard):
        loader.dataset_parts = ranks
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


def _data_parallel_shape(
    mesh: Any, num_processes: int | None, process_index: int | None
) -> tuple[int, int, int]:
    """Return the number of data shards, this rank's shard, and the number of ranks that share an order."""
    topology = runtime.active.topology
    shard_of = [*range(topology.world_size)] if mesh is None else shard_of_ranks(mesh)
    world = len(set(shard_of)) if num_processes is None else num_processes
    index = shard_of[topology.rank] if process_index is None else process_index
    return world, index, world if mesh is None else len(shard_of)


def _check_batch_size(dataloader: DataLoader[Any], num_processes: int) -> None:
    """Check that every process gets an equal part of each batch, also on one process, to catch it early."""
    size = dataloader.batch_size or getattr(_indices_of(dataloader), "batch_size", None)
    if not size and dataloader.batch_sampler is not None:
        raise ValueError(
            "split_batches=True shards every batch across the processes, and needs a `batch_size` of the "
            f"`dataloader` or of its batch sampler, which {dataloader.batch_sampler!r} lacks. Without "
            "split_batches, every process gets whole batches, whatever their sizes."
        )
    if (size or 0) % num_processes:
        raise ValueError(
            f"split_batches=True shards every batch across the processes, but batch_size={size!r} is not a "
            f"round multiple of num_processes={num_processes!r}."
        )


def _dispatches(
    dataloader: DataLoader[Any], asked: bool | None, *, put_on_device: bool, several: bool
) -> bool:
    if asked and not put_on_device:
        raise ValueError(
            "dispatch_batches=True needs put_on_device=True (in Accelerator: device_placement=True), "
            "since batches from the main process arrive on the device."
        )
    if asked is not None:
        return asked
    return put_on_device and several and isinstance(dataloader.dataset, IterableDataset)


def _order(
    dataloader: DataLoader[Any],
    shards: dict[str, Any],
    together: int,
    *,
    rng_types: Sequence[RNGType],
    seedable: bool,
    seed: int | None,
) -> SharedOrder:
    """Return the order of samples, shared across ranks; for iterable datasets, only the generators."""
    if isinstance(dataloader.dataset, IterableDataset):
        return SharedOrder(rng_types=tuple(kind for kind in rng_types if kind is not RNGType.GENERATOR))
    several = shards["num_processes"] > 1
    if several and shards["even_batches"] and not (_drops_last(dataloader) or dataloader.in_order):
        raise ValueError(
            "in_order=False with even_batches=True: the completed batch could not be recognised. "
            "Set even_batches=False (in DataLoaderConfiguration), or remove in_order."
        )
    return sync_shuffle(
        _indices_of(dataloader),
        batched=dataloader.batch_sampler is not None,
        num_processes=together,
        rng_types=rng_types,
        seedable=seedable,
        seed=seed,
    )


def _shard(
    dataloader: DataLoader[Any], options: dict[str, Any], shards: dict[str, Any], *, warns: bool
) -> DataLoaderShard[Any]:
    """Build the loader of a rank that reads its own batches."""
    dataset, options = _shard_data(dataloader, options, shards)
    world = shards["num_processes"]
    if warns and shards["static_shapes"] and world == 1 and _may_pad(dataset, options):
        warn_of_padding()
    loader = DataLoaderShard(dataset, **options)
    if isinstance(dataset, IterableDataset) and not isinstance(dataset, IterableDatasetShard):
        loader.dataset_parts = world
    return loader


def _shard_data(
    dataloader: DataLoader[Any], options: dict[str, Any], shards: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the dataset and the options of this rank's loader."""
    dataset: Any = dataloader.dataset
    if not isinstance(dataset, IterableDataset):
        indexing = {name: value for name, value in options.items() if name in INDEXING}
        plain = {name: value for name, value in options.items() if name not in INDEXING}
        return dataset, plain | shard_indices(dataset, indexing, **shards)
    if isinstance(dataset, IterableDatasetShard) and dataset.num_processes > 1:
        return dataset, options
    size = dataloader.batch_size
    if shards["num_processes"] == 1 and (size is None or not shards["static_shapes"]):
        return dataset, options
    if _shards_itself(dataset, shards):
        sharder: Any = dataset
        return sharder.shard(num_shards=shards["num_processes"], index=shards["process_index"]), options
    if shards["split_batches"] and size is None:
        raise ValueError(
            "split_batches=True cannot split the batches that a dataset makes itself (batch_size=None). "
            "Pass dispatch_batches=True, so that the main process reads and splits them."
        )
    shard = IterableDatasetShard(dataset, size or 1, dataloader.drop_last, mark_padding=True, **shards)
    return shard, {**options, "batch_size": None if size is None else shard.plan.rows}


def _shards_itself(dataset: Any, shards: dict[str, Any]) -> bool:
    """Return whether an iterable dataset can give each rank the same number of its shards, such as files.

    Every rank reads other datasets in full: a rank with more shards would have more batches.
    """
    count = getattr(dataset, "num_shards", getattr(dataset, "n_shards", 0))
    world = shards["num_processes"]
    if shards["split_batches"] or not isinstance(count, int) or not callable(getattr(dataset, "shard", None)):
        return False
    return world > 1 and count > 0 and count % world == 0


def _may_pad(dataset: Any, options: dict[str, Any]) -> bool:
    """Return whether the last batch of a single rank may be completed."""
    if isinstance(dataset, IterableDataset):
        return isinstance(dataset, IterableDatasetShard) and dataset.plan.pads
    shard: Any = options.get("batch_sampler")
    pads = isinstance(shard, BatchSamplerShard) and shard.batch_size is not None and shard.plan.pads
    return pads and shard.remainder_from(0) != 0


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


def _drops_last(dataloader: DataLoader[Any]) -> bool:
    return dataloader.drop_last or getattr(_indices_of(dataloader), "drop_last", False)


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


class SkipBatchSampler(BatchSampler):
    """The batches of a batch sampler without the first ones.

    Args:
        batch_sampler: Any iterable of lists of indices.
        skip_batches: Number of batches to skip.

    Example:
        >>> list(SkipBatchSampler(BatchSampler(range(7), 3, drop_last=False), 1))
        [[3, 4, 5], [6]]
    """

    def __init__(self, batch_sampler: BatchSampler | Iterable[list[int]], skip_batches: int = 0) -> None:
        self.batch_sampler: Any = batch_sampler
        self.skip_batches = check_count(skip_batches)

    @property
    def batch_size(self) -> Any:
        """The batch size of the batch sampler; `None` if it has none."""
        return getattr(self.batch_sampler, "batch_size", None)

    @property
    def drop_last(self) -> bool:
        """Whether the batch sampler drops an incomplete last batch."""
        return getattr(self.batch_sampler, "drop_last", False)

    @property
    def sampler(self) -> Any:
        """The sampler of the batch sampler."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride] - torch's is an attribute
        replace_sampler(self.batch_sampler, sampler)

    @property
    def total_length(self) -> int:
        """Number of batches, the skipped ones included."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        """Number of remaining batches."""
        return max(0, len(self.batch_sampler) - self.skip_batches)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the remaining batches."""
        inner = self.batch_sampler
        shard = inner if isinstance(inner, BatchSamplerShard) else BatchSamplerShard(inner)
        return shard.iterate_from(self.skip_batches * shard.stride)


def check_count(batches: int) -> int:
    """Refuse a negative number of batches."""
    if batches < 0:
        raise ValueError(f"The number of batches to skip is {batches!r}, but must not be negative.")
    return batches
