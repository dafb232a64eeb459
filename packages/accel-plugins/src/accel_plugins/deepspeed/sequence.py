"""Shard the sequences of a batch, and check what attention without masks supports. Pure functions."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from accel_plugins.parallelism.sequences import has_padding_before_tokens, packs_samples
from accel_state.errors import SettingsError, UnsupportedError

_IGNORED = -100  # the label that losses of torch and transformers ignore
_KEY = "input_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShard:
    """Shard the sequences of batches.

    Args:
        length: Length of all sequences; `None` for any.
        masks_by_position: Whether attention separates samples in one sequence by their position ids.

    Example:
        >>> batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[5, 6, 7, 8]])}
        >>> {name: one.tolist() for name, one in SequenceShard(size=2, rank=1)(batch).items()}
        {'input_ids': [[7, 8]], 'position_ids': [[2, 3]], 'shift_labels': [[8, -100]]}
    """

    size: int
    rank: int
    length: int | None = None
    masks_by_position: bool = False

    def __call__(self, batch: Any) -> Any:
        """Return this rank's shard of a batch.

        Args:
            batch: A dictionary with `input_ids`, shape [rows, length]. Tensors of two and more dims are
                sharded along dim 1. `labels` become `shift_labels`, the labels of the next tokens, since a
                shard lacks the first token of the following one. `position_ids` are added if absent.

        Returns:
            A dictionary of the same type.

        Raises:
            SettingsError: The batch is not such a dictionary, or its lengths cannot be sharded.
            UnsupportedError: The batch needs masks, which sharded attention lacks.
        """
        if not isinstance(batch, MutableMapping) or not isinstance(batch.get(_KEY), Tensor):
            raise SettingsError(
                f"sp_size={self.size}: a batch is {_described(batch)}; batches to shard must be dictionaries "
                f"with a tensor {_KEY!r} of shape [rows, length]."
            )
        found = cast("MutableMapping[str, Any]", copy.copy(batch))
        length = self._length_of(found[_KEY])
        if "position_ids" not in found:
            positions = torch.arange(length, device=found[_KEY].device)
            found["position_ids"] = positions.expand(found[_KEY].shape[0], length)
        self._refuse_masks(found)
        if "labels" in found:
            labels = torch.nn.functional.pad(found.pop("labels"), (0, 1), value=_IGNORED)
            found["shift_labels"] = labels[..., 1:]
        begin = length // self.size * self.rank
        for name, value in [*found.items()]:
            if not isinstance(value, Tensor) or value.dim() < 2:
                continue
            if value.shape[1] != length:
                raise SettingsError(
                    f"sp_size={self.size}: {name!r} of a batch has the shape {tuple(value.shape)}, but "
                    f"{_KEY!r} {tuple(batch[_KEY].shape)}; dim 1 must be the sequence in both."
                )
            found[name] = value[:, begin : begin + length // self.size].contiguous()
        return found

    def _length_of(self, tokens: Tensor) -> int:
        shape = tuple(tokens.shape)
        if len(shape) < 2:
            raise SettingsError(
                f"sp_size={self.size}: {_KEY!r} of a batch has the shape {shape}; expected [rows, length]."
            )
        if shape[1] % self.size:
            raise SettingsError(
                f"sp_size={self.size}: {_KEY!r} of a batch has the shape {shape}, and the length {shape[1]} "
                f"is not a multiple of {self.size}; pad the sequences (pad_to_multiple_of={self.size} in "
                "collators of transformers)."
            )
        if self.length is not None and shape[1] != self.length:
            raise SettingsError(
                f"DeepSpeedSequenceParallelConfig(sp_seq_length={self.length}, "
                f"sp_seq_length_is_variable=False): {_KEY!r} of a batch has the shape {shape}; leave both "
                "out for sequences of any length."
            )
        return shape[1]

    def _refuse_masks(self, batch: MutableMapping[str, Any]) -> None:
        mask, positions = batch.get("attention_mask"), batch["position_ids"]
        if isinstance(mask, Tensor) and mask.dim() == 2 and bool(has_padding_before_tokens(mask)):
            raise UnsupportedError(
                f"sp_size={self.size}: the attention_mask of a batch has padding before tokens, but "
                "attention over sharded sequences has no masks; pad on the right, which causal attention "
                "ignores."
            )
        if not self.masks_by_position and bool(packs_samples(positions)):
            raise UnsupportedError(
                f"sp_size={self.size}: the position_ids of a batch restart in the middle of a sequence: it "
                "packs several samples, which 'sdpa' attention over sharded sequences cannot separate; use "
                "DeepSpeedSequenceParallelConfig(sp_attn_implementation='flash_attention_2')."
            )


def _described(batch: Any) -> str:
    if isinstance(batch, MutableMapping):
        return f"a {type(batch).__name__} with {sorted(map(str, cast('Any', batch)))}"
    return f"a {type(batch).__name__}"
