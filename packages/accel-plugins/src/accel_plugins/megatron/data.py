"""Megatron's indexed data sets, placeholders for its loaders and schedule, and loaders of full batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_plugins.megatron.library import core, load_library, without_core_warnings
from accel_plugins.strategy import Feature, FromConfiguration
from accel_state.accelerator_state import AcceleratorState, is_initialized
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from accel_plugins.megatron.plugin import MegatronLMPlugin


class MegatronLMDummyScheduler(FromConfiguration):
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

    kind = "schedulers"
    feature = Feature.OPTIMIZER_FROM_CONFIGURATION

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronLMDummyDataLoader(FromConfiguration):
    """Placeholder for the loaders of Megatron's indexed data sets, which are split into three.

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

    kind = "dataloaders"
    feature = Feature.LOADERS_FROM_CONFIGURATION

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args: dict[str, Any] = dict(dataset_kwargs)

    def set_megatron_data_args(self) -> None:
        """Add the arguments to those of the active `MegatronLMPlugin`, whose present values are kept.

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
        """Return a function that builds the three data sets from the number of samples of each.

        Args:
            accelerator: Its plugin may have a `custom_megatron_datasets_provider_function`, which is used.
        """
        plugin = accelerator.state.megatron_lm_plugin
        own = plugin.custom_megatron_datasets_provider_function
        return own or partial(indexed_datasets, plugin, self.dataset_args)

    def build_train_valid_test_data_iterators(
        self, accelerator: Any
    ) -> tuple[DataLoader[Any] | None, DataLoader[Any] | None, DataLoader[Any] | None]:
        """Build the loaders of the three data sets, without `consumed_samples`.

        Args:
            accelerator: An accelerator that has prepared model and optimizer, so that batch sizes are known.

        Returns:
            Loaders of micro-batches over all ranks, to be prepared; `None` for a split without samples.
        """
        self.set_megatron_data_args()
        provider = self.get_train_valid_test_datasets_provider(accelerator)
        plugin = accelerator.state.megatron_lm_plugin
        return indexed_loaders(plugin, provider(num_samples(plugin)))


_LOADER_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "in_order", "drop_last"),
)


def with_all_micro_batches(loader: Any, plugin: MegatronLMPlugin) -> Any:
    """Return a loader whose batches have `num_micro_batches` times as many samples.

    A loader's batch size is the micro-batch size of a rank, as documented. A loader without one is returned
    unchanged: its batches are sharded.
    """
    number = plugin.num_micro_batches or 1
    if number == 1 or not isinstance(loader, DataLoader) or loader.batch_size is None:
        return loader
    options = {name: getattr(loader, name) for name in _LOADER_OPTIONS}
    if type(loader.batch_sampler) is BatchSampler and not isinstance(loader.dataset, IterableDataset):
        options["sampler"] = loader.sampler
    return DataLoader(loader.dataset, batch_size=loader.batch_size * number, **options)


def with_real_loaders(loaders: Sequence[Any], context: Any) -> list[Any]:
    """Replace placeholders with loaders: the first occurrence of one trains, further ones evaluate.

    Called on every rank, once batch sizes are known.
    """
    placeholders = {id(one): one for one in loaders if isinstance(one, MegatronLMDummyDataLoader)}
    made = {
        key: iter(one.build_train_valid_test_data_iterators(context)) for key, one in placeholders.items()
    }
    result = [next(made[id(item)], None) if id(item) in made else item for item in loaders]
    if any(item is None for item in result):
        raise SettingsError(
            "A MegatronLMDummyDataLoader is prepared for training, validation and test, in this order, "
            "each with a share of splits_string: one of them has no samples. Remove it."
        )
    return result


# Options of data sets under the names of Megatron-LM's command line.
_RENAMED = {"splits_string": "split", "seq_length": "sequence_length", "seed": "random_seed"}


def num_samples(plugin: MegatronLMPlugin) -> tuple[int, int, int]:
    """Return the numbers of samples for training, all validations and the test.

    Example:
        >>> from types import SimpleNamespace
        >>> known = {"train_samples": None, "train_iters": 10, "eval_iters": 2, "eval_interval": 4}
        >>> num_samples(SimpleNamespace(megatron_lm_default_args={}, global_batch_size=8, **known))
        (80, 48, 16)
    """
    batch, samples = getattr(plugin, "global_batch_size", None), plugin.train_samples
    steps = plugin.train_iters or plugin.megatron_lm_default_args.get("train_iters")
    if batch is None or (samples is None and steps is None):
        raise SettingsError(
            "The number of samples to read is unknown: set MegatronLMPlugin train_iters or train_samples, "
            "and MegatronLMDummyDataLoader micro_batch_size."
        )
    samples = steps * batch if samples is None else samples
    validations = -(-samples // batch) // plugin.eval_interval + 1
    return samples, validations * plugin.eval_iters * batch, plugin.eval_iters * batch


def indexed_datasets(
    plugin: MegatronLMPlugin, options: Mapping[str, Any], samples: Sequence[int]
) -> tuple[Any, Any, Any]:
    """Build a decoder's data sets for training, validation and test; `None` for splits without documents.

    Called on every rank: rank 0 builds the indices, the others wait for it.
    """
    load_library("MegatronLMDummyDataLoader")
    # 1. Give the options megatron-core's names.
    requested = {_RENAMED.get(name, name): value for name, value in options.items()}
    requested.pop("micro_batch_size", None)
    paths, tokenizer = requested.pop("data_path", None), requested.pop("tokenizer", None)
    if paths is not None:
        names = [paths] if isinstance(paths, str) else [str(path) for path in paths]
        requested["blend"] = core("datasets.utils").get_blend_from_list(names)
    length = requested.get("sequence_length") or plugin.seq_length
    if not ("blend" in requested or "blend_per_split" in requested) or length is None:
        missing = "data_path" if length is not None else "seq_length"
        raise SettingsError(f"MegatronLMDummyDataLoader: {missing} is missing.")
    end = None if tokenizer is None else tokenizer.eos_token_id
    eod = -1 if end is None else int(end)
    if plugin.eod_mask_loss and eod < 0:
        raise SettingsError(
            "MegatronLMPlugin(eod_mask_loss=True): give MegatronLMDummyDataLoader a tokenizer whose "
            "end-of-sequence token ends documents."
        )
    name = str(getattr(tokenizer, "name_or_path", "none" if tokenizer is None else type(tokenizer).__name__))
    # 2. Build the data sets.
    documents = SimpleNamespace(  # read by megatron-core; cached indices depend on the identifiers
        vocab_size=None if tokenizer is None else len(tokenizer),
        eod=eod,
        unique_identifiers={"class": "tokenizer", "name": name, "eod": eod},
    )
    values = {
        "random_seed": 1234,
        "split": "969,30,1" if "blend" in requested else None,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "create_attention_mask": False,
        "eod_mask_loss": bool(plugin.eod_mask_loss),
        **requested,
        "sequence_length": length,
        "tokenizer": documents,
    }
    datasets = core("datasets.gpt_dataset")
    builder = core("datasets.blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
    config = datasets.GPTDatasetConfig(**values)
    with without_core_warnings():
        return tuple(builder(datasets.GPTDataset, [*samples], lambda: True, config).build())


def indexed_loaders(
    plugin: MegatronLMPlugin, datasets: Sequence[Any]
) -> tuple[DataLoader[Any] | None, DataLoader[Any] | None, DataLoader[Any] | None]:
    """Build loaders of micro-batches that begin after the consumed samples."""
    consumed = plugin.consumed_samples or [0, 0, 0]
    if len(consumed) != len(datasets):
        raise SettingsError(
            f"MegatronLMPlugin(consumed_samples={consumed!r}): expected one number for each of the "
            f"{len(datasets)} data sets (train, valid, test)."
        )
    size = plugin.megatron_lm_default_args["micro_batch_size"]
    train, valid, test = (
        None
        if dataset is None
        else DataLoader(dataset, batch_size=size, sampler=range(start, len(dataset)), drop_last=True)
        for dataset, start in zip(datasets, consumed, strict=True)
    )
    return train, valid, test
