"""Beginning an epoch after some of its batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader

from accel_train.data.batch_shard import BatchSamplerShard
from accel_train.data.indices import loader_options
from accel_train.data.prepared import PreparedLoader

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator


class SkipBatchSampler(BatchSampler):
    """The batches of a batch sampler without the first ones.

    Args:
        batch_sampler: Any iterable of lists of indices.
        skip_batches: How many batches to leave out.

    Example:
        >>> list(SkipBatchSampler(BatchSampler(range(7), 3, drop_last=False), 1))
        [[3, 4, 5], [6]]
    """

    def __init__(self, batch_sampler: BatchSampler | Iterable[list[int]], skip_batches: int = 0) -> None:
        self.batch_sampler: Any = batch_sampler
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)
        self.skip_batches = check_count(skip_batches)

    @property
    def sampler(self) -> Any:
        """The sampler below."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def total_length(self) -> int:
        """Number of batches, those left out included."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        """Number of batches that are left."""
        return max(0, len(self.batch_sampler) - self.skip_batches)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches that are left."""
        inner = self.batch_sampler
        shard = inner if isinstance(inner, BatchSamplerShard) else BatchSamplerShard(inner)
        return shard.iterate_from(self.skip_batches * shard.stride)


class SkipDataLoader(PreparedLoader):
    """A torch loader that leaves out the first batches of its first pass.

    Args:
        dataset: The dataset to load.
        skip_batches: How many batches to leave out. Later passes are complete.
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

    def __iter__(self) -> Generator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch says less
        """Yield the batches."""
        return self._pass()


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> PreparedLoader:
    """Return a loader that begins its first pass later; all its further passes are complete.

    What is left out of a map-style dataset is not read. A position that `load_state_dict` has set is given
    up: batches count from the beginning of the epoch.

    Args:
        dataloader: A loader, prepared or not.
        num_batches: How many batches of this rank to leave out.

    Raises:
        TypeError: It is no torch loader.

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
            f"skip_first_batches takes a torch.utils.data.DataLoader, prepared or not; got {dataloader!r}."
        )
    options = loader_options(dataloader)
    return SkipDataLoader(dataloader.dataset, num_batches, **options)


def check_count(batches: int) -> int:
    """Refuse a number of batches that is none."""
    if batches < 0:
        raise ValueError(f"The number of batches to skip is {batches!r}; it cannot be negative.")
    return batches
