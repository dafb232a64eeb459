"""A world of several ranks inside one process: threads of which one runs at a time."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from accel_state import runtime
from accel_state.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT = 60.0  # seconds until a hanging collective is an error


@dataclass
class World:
    """What the ranks share."""

    size: int
    debug: bool = False
    chunk_bytes: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    messages: list[str] = field(default_factory=list)
    turn: threading.Lock = field(default_factory=threading.Lock)
    posted: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.everyone = threading.Barrier(self.size, timeout=TIMEOUT)

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Run a body on every rank; return what each returned or raised."""
        results: list[Any] = [None] * self.size
        threads = [
            threading.Thread(target=self._rank, args=(rank, body, results)) for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        runtime._current = None
        return results

    def _rank(self, rank: int, body: Callable[[int], Any], results: list[Any]) -> None:
        mine = runtime.Runtime(
            topology=Topology(rank=rank, world_size=self.size, local_rank=rank, local_world_size=self.size),
            collectives=ThreadCollectives(rank, self.size, self),
            debug=self.debug,
            device=self.device,
        )
        self.turn.acquire()
        runtime._current = mine
        try:
            results[rank] = body(rank)
        except Exception as error:  # noqa: BLE001 - the test looks at it, whatever it is
            results[rank] = error
            if not isinstance(error, DistributedProblem):
                self.everyone.abort()
        finally:
            self.turn.release()


DistributedProblem = (TypeError, ValueError, RuntimeError)  # what ranks may raise together


@dataclass
class ThreadCollectives:
    """The protocol of `accel_state.backends.base`, between threads."""

    rank: int
    world_size: int
    world: World

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Everyone's value; checks that all ranks are in the same collective."""
        world, mine = self.world, runtime._current
        if self.rank == 0:
            world.messages.append(name)
        world.posted[self.rank] = (name, copy.deepcopy(value))
        world.turn.release()
        try:
            world.everyone.wait()
            found = [world.posted[rank] for rank in range(self.world_size)]
            world.everyone.wait()
        finally:
            world.turn.acquire()
            runtime._current = mine
        assert {other for other, _ in found} == {name}, found
        return [copy.deepcopy(value) for _, value in found]

    @property
    def chunk_bytes(self) -> int:
        return self.world.chunk_bytes

    def exchange_chunks(
        self, chunk: torch.Tensor, meanwhile: Callable[[], None] | None = None
    ) -> torch.Tensor:
        found = self.exchange("exchange_chunks", chunk.detach())
        if meanwhile is not None:
            meanwhile()
        rows = torch.full((self.world_size, self.chunk_bytes), 255, dtype=torch.uint8)
        for row, part in zip(rows, found, strict=True):
            row[: len(part)] = part
        return rows

    def all_gather_into(
        self, out: torch.Tensor, tensor: torch.Tensor, meanwhile: Callable[[], None] | None = None
    ) -> None:
        assert tensor.is_contiguous()
        found = self.exchange("all_gather_into", tensor.detach())
        if meanwhile is not None:
            meanwhile()
        assert {part.shape for part in found} == {tensor.shape}
        out.view(-1).copy_(torch.cat([part.reshape(-1) for part in found]))

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        found = self.exchange("broadcast", tensor.detach())
        assert {part.shape for part in found} == {tensor.shape}
        tensor.copy_(found[src])

    def all_reduce(
        self, tensor: torch.Tensor, meanwhile: Callable[[], None] | None = None, *, op: str = "sum"
    ) -> None:
        found = self.exchange("all_reduce", tensor.detach())
        if meanwhile is not None:
            meanwhile()
        assert {part.shape for part in found} == {tensor.shape}
        assert {part.dtype for part in found} == {tensor.dtype}
        wide = [part.double() if part.dtype.itemsize == 1 else part for part in found]
        combined = torch.stack(wide)
        by_op = {"sum": combined.sum, "max": combined.amax, "min": combined.amin, "prod": combined.prod}
        tensor.copy_(by_op[op](0))

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self.exchange("all_gather_object", obj)

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        objects[:] = self.exchange("broadcast_object_list", objects)[src]

    def barrier(self) -> None:
        self.exchange("barrier", None)


@pytest.fixture
def world() -> Callable[..., World]:
    """Make a world: `world(2).run(body)` calls `body(rank)` on two ranks."""
    return World
