"""Collectives of a single process: all are the identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from accel_state.backends.base import ReduceOp


@dataclass(frozen=True, slots=True)
class SingleCollectives:
    """The collectives of a world of one; see `Collectives` for their contracts.

    Example:
        >>> SingleCollectives().all_gather_object("me")
        ['me']
    """

    rank: int = 0
    world_size: int = 1
    chunk_bytes: int = 0

    def exchange_chunks(self, chunk: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """Return the only chunk."""
        if meanwhile is not None:
            meanwhile()
        return chunk[None]

    def all_gather_into(
        self, out: Tensor, tensor: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Copy `tensor` into `out`."""
        out.view(-1).copy_(tensor.view(-1))
        if meanwhile is not None:
            meanwhile()

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Do nothing, if `src` is this process."""
        del tensor
        self._check(src)

    def start_scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Callable[[], None]:
        """Copy the only part at once, if `src` is this process."""
        self._check(src)
        if parts is not None and parts[0] is not out:
            out.copy_(parts[0])
        return _done

    def all_reduce(
        self, tensor: Tensor, meanwhile: Callable[[], None] | None = None, *, op: ReduceOp = "sum"
    ) -> None:
        """Do the work of `meanwhile` only."""
        del tensor, op
        if meanwhile is not None:
            meanwhile()

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return a list of the object."""
        return [obj]

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        """Do nothing, if `src` is this process."""
        del objects
        self._check(src)

    def barrier(self) -> None:
        """Do nothing."""

    def _check(self, src: int) -> None:
        if src != 0:
            raise ValueError(f"There is no rank {src!r} to broadcast from: this process is alone.")


def _done() -> None:
    """Do nothing: there is nothing to wait for."""
