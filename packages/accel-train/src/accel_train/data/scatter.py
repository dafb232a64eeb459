"""Scatter the batches of each round from rank 0, as one message of bytes per rank.

Rank 0 broadcasts the layouts of a round (structure, dtypes, shapes, and all values but tensors) if they
differ from those of the round before. A message has two flags (whether other layouts follow, and whether the
rank gets no further batch), and the bytes of the tensors.
"""

from __future__ import annotations

import pickle  # for bytes pickled by rank 0 of the same run
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from accel_ops.tree import TensorInformation, is_tensor_information, recursively_apply
from accel_state.collectives import Collectives
from accel_state.errors import AccelError
from accel_state.frozen import frozen
from accel_train.data.shards import BatchWithMeta

_ALIGNMENT = 16  # of each tensor in a message, and the bytes before the first


class MainProcessReadError(AccelError, RuntimeError):
    """The main process could not read a batch for all ranks; it raises the original error."""


@frozen
class Round:
    """What rank 0 has read: the batches of all ranks, an error, or the end of the epoch.

    Args:
        parts: The batch of each rank; `None` for ranks without one.
        tensors: The tensors in each rank's batch.
        nbytes: Size of a message; that of the largest batch.
        layouts: The pickled `(nbytes, layouts)` of the batches, text of the error, or `None` at the end.
        error: Why the round could not be read.
    """

    parts: Sequence[BatchWithMeta | None] = ()
    tensors: Sequence[Sequence[Tensor]] = ()
    nbytes: int = 0
    layouts: bytes = pickle.dumps(None)
    error: Exception | None = None

    def is_last(self, rank: int) -> bool:
        """Return whether a rank has had its last batch before this round."""
        return self.error is None and (not self.parts or self.parts[rank] is None)


def send(
    rounds: Iterator[Sequence[BatchWithMeta | None]], collectives: Collectives
) -> Iterator[tuple[BatchWithMeta, bool]]:
    """Scatter rounds from rank 0; yield its own batches, each with whether it is the last."""
    current = _read(rounds)
    collectives.broadcast_object_list([current.layouts], 0)
    while current.parts:
        following = _read(rounds)
        changes = following.layouts != current.layouts
        messages = torch.empty(collectives.world_size, current.nbytes, dtype=torch.uint8, device="cpu")
        for rank, (message, tensors) in enumerate(zip(messages, current.tensors, strict=True)):
            message[0], message[1] = changes, following.is_last(rank)
            with torch.no_grad():
                for target, tensor in zip(_slices(message, tensors), tensors, strict=True):
                    target.copy_(tensor)
        collectives.start_scatter(messages[0], list(messages), 0)()
        if changes:
            collectives.broadcast_object_list([following.layouts], 0)
        if (own := current.parts[0]) is not None:
            yield own, following.is_last(0)
        current = following
    if current.error is not None:
        raise current.error


def receive(collectives: Collectives) -> Iterator[tuple[BatchWithMeta, bool]]:
    """Receive rounds from rank 0; yield this rank's batches, each with whether it is the last."""
    following = _receive_layouts(collectives)
    while isinstance(following, tuple):
        nbytes, layouts = following
        message = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        collectives.start_scatter(message, None, 0)()
        changes, is_last = message[:2].tolist()
        if changes:
            following = _receive_layouts(collectives)
        if (layout := layouts[collectives.rank]) is not None:
            described: list[TensorInformation] = []
            recursively_apply(described.append, layout, test_type=is_tensor_information)
            tensors = _slices(message, described)
            loaded = recursively_apply(
                lambda _, of: next(of), layout, tensors, test_type=is_tensor_information
            )
            yield loaded, bool(is_last)
    if following is not None:
        raise MainProcessReadError(f"The main process failed to read a batch: {following}")


def _read(rounds: Iterator[Sequence[BatchWithMeta | None]]) -> Round:
    """Read the next round; an error, of whatever a dataset does, must reach all ranks."""
    try:
        parts = next(rounds, None)
        if parts is None:
            return Round()
        tensors: list[list[Tensor]] = [[] for _ in parts]
        layouts = [
            recursively_apply(_take, part, own, test_type=_is_plain)
            for part, own in zip(parts[1:], tensors[1:], strict=True)  # rank 0 keeps its own batch
        ]
        nbytes = _ALIGNMENT + max(sum(_aligned(tensor.nbytes) for tensor in own) for own in tensors)
        pickled = pickle.dumps((nbytes, [None, *layouts]))
    except Exception as error:  # noqa: BLE001
        return Round(layouts=pickle.dumps(f"{type(error).__name__}: {error}"), error=error)
    return Round(parts=parts, tensors=tensors, nbytes=nbytes, layouts=pickled)


def _take(tensor: Tensor, tensors: list[Tensor]) -> TensorInformation:
    """Append a tensor to those of its message; return its description for the layout."""
    tensors.append(tensor)
    return TensorInformation(tensor.shape, tensor.dtype)


def _is_plain(leaf: Any) -> bool:
    """Return whether a tensor is sent as bytes; one that is sparse, nested or of a subclass is pickled."""
    return type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested


def _receive_layouts(collectives: Collectives) -> Any:
    received: list[Any] = [None]
    collectives.broadcast_object_list(received, 0)
    return pickle.loads(received[0])  # noqa: S301 - rank 0 of this run has written them


def _slices(message: Tensor, described: Iterable[Tensor | TensorInformation]) -> Iterator[Tensor]:
    """Yield the part of a message for each of its tensors."""
    start = _ALIGNMENT
    for tensor in described:
        nbytes = tensor.shape.numel() * tensor.dtype.itemsize
        # Not a view, whose changes in place would count as changes of all tensors in the message.
        yield message[start : start + nbytes].view(tensor.dtype).view(tensor.shape).data
        start += _aligned(nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
