"""Collectives on tensors, and the comparison of calls; for one process, for torch, for lazy devices."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from accel_state.errors import DistributedOperationException
from accel_state.hang_monitor import collective_scope
from accel_state.rank_status import call_site

ReduceOp = Literal["sum", "max", "min", "prod"]
"""How an all-reduce combines the values of the ranks."""


class Collectives(Protocol):
    """Collectives on single tensors; `accel_ops` flattens nested data.

    Every method is called by all ranks in the same order. Tensors are contiguous and on the CPU or on
    the device of the run. Every dtype is supported; an operation that fails raises on the ranks that see it.
    """

    @property
    def rank(self) -> int:
        """Index of this process, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes."""
        ...

    def all_gather_into(self, out: Tensor, tensor: Tensor) -> None:
        """Fill `out` with the tensors of all ranks, in rank order.

        Args:
            out: `world_size * tensor.numel()` elements of the type of `tensor`, any shape.
            tensor: The same number of elements on every rank, possibly 0.
        """
        ...

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Overwrite `tensor` with the tensor of rank `src`, of the same size and dtype."""
        ...

    def start_scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Callable[[], None]:
        """Start to scatter the tensors of rank `src`; `out` receives the one of this rank.

        The tensors must not be used until the returned function has been called.

        Args:
            out: Of the same size and type on all ranks.
            parts: On rank `src` one such tensor for every rank, elsewhere None. The one of `src` itself may
                be `out`.
            src: The sending rank.

        Returns:
            A function that waits until `out` is filled.
        """
        ...

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> None:
        """Overwrite `tensor` with the reduction over all ranks, computed in a wider dtype if need be.

        Args:
            tensor: Of the same size and type on all ranks; not complex unless summed.
            op: The reduction.
        """
        ...

    def all_gather_object(self, obj: Any, *, call: str = "") -> list[Any]:
        """Gather the picklable objects of all ranks, in rank order, for an operation that `call` names."""
        ...

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        """Replace the items of `objects` by those of rank `src`, whose list has the same length."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...


in_place_of_group: Collectives | None = None
"""What the collectives of several processes go through, if it is not a process group."""


def agree(
    ranks: Collectives,
    call: str,
    facts: Mapping[str, str] | None = None,
    value: Any = None,
) -> list[Any]:
    """Compare the calls of all ranks, and exchange a value with each; over the host.

    Args:
        ranks: The collectives of the run.
        call: The operation and its arguments besides the data, such as `"reduce('sum', scale=1.0)"`.
        facts: What must agree of the data, by path.
        value: What the other ranks get to know.

    Returns:
        The values of all ranks.

    Raises:
        DistributedOperationException: The calls or facts differ. Every rank raises it, with a table of each
            rank's call site, call, and the data in which they differ.
    """
    facts = facts or {}
    digest = hashlib.blake2b(repr((call, sorted(facts.items()))).encode(), digest_size=8).digest()
    values: list[Any] = []
    for other, of_rank in ranks.all_gather_object((digest, value), call=call):
        if other != digest:
            break
        values.append(of_rank)
    else:
        return values
    location, _ = call_site(sys._getframe())
    calls = ranks.all_gather_object((location, call, facts))
    is_same_call = len({text for _, text, _ in calls}) == 1
    rows = [("rank", "call site", "call", "data")]
    for rank, (location, text, of_rank) in enumerate(calls):
        odd = [
            f"data{path}: {fact}"
            for path, fact in of_rank.items()
            if not is_same_call or any(others.get(path) != fact for *_, others in calls)
        ]
        more = f"; and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        rows.append((str(rank), location, text, ("; ".join(odd[:_SHOWN]) or "-") + more))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    problem = "the same operation on data that differs" if is_same_call else "different operations"
    raise DistributedOperationException(
        f"The processes call {problem}. All stop here, since their collectives cannot complete.\n{table}"
    )


@dataclass(frozen=True, slots=True)
class SingleCollectives:
    """The collectives of a world of one; see `Collectives` for their contracts.

    Example:
        >>> SingleCollectives().all_gather_object("me")
        ['me']
    """

    rank: int = 0
    world_size: int = 1

    def all_gather_into(self, out: Tensor, tensor: Tensor) -> None:
        out.view(-1).copy_(tensor.view(-1))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Do nothing: the tensor is that of the only rank."""

    def start_scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Callable[[], None]:
        del src
        if parts is not None and parts[0] is not out:
            out.copy_(parts[0])
        return _wait_for_nothing

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> None:
        """Do nothing: the tensor is the sum."""

    def all_gather_object(self, obj: Any, *, call: str = "") -> list[Any]:
        del call
        return [obj]

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        """Do nothing: the objects are those of the only rank."""

    def barrier(self) -> None:
        """Do nothing: there is no other rank."""


