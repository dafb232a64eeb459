"""Megatron's indexed data sets, made by megatron-core, and loaders of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from accel_plugins.megatron.library import core, load_library, without_core_warnings
from accel_state.did_you_mean import did_you_mean
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel_plugins.megatron.plugin import MegatronLMPlugin

# Options of data sets under the names of Megatron-LM's command line.
_RENAMED = {"splits_string": "split", "seq_length": "sequence_length", "seed": "random_seed"}
_OF_BATCHES = ("micro_batch_size",)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Documents:
    """What megatron-core asks of a tokenizer when it reads tokens; -1 for no token that ends a document."""

    vocab_size: int | None
    eod: int
    name: str

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """What cached indices depend on."""
        return {"class": "tokenizer", "name": self.name, "eod": self.eod}


def num_samples(plugin: MegatronLMPlugin) -> tuple[int, int, int]:
    """Return how many samples training, all validations and the test read.

    Example:
        >>> from types import SimpleNamespace
        >>> known = {"train_samples": None, "train_iters": 10, "eval_iters": 2, "eval_interval": 4}
        >>> num_samples(SimpleNamespace(megatron_lm_default_args={}, global_batch_size=8, **known))
        (80, 48, 16)
    """
    batch = getattr(plugin, "global_batch_size", None)
    samples = plugin.train_samples
    steps = plugin.train_iters or plugin.megatron_lm_default_args.get("train_iters")
    if samples is None and steps is not None and batch is not None:
        samples = steps * batch
    if samples is None or batch is None:
        raise SettingsError(
            "How many samples to read is not known: give MegatronLMPlugin train_iters or train_samples, and "
            "MegatronLMDummyDataLoader micro_batch_size."
        )
    steps = -(-samples // batch)
    validations = steps // plugin.eval_interval + 1
    return samples, validations * plugin.eval_iters * batch, plugin.eval_iters * batch


def indexed_datasets(
    plugin: MegatronLMPlugin, options: Mapping[str, Any], samples: Sequence[int]
) -> tuple[Any, Any, Any]:
    """Make the data sets for training, validation and test of a decoder; `None` for splits without documents.

    Called on every rank: the first builds the indices, the others wait for it.
    """
    load_library("MegatronLMDummyDataLoader")
    datasets = core("datasets.gpt_dataset")
    builder = core("datasets.blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
    config = datasets.GPTDatasetConfig(**dataset_options(plugin, options, datasets.GPTDatasetConfig))
    with without_core_warnings():
        return tuple(builder(datasets.GPTDataset, [*samples], lambda: True, config).build())


def dataset_options(plugin: MegatronLMPlugin, options: Mapping[str, Any], config: type) -> dict[str, Any]:
    """Return the options of data sets as megatron-core calls them."""
    known = {one.name for one in fields(config)}
    requested = {
        _RENAMED.get(name, name): value for name, value in options.items() if name not in _OF_BATCHES
    }
    paths, tokenizer = requested.pop("data_path", None), requested.pop("tokenizer", None)
    for name, value in requested.items():
        if name not in known:
            hint = did_you_mean(name, {*known, *_RENAMED, "data_path"}, "see the fields of GPTDatasetConfig.")
            raise SettingsError(f"MegatronLMDummyDataLoader({name}={value!r}): no such option; {hint}")
    if paths is not None:
        one = [paths] if isinstance(paths, str) else [str(path) for path in paths]
        requested["blend"] = core("datasets.utils").get_blend_from_list(one)
    length = requested.get("sequence_length") or plugin.seq_length
    if not ("blend" in requested or "blend_per_split" in requested) or length is None:
        missing = "data_path" if length is not None else "seq_length"
        raise SettingsError(f"MegatronLMDummyDataLoader: {missing} is missing.")
    documents = _documents(tokenizer)
    if plugin.eod_mask_loss and documents.eod < 0:
        raise SettingsError(
            "MegatronLMPlugin(eod_mask_loss=True): which token ends a document is not known: give "
            "MegatronLMDummyDataLoader a tokenizer that has one, or leave it out."
        )
    return {
        "random_seed": 1234,
        "split": "969,30,1" if "blend" in requested else None,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": bool(plugin.eod_mask_loss),
        "create_attention_mask": False,
        **requested,
        "sequence_length": length,
        "tokenizer": documents,
    }


def _documents(tokenizer: Any) -> _Documents:
    if tokenizer is None:
        return _Documents(vocab_size=None, eod=-1, name="none")
    end = tokenizer.eos_token_id
    name = str(getattr(tokenizer, "name_or_path", type(tokenizer).__name__))
    return _Documents(vocab_size=len(tokenizer), eod=-1 if end is None else int(end), name=name)


def indexed_loaders(
    plugin: MegatronLMPlugin, datasets: Sequence[Any]
) -> tuple[DataLoader[Any] | None, DataLoader[Any] | None, DataLoader[Any] | None]:
    """Make loaders of micro-batches that begin after what was consumed before."""
    consumed = plugin.consumed_samples or [0, 0, 0]
    if len(consumed) != len(datasets):
        raise SettingsError(
            f"MegatronLMPlugin(consumed_samples={consumed!r}): expected three, for the loaders that train, "
            "validate and test."
        )
    size = plugin.megatron_lm_default_args["micro_batch_size"]
    train, valid, test = (
        None
        if one is None
        else DataLoader(one, batch_size=size, sampler=range(start, len(one)), drop_last=True)
        for one, start in zip(datasets, consumed, strict=True)
    )
    return train, valid, test
