"""The loader of one rank: its shard of the batches, on its device, with one batch prefetched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel_state.rng import synchronize_rng_states
from accel_train.data.device_transfer import batch_transfer
from accel_train.data.prepared import PreparedLoader

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from accel_state.labels import RNGType


class DataLoaderShard(PreparedLoader):
    """A torch loader that yields this rank's batches on its device, and knows which batch is the last.

    `prepare_data_loader` makes it out of a torch loader and shards the data; this class only reads.

    Args:
        dataset: The dataset to load.
        device: Where batches are moved to; not moved if `None`.
        rng_types: The sources of randomness that all ranks share from the beginning of each pass on.
        synchronized_generator: What `"generator"` in `rng_types` means.
        skip_batches: How many batches the first pass leaves out; later ones are complete.
        use_stateful_dataloader: Read through torchdata's `StatefulDataLoader`.
        _drop_last: Whether a last batch that is not complete is left out.
        _non_blocking: Whether batches are copied to the device while the one before is computed with.
        torch_device_mesh: The device mesh; ranks that differ along some of its axes only have the
            same batches.
        iteration: The epoch that comes first.
        **kwargs: As for `torch.utils.data.DataLoader`.

    Example:
        >>> loader = DataLoaderShard(list(range(5)), batch_size=2)
        >>> [(batch.tolist(), loader.end_of_dataloader) for batch in loader]
        [([0, 1], False), ([2, 3], False), ([4], True)]
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | int | None = None,
        rng_types: Sequence[str | RNGType] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
            _drop_last=_drop_last,
            **kwargs,
        )
        self.device = None if device is None else torch.device(device)
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self._non_blocking = _non_blocking

    def __iter__(self) -> Generator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch says less
        """Yield this rank's batches."""
        return self._pass(
            batch_transfer(self.device, prefetching=self._non_blocking or self.pin_memory),
            before=self._synchronize,
        )

    def _synchronize(self) -> None:
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