def _wait_for_nothing() -> None:
    """Do nothing: the tensor is filled already."""


# Every backend sends these types unchanged; all other types are sent as bytes.
_SENDABLE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int8, torch.uint8}
)
# Types that are reduced in a wider type, which holds their sums.
_WIDER = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    **{
        getattr(torch, name): torch.float32
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    },
}
_OPS: dict[ReduceOp, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
_SIGN = -(1 << 63)
_SHOWN = 6  # differing leaves of each rank in a table
_HEAD = 8  # bytes of the size that is sent before a pickled object
_FIRST_BYTES = 1 << 10  # that the first message of an object holds: most need no other


class TorchCollectives:
    """The collectives of the default process group; see `Collectives` for their contracts."""

    __slots__ = ("_device", "_device_types", "rank", "world_size")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        world: Any = dist.group.WORLD
        self._device_types = frozenset(device.type for device in world._device_types)
        self.rank: int = dist.get_rank()
        self.world_size: int = dist.get_world_size()

    def all_gather_into(self, out: Tensor, tensor: Tensor) -> None:
        if tensor.numel() == 0:
            return
        with collective_scope("all_gather"):
            target, source = self._transferable(out), self._transferable(tensor).resolve_conj()
            # Flat, since backends differ in which shapes of `out` they take.
            dist.all_gather_into_tensor(_as_sendable(target.view(-1)), _as_sendable(source.view(-1)))
            if target is not out:
                out.copy_(target)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        if tensor.numel() == 0:
            return
        with collective_scope("broadcast"):
            buffer = self._transferable(tensor)
            dist.broadcast(_as_sendable(buffer), src=src)
            if buffer is not tensor:
                tensor.copy_(buffer)

    def start_scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Callable[[], None]:
        if out.numel() == 0:
            return _wait_for_nothing
        if out.device.type not in self._device_types:
            with collective_scope("scatter"):
                target = self._transferable(out)
                dist.scatter(_as_sendable(target), _sources(out, target, parts), src=src)
                out.copy_(target)
            return _wait_for_nothing
        work: Any = dist.scatter(_as_sendable(out), _sources(out, out, parts), src=src, async_op=True)

        def finish() -> None:
            with collective_scope("scatter"):
                work.wait()

        return finish

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> None:
        if tensor.numel() == 0:
            return
        with collective_scope("all_reduce"):
            buffer = self._transferable(tensor)
            wider = _WIDER.get(buffer.dtype)
            total = buffer if wider is None else buffer.to(wider)
            if total.is_complex():
                total = torch.view_as_real(total)
            elif total.dtype == torch.uint64:  # two's complement: sum and product are the same, signed or not
                total = total.view(torch.int64)
            unsigned = buffer.dtype == torch.uint64 and op in {"max", "min"}
            if unsigned:
                total.bitwise_xor_(_SIGN)  # This maps the order of unsigned numbers to that of signed ones.
            dist.all_reduce(total, op=_OPS[op])
            if unsigned:
                total.bitwise_xor_(_SIGN)
            if wider is not None or buffer is not tensor:
                tensor.copy_(buffer if wider is None else total)

    def all_gather_object(self, obj: Any, *, call: str = "") -> list[Any]:
        del call
        content = pickle.dumps(obj)
        content = (_HEAD + len(content)).to_bytes(_HEAD, sys.byteorder) + content
        device = "cpu" if "cpu" in self._device_types else self._device
        size = _FIRST_BYTES
        with collective_scope("all_gather_object"):
            while True:
                own = torch.frombuffer(bytearray(content[:size].ljust(size, b"\0")), dtype=torch.uint8)
                received = torch.empty(self.world_size * size, dtype=torch.uint8, device=device)
                dist.all_gather_into_tensor(received, own.to(device))
                rows: Any = received.cpu().numpy().reshape(self.world_size, size)
                longest = int(rows[:, :_HEAD].copy().view("int64").max())
                if longest <= size:
                    return [*map(pickle.loads, rows[:, _HEAD:])]  # of our ranks
                size = longest

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        with collective_scope("broadcast_object_list"):
            device = None if "cpu" in self._device_types else self._device
            dist.broadcast_object_list(objects, src=src, device=device)

    def barrier(self) -> None:
        with collective_scope("barrier"):
            # Without a CPU backend the barrier runs on the device; torch would guess which one.
            index = None if "cpu" in self._device_types else self._device.index
            dist.barrier(device_ids=None if index is None else [index])

    def _transferable(self, tensor: Tensor) -> Tensor:
        """Return a tensor, or a copy on the run's device where the tensor's own has no backend."""
        return tensor if tensor.device.type in self._device_types else tensor.to(self._device)


def _sources(out: Tensor, target: Tensor, parts: Sequence[Tensor] | None) -> list[Tensor] | None:
    """Return the tensors to scatter, on the device of `target`, the staged `out`."""
    if parts is None:
        return None
    return [_as_sendable(target if part is out else part.to(target.device)) for part in parts]


def group_timeout(device: torch.device, group: dist.ProcessGroup | None = None) -> timedelta:
    """Return the timeout of collectives of the backend of a device; in the default group, if `None`."""
    try:
        used: Any = group or dist.group.WORLD
        return used._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # Backends of third parties have no such option.
        return dist.default_pg_timeout


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of collectives of a group, the default one if `None`."""
    c10d: Any = dist.distributed_c10d
    (dist.set_timeout if hasattr(dist, "set_timeout") else c10d._set_pg_timeout)(timeout, group)


def _as_sendable(tensor: Tensor) -> Tensor:
    """View a contiguous tensor in a dtype that every backend sends."""
    if tensor.dtype in _SENDABLE:
        return tensor
    flat = tensor.reshape(-1)
    return torch.view_as_real(flat) if flat.is_complex() else flat.view(torch.uint8)


# Types that every recording device has collectives for, and the types as which they are sent or reduced.
_RECORDED = {dtype: dtype for dtype in (*_SENDABLE, torch.int16)}
_SENT_AS = _RECORDED | {torch.bool: torch.uint8}
_REDUCED_AS = _RECORDED | {torch.bool: torch.int32}


class RecordedCollectives:
    """The collectives of a device that records operations (XLA); see `Collectives` for their contracts.

    Collectives on the device's tensors become a part of the recorded program and do not wait. CPU tensors,
    objects, and dtypes that the device lacks use the process group of the hosts.

    Args:
        device: The device of this process.
        own: The runtime module of its device kind, `DeviceKind.own_runtime`.
    """

    def __init__(self, device: torch.device, own: Any) -> None:
        self._host = host = TorchCollectives(torch.device("cpu"))
        self._device = device
        self._own = own
        self.rank: int = host.rank
        self.world_size: int = host.world_size
        self.start_scatter = host.start_scatter
        self.all_gather_object = host.all_gather_object
        self.broadcast_object_list = host.broadcast_object_list
        # Recorded operations are not waited for: they run when a value is needed.
        self.barrier = host.barrier

    def all_gather_into(self, out: Tensor, tensor: Tensor) -> None:
        if not self._is_recorded(tensor):
            self._host.all_gather_into(out, tensor)
            return
        with collective_scope("all_gather"):
            gathered = self._own.all_gather(tensor.reshape(-1).to(_SENT_AS[tensor.dtype]))
            out.copy_(gathered.reshape(out.shape))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        if not self._is_recorded(tensor):
            self._host.broadcast(tensor, src)
            return
        with collective_scope("broadcast"):
            sent = self._own.broadcast(tensor.to(_SENT_AS[tensor.dtype]), is_source=self.rank == src)
            tensor.copy_(sent)

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> None:
        if not self._is_recorded(tensor):
            self._host.all_reduce(tensor, op=op)
            return
        with collective_scope("all_reduce"):
            tensor.copy_(self._own.all_reduce(tensor.to(_REDUCED_AS[tensor.dtype]), op))

    def _is_recorded(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device.type and tensor.dtype in _SENT_AS and tensor.numel() > 0
