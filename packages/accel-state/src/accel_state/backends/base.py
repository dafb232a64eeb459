"""The protocol of collectives on single tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

ReduceOp = Literal["sum", "max", "min", "prod"]
"""How an all-reduce combines the values of the ranks."""


class Collectives(Protocol):
    """Collectives on single tensors; `accel_ops` flattens nested data.

    Every method is called by all ranks in the same order. Tensors are contiguous and live on the CPU or on
    the device of the run. Every dtype is supported; an operation that fails raises on the ranks that see it.

    Work that a caller passes as `meanwhile` is done exactly once, while the message is under way if the
    backend allows it; it must not touch the contents of the tensors.
    """

    @property
    def rank(self) -> int:
        """Index of this process, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes."""
        ...

    @property
    def chunk_bytes(self) -> int:
        """The size of the largest chunk that `exchange_chunks` takes, 0 where it cannot be used."""
        ...

    def exchange_chunks(self, chunk: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """Send some bytes to every rank, each rank as many as it likes.

        Ranks thus need not know of each other how much they send, and can compare in the message itself
        whether their calls fit together.

        Args:
            chunk: Up to `chunk_bytes` of type uint8, one-dimensional, on the CPU.
            meanwhile: Work for the time that this takes.

        Returns:
            A tensor of shape `(world_size, chunk_bytes)` with the chunk of each rank at the beginning of its
            row, and anything behind. The next call overwrites it, and may return it again.
        """
        ...

    def all_gather_into(
        self, out: Tensor, tensor: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Fill `out` with the tensors of all ranks, in rank order.

        Args:
            out: `world_size * tensor.numel()` elements of the type of `tensor`, any shape.
            tensor: The same number of elements on every rank, possibly 0.
            meanwhile: Work for the time that this takes.
        """
        ...

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Overwrite `tensor` with that of rank `src`, which has the same size and type."""
        ...

    def start_scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Callable[[], None]:
        """Begin to fill `out` with this rank's tensor of those of rank `src`.

        The tensors are left alone until what is returned has been called.

        Args:
            out: Of the same size and type on all ranks.
            parts: On rank `src` one such tensor for every rank, elsewhere None. The one of `src` itself may
                be `out`.
            src: The sending rank.

        Returns:
            What waits until `out` is filled.
        """
        ...

    def all_reduce(
        self, tensor: Tensor, meanwhile: Callable[[], None] | None = None, *, op: ReduceOp = "sum"
    ) -> None:
        """Overwrite `tensor` with the values of all ranks combined, if need be in a wider type.

        Args:
            tensor: Of the same size and type on all ranks; real unless added.
            meanwhile: Work for the time that this takes.
            op: The reduction.
        """
        ...

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Gather the picklable objects of all ranks, in rank order."""
        ...

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        """Replace the items of `objects` by those of rank `src`, whose list is as long."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...
