"""This rank's part of the sequences of a batch, and what attention without masks cannot compute. Pure."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from accel_state.errors import SettingsError, UnsupportedError

_IGNORED = -100  # the label that losses of torch and transformers leave out
_KEY = "input_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePart:
    """Cuts batches to the part of one rank.

    Args:
        size: Among how many ranks a sequence is divided.
        rank: Which of them this is.
        length: How long all sequences are; `None` if they may be of any length.
        masks_by_position: Whether attention sees by the positions where samples in one sequence begin.

    Example:
        >>> batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[5, 6, 7, 8]])}
        >>> {name: one.tolist() for name, one in SequencePart(size=2, rank=1)(batch).items()}
        {'input_ids': [[7, 8]], 'position_ids': [[2, 3]], 'shift_labels': [[8, -100]]}
    """

    size: int
    rank: int
    length: int | None = None
    masks_by_position: bool = False

    def __call__(self, batch: Any) -> Any:
        """Give the part of a batch.

        Args:
            batch: A dictionary with `input_ids`, shape [rows, length]. Tensors of two and more dims are cut
                along the second one. `labels` become `shift_labels`, each the next token's: a part does not
                have the first token of the following one. `position_ids` are added where they are absent.

        Returns:
            A dictionary of the same type.

        Raises:
            SettingsError: It is no such dictionary, or cannot be cut.
            UnsupportedError: Attention without masks would compute something else.
        """
        if not isinstance(batch, MutableMapping) or not isinstance(batch.get(_KEY), Tensor):
            raise SettingsError(
                f"sp_size={self.size}: a batch is {_described(batch)}; batches whose sequences are divided "
                f"must be dictionaries with a tensor {_KEY!r} of shape [rows, length]."
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
                    f"sp_size={self.size}: {name!r} of a batch has the shape {tuple(value.shape)}, and "
                    f"{_KEY!r} {tuple(batch[_KEY].shape)}; dim 1 must be the sequence in both."
                )
            found[name] = value[:, begin : begin + length // self.size].contiguous()
        return found

    def _length_of(self, tokens: Tensor) -> int:
        shape = tuple(tokens.shape)
        if len(shape) < 2:
            raise SettingsError(f"sp_size={self.size}: {_KEY!r} of a batch has the shape {shape}, no rows.")
        if shape[1] % self.size:
            raise SettingsError(
                f"sp_size={self.size}: {_KEY!r} of a batch has the shape {shape}, and sequences of "
                f"{shape[1]} cannot be divided among {self.size} processes; pad them to a multiple of "
                f"{self.size} (pad_to_multiple_of={self.size} in collators of transformers)."
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
        if isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask[:, 1:] > mask[:, :-1]).any()):
            raise UnsupportedError(
                f"sp_size={self.size}: the attention_mask of a batch has padding before tokens. Attention "
                "over divided sequences has no masks; pad on the right, where causal attention does not see "
                "it."
            )
        begins = (positions[..., 1:-1] == 0) & (positions[..., 2:] == 1)
        if not self.masks_by_position and bool(begins.any()):
            raise UnsupportedError(
                f"sp_size={self.size}: the position_ids of a batch begin anew in the middle of a sequence: "
                "it holds several samples, between which 'sdpa' attention over divided sequences cannot "
                "tell; use DeepSpeedSequenceParallelConfig(sp_attn_implementation='flash_attention_2')."
            )


def _described(batch: Any) -> str:
    if isinstance(batch, MutableMapping):
        return f"a {type(batch).__name__} with {sorted(map(str, cast('Any', batch)))}"
    return f"a {type(batch).__name__}"
