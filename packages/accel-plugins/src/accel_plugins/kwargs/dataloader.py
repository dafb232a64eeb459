"""Options of data loaders."""

from __future__ import annotations

from dataclasses import dataclass, field

from accel_plugins.kwargs.base import expect, expect_flags


@dataclass
class DataLoaderConfiguration:
    """Options of prepared data loaders.

    Args:
        split_batches: Whether a loader's batch is split across ranks; otherwise every rank gets full
            batches, and the global batch grows with the world size.
        dispatch_batches: Whether the main process reads all batches and scatters them. If `None`, it does so
            for iterable datasets.
        even_batches: Whether the last batches are filled with samples from the beginning, so that every
            process gets the same number of samples.
        use_seedable_sampler: Whether the shuffle depends only on the seed and the epoch, and so is the same
            for any world size.
        data_seed: The seed of the seedable sampler; torch's if `None`.
        non_blocking: Whether host-to-device copies of batches are asynchronous; needs pinned memory.
        use_stateful_dataloader: Whether loaders become torchdata's `StatefulDataLoader`.
        resume_mid_epoch: Whether `load_state` lets every loader go on with the batch after the last one.
            Otherwise only stateful ones do; others begin the interrupted epoch again, in the same order, and
            the script leaves out what it has done, with `skip_first_batches`.

    Raises:
        SettingsError: A field has another type.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    resume_mid_epoch: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        expect_flags(
            self,
            "split_batches",
            "even_batches",
            "use_seedable_sampler",
            "non_blocking",
            "use_stateful_dataloader",
            "resume_mid_epoch",
        )
        expect_flags(self, "dispatch_batches", optional=True)
        expect(self, "data_seed", "an integer or None", lambda value: value is None or isinstance(value, int))
