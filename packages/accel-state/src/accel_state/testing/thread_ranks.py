"""Several ranks in one process, for tests: threads that run one at a time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accel_state import runtime
from accel_state.collectives import ReduceOp
from accel_state.topology import Topology

_RAISED_TOGETHER = (TypeError, ValueError, RuntimeError)


@dataclass(kw_only=True)
class ThreadRanks:
    """Ranks as threads, with `ThreadCollectives` between them.

    The runtime is switched with the threads: in each, `runtime.current()` is the runtime of its rank.

    Args:
        size: Number of ranks.
        debug: Whether calls are checked, as by `ACCELERATE_DEBUG_MODE`.
        device: The device of all ranks.
        timeout: Seconds after which a collective fails if some ranks have not reached it.

    Attributes:
        messages (list[str]): Names of the collectives so far, in order.

    Example:
        >>> from accel_state.runtime import current
        >>> ranks = ThreadRanks(size=2)
        >>> ranks.run(lambda rank: current().collectives.all_gather_object(rank * 10))
        [[0, 10], [0, 10]]
        >>> ranks.messages
        ['all_gather_object']
    """

    size: int
    debug: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout: float = 60.0
    messages: list[str] = field(default_factory=list[str], init=False)

    def __post_init__(self) -> None:
        self._turn = threading.Lock()
        self._posted: dict[int, Any] = {}
        self._barrier = threading.Barrier(self.size, timeout=self.timeout)

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Run a function on every rank; return what each rank returned, or the exception that it raised."""
        before = runtime.active
        results: list[Any] = [None] * self.size
        threads = [
            threading.Thread(target=self._run_rank, args=(rank, body, results)) for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        runtime.active = before
        return results

    def exchange(self, rank: int, name: str, value: Any) -> list[Any]:
        """Return the values of all ranks, each a copy, once all are in the same collective.

        Raises:
            AssertionError: Ranks are in different collectives.
            threading.BrokenBarrierError: Some ranks have not reached the collective in time.
        """
        own = runtime.active
        if rank == 0:
            self.messages.append(name)
        self._posted[rank] = (name, copy.deepcopy(value))
        self._turn.release()
        try:
            self._barrier.wait()
            posted = [self._posted[other] for other in range(self.size)]
            self._barrier.wait()
        finally:
            self._turn.acquire()
            runtime.active = own
        if any(other != name for other, _ in posted):
            raise AssertionError(f"The ranks are in different collectives: {[other for other, _ in posted]}.")
        return [copy.deepcopy(value) for _, value in posted]

    def _run_rank(self, rank: int, body: Callable[[int], Any], results: list[Any]) -> None:
        own = runtime.Runtime(
            topology=Topology(rank=rank, world_size=self.size, local_rank=rank, local_world_size=self.size),
            collectives=ThreadCollectives(rank, self),
            debug=self.debug,
            device=self.device,
        )
        with self._turn:
            runtime.active = own
            try:
                results[rank] = body(rank)
            except Exception as error:  # noqa: BLE001 - returned to the test
                results[rank] = error
                if not isinstance(error, _RAISED_TOGETHER):  # errors that all ranks may raise together
                    self._barrier.abort()


class ThreadCollectives:
    """`Collectives` between the threads of `ThreadRanks`; each call waits for all ranks."""

    def __init__(self, rank: int, ranks: ThreadRanks) -> None:
        self.rank = rank
        self.world_size = ranks.size
        self._ranks = ranks

    def all_gather_into(self, out: Tensor, tensor: Tensor) -> None:
        tensors = self._alike("all_gather_into", tensor)
        for part, received in zip(out.view(self.world_size, -1), tensors, strict=True):
            part.copy_(received.view(-1))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        tensor.copy_(self._alike("broadcast", tensor)[src])

    def start_scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Callable[[], None]:
        out.copy_(self._exchange("scatter", parts)[src][self.rank])
        return lambda: None  # `out` is filled already

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> None:
        combined = torch.stack([part.to(_wide(part.dtype)) for part in self._alike("all_reduce", tensor)])
        by_op = {"sum": combined.sum, "max": combined.amax, "min": combined.amin, "prod": combined.prod}
        tensor.copy_(by_op[op](0))

    def all_gather_object(self, obj: Any, *, call: str = "") -> list[Any]:
        del call
        return self._exchange("all_gather_object", obj)

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        objects[:] = self._exchange("broadcast_object_list", objects)[src]

    def barrier(self) -> None:
        self._exchange("barrier", None)

    def _alike(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape and dtype."""
        tensors = self._exchange(name, tensor.detach())
        kinds = [(other.dtype, [*other.shape]) for other in tensors]
        if kinds != kinds[:1] * len(kinds) or not tensor.is_contiguous():
            raise AssertionError(f"{name}: the ranks have {kinds}, or a tensor is not contiguous.")
        return tensors

    def _exchange(self, name: str, value: Any) -> list[Any]:
        return self._ranks.exchange(self.rank, name, value)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype in which reducing values of a dtype is exact enough, and implemented."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64
