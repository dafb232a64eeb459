"""Placeholders for what Megatron makes itself, and loaders whose batches have all micro-batches of a step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader

from accel_plugins.megatron.indexed_data import indexed_datasets, indexed_loaders, num_samples
from accel_state.accelerator_state import AcceleratorState, is_initialized
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accel_plugins.megatron.plugin import MegatronLMPlugin


class MegatronLMDummyScheduler:
    """Placeholder for the schedule of learning rate and weight decay that `MegatronLMPlugin` describes.

    Args:
        optimizer: The optimizer whose learning rate is scheduled.
        total_num_steps: Steps of the schedule, in batches of one rank; the plugin's `train_iters` or
            `train_samples` if `None`.
        warmup_num_steps: Steps of the warm-up, in batches of one rank.
        **kwargs: Stored in the attribute `kwargs`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())
        >>> MegatronLMDummyScheduler(optimizer, total_num_steps=100).warmup_num_steps
        0
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronLMDummyDataLoader:
    """Placeholder for the loaders of Megatron's indexed data sets, which it cuts into three.

    Prepare it three times in one call: the first result trains, the second validates, the third tests.

    Args:
        **dataset_kwargs: `data_path` (prefix of the files, or several, each after its weight),
            `splits_string` (shares of the three, such as `"969,30,1"`), `seq_length`, `micro_batch_size`,
            `tokenizer` (of transformers; its end-of-sequence token ends documents), `seed`, and fields of
            megatron-core's `GPTDatasetConfig`.

    Example:
        >>> loader = MegatronLMDummyDataLoader(data_path=["corpus"], splits_string="98,1,1", seq_length=128)
        >>> loader.dataset_args["seq_length"]
        128
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args: dict[str, Any] = dict(dataset_kwargs)

    def set_megatron_data_args(self) -> None:
        """Enter the arguments into those of the active `MegatronLMPlugin`, whose own are kept.

        Raises:
            SettingsError: There is no active plugin.
        """
        plugin = AcceleratorState().megatron_lm_plugin if is_initialized() else None
        if plugin is None:
            raise SettingsError(
                "set_megatron_data_args() needs an Accelerator(megatron_lm_plugin=…), which this run does "
                "not have."
            )
        plugin.megatron_lm_default_args.update(
            (name, value)
            for name, value in self.dataset_args.items()
            if plugin.megatron_lm_default_args.get(name) is None
        )

    def get_train_valid_test_datasets_provider(
        self, accelerator: Any
    ) -> Callable[[Sequence[int]], tuple[Any, Any, Any]]:
        """Return a function that makes the three data sets from the number of samples of each.

        Args:
            accelerator: Its plugin may have a `custom_megatron_datasets_provider_function`, which is used.
        """
        plugin = accelerator.state.megatron_lm_plugin
        own = plugin.custom_megatron_datasets_provider_function
        return own or partial(indexed_datasets, plugin, self.dataset_args)

    def build_train_valid_test_data_iterators(
        self, accelerator: Any
    ) -> tuple[DataLoader[Any] | None, DataLoader[Any] | None, DataLoader[Any] | None]:
        """Make the loaders of the three data sets, from which `consumed_samples` are left out.

        Args:
            accelerator: Prepared with a model and optimizer, so that the sizes of batches are known.

        Returns:
            Loaders of micro-batches over all ranks, to be prepared; `None` for a split without samples.
        """
        self.set_megatron_data_args()
        provider = self.get_train_valid_test_datasets_provider(accelerator)
        plugin = accelerator.state.megatron_lm_plugin
        return indexed_loaders(plugin, provider(num_samples(plugin)))


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
