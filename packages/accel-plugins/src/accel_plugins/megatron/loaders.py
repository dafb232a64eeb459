"""Loaders whose batches have all micro-batches of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader

if TYPE_CHECKING:
    from accel_plugins.megatron.plugin import MegatronLMPlugin


def with_all_micro_batches(loader: Any, plugin: MegatronLMPlugin) -> Any:
    """Return a loader whose batches have `num_micro_batches` times as many samples, without a short last one.

    A loader's batch size is the micro-batch size of a rank, as documented. A loader without one is returned
    as it is: its batches are sharded.

    Args:
        loader: A loader of PyTorch.
        plugin: Has the number of micro-batches.
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
