"""Collectives of a single process that acts as one rank: all other ranks have the same data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.tree import recursively_apply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from accel_cli.commands.check.recorder import CollectiveRecorder
    from accel_state.backends.base import ReduceOp


@dataclass(frozen=True, slots=True, eq=False)
class AloneCollectives:
    """`accel_state.backends.base.Collectives` without other processes."""

    recorder: CollectiveRecorder
    rank: int
    world_size: int
    chunk_bytes: int = 0

    def exchange_chunks(self, chunk: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """Return the same chunk for every rank."""
        self._do("all_gather", meanwhile)
        return chunk.expand(self.world_size, -1)

    def all_gather_into(
        self, out: Tensor, tensor: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Leave `out` unchanged."""
        del out, tensor
        self._do("all_gather", meanwhile)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Leave the tensor unchanged."""
        del tensor, src
        self._do("broadcast")

    def start_scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Callable[[], None]:
        """Leave `out` unchanged."""
        del out, parts, src
        self._do("scatter")
        return _nothing

    def all_reduce(
        self, tensor: Tensor, meanwhile: Callable[[], None] | None = None, *, op: ReduceOp = "sum"
    ) -> None:
        """Leave the tensor unchanged."""
        del tensor, op
        self._do("all_reduce", meanwhile)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the same object for every rank."""
        self._do("all_gather_object")
        return [obj] * self.world_size

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        """Leave the objects unchanged."""
        del objects, src
        self._do("broadcast_object_list")

    def barrier(self) -> None:
        """Return at once."""
        self._do("wait_for_everyone")

    def _do(self, kind: str, meanwhile: Callable[[], None] | None = None) -> None:
        self.recorder.saw(kind)
        if meanwhile is not None:
            meanwhile()


def operations(recorder: CollectiveRecorder, world_size: int) -> dict[str, Callable[..., Any]]:
    """Return replacements of the operations of `accel_ops.collect` and `accel_ops.pad`."""

    def gather(tensor: Any, *, same_shapes: bool = False) -> Any:
        del same_shapes
        recorder.saw("gather")
        return recursively_apply(_repeated, tensor, error_on_other_type=True)

    def _repeated(leaf: Tensor) -> Tensor:
        return torch.cat([leaf.reshape(1) if leaf.ndim == 0 else leaf] * world_size)

    def gather_object(object: Any) -> Any:  # noqa: A002 - the documented name
        recorder.saw("gather_object")
        return [*object] * world_size

    def broadcast(tensor: Any, from_process: int = 0) -> Any:
        del from_process
        recorder.saw("broadcast")
        return tensor

    def broadcast_object_list(object_list: Any, from_process: int = 0) -> Any:
        del from_process
        recorder.saw("broadcast_object_list")
        return object_list

    def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
        del reduction
        recorder.saw("reduce")
        return recursively_apply(lambda leaf: leaf * scale, tensor, error_on_other_type=True)

    def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        del dim, pad_index, pad_first
        recorder.saw("pad_across_processes")
        return tensor

    made = (gather, gather_object, broadcast, broadcast_object_list, reduce, pad_across_processes)
    return {function.__name__: function for function in made}


def _nothing() -> None:
    pass
