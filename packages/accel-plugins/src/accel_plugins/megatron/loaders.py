"""Loaders whose batches have all micro-batches of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader

from accel_plugins.megatron.dummy import MegatronLMDummyDataLoader
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from accel_plugins.megatron.plugin import MegatronLMPlugin


def with_all_micro_batches(loader: Any, plugin: MegatronLMPlugin) -> Any:
    """Return a loader whose batches have `num_micro_batches` times as many samples, without a short last one.

    A loader's batch size is the micro-batch size of a rank, as documented. A loader without one is returned
    as it is: its batches are sharded.
    """
    number = plugin.num_micro_batches or 1
    if number == 1 or not isinstance(loader, DataLoader) or loader.batch_size is None:
        return loader
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    if type(loader.batch_sampler) is BatchSampler:
        options["sampler"] = loader.sampler
    return DataLoader(loader.dataset, batch_size=loader.batch_size * number, drop_last=True, **options)


def micro_batch_sizes(loaders: Sequence[Any]) -> list[int]:
    """Return the batch sizes that loaders, or what stands for them, have.

    Example:
        >>> micro_batch_sizes([MegatronLMDummyDataLoader(micro_batch_size=4), DataLoader([1], batch_size=2)])
        [4, 2]
    """
    sizes = [
        one.dataset_args.get("micro_batch_size")
        if isinstance(one, MegatronLMDummyDataLoader)
        else getattr(one, "batch_size", None)
        for one in loaders
    ]
    return [size for size in sizes if size]


def with_real_loaders(loaders: Sequence[Any], context: Any) -> list[Any]:
    """Replace placeholders: the first occurrence of one by the loader that trains, then those that evaluate.

    Called on every rank, once the sizes of batches are known.
    """
    made: dict[int, Iterator[Any]] = {}
    found: list[Any] = []
    for one in loaders:
        if not isinstance(one, MegatronLMDummyDataLoader):
            found.append(one)
            continue
        if id(one) not in made:
            made[id(one)] = iter(one.build_train_valid_test_data_iterators(context))
        loader = next(made[id(one)], None)
        if loader is None:
            raise SettingsError(
                "A MegatronLMDummyDataLoader is prepared for training, validation and test, in this order, "
                "each with a share of splits_string: one of them has no samples; leave it out."
            )
        found.append(loader)
    return found
