"""Gather, broadcast and reduce nested data: ranks compare their calls, then send one message per dtype."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from accel_ops.tree import replace_leaves, stray_leaf, walk
from accel_state import runtime
from accel_state.collectives import Collectives, ReduceOp, agree
from accel_state.device_kinds import WITHOUT_STORAGE, runtime_module
from accel_state.runtime import Runtime

T = TypeVar("T")

Reduction = Literal["sum", "mean", "none", "max", "min", "prod"]

_REDUCTIONS: dict[str, ReduceOp] = {
    "sum": "sum",
    "mean": "sum",
    "none": "sum",
    "max": "max",
    "min": "min",
    "prod": "prod",
}

LARGE = 1 << 20
"""Bytes from which a leaf is sent separately without a copy: a copy would cost more than a message."""

MAX_SENT_ALONG = 512  # bytes of pickled objects that are sent with the description of the call


def gather(tensor: T) -> T:
    """Concatenate every tensor of nested data over all processes, along dimension 0, in rank order.

    Sizes of dimension 0 may differ between the processes and may be 0; dtypes and the other dimensions must
    agree. Every dtype is supported.

    Args:
        tensor: Tensors nested in lists, tuples, named tuples, mappings and dataclasses.

    Returns:
        The same structure on every process: a tensor of shape `(n, ...)` becomes `(sum of all n, ...)`, a 0-d
        tensor `(number of processes,)`, on the device of the process and without a graph. In a single process
        `tensor` itself.

    Raises:
        TypeError: A leaf is not a tensor, or is sparse or nested.
        DistributedOperationException: Structures, types or trailing shapes differ. Every process raises
            it, with the path of the leaf and the shapes of all processes.

    Example:
        >>> gather({"loss": torch.ones(1)})
        {'loss': tensor([1.])}
    """
    run = runtime.active
    if _is_alone(run):
        return tensor
    leaves, messages, rows = _agree(run, "gather", tensor, rows_differ=True)
    for paths in messages:
        _gather(run.collectives, leaves, paths, rows)
    return replace_leaves(tensor, iter(leaves.values()))


def gather_object(object: Any) -> Any:  # noqa: A002 - the documented name
    """Concatenate the lists of picklable objects of all processes, in rank order.

    Args:
        object: A list or tuple, of any length.

    Returns:
        A list of the objects of all processes, on every process. In a single process `object` itself.

    Raises:
        TypeError: `object` is neither a list nor a tuple.

    Example:
        >>> gather_object(["cat", "dog"])
        ['cat', 'dog']
    """
    ranks = runtime.active.collectives
    if ranks.world_size == 1:
        return object
    kind = "list" if isinstance(object, (list, tuple)) else type(object).__name__
    parts = agree(ranks, "gather_object()", {"": kind}, object)
    if kind != "list":
        raise TypeError(f"gather_object concatenates lists, not a {type(object)}. Pass [object] instead.")
    return [item for part in parts for item in part]


def broadcast(tensor: T, from_process: int = 0) -> T:
    """Overwrite every tensor of nested data, in place, with the tensor of one process.

    Args:
        tensor: Tensors nested in containers, of the same structure, types and shapes on every process.
        from_process: The rank to broadcast from.

    Returns:
        `tensor`, or an equal structure of the same tensors.

    Raises:
        TypeError: A leaf is not a tensor, or is sparse or nested.
        ValueError: The process `from_process` does not exist.
        DistributedOperationException: Structures, types, shapes or `from_process` differ. Every process
            raises it, with the differences.

    Example:
        >>> broadcast([torch.ones(1)])
        [tensor([1.])]
    """
    run = runtime.active
    ranks = run.collectives
    if ranks.world_size == 1:
        return tensor
    _check_source(from_process, ranks)
    if _is_alone(run):
        return tensor
    leaves, messages, _ = _agree(run, f"broadcast(from_process={from_process})", tensor)
    targets = dict(walk(tensor))
    for paths in messages:
        flat = _joined(leaves, paths)
        ranks.broadcast(flat, from_process)
        if ranks.rank == from_process:
            continue
        for path, part in _split(flat, leaves, paths):
            target = targets[path]
            if target.device.type in WITHOUT_STORAGE or target.data_ptr() != part.data_ptr():
                target.detach().copy_(part)
    return tensor


def broadcast_object_list(object_list: T, from_process: int = 0) -> T:
    """Replace the picklable objects in a list, in place, by the objects of one process.

    Args:
        object_list: A list of the same length on every process.
        from_process: The rank to broadcast from.

    Raises:
        TypeError: It is not a list.
        ValueError: The process `from_process` does not exist.
        DistributedOperationException: Lengths or `from_process` differ. Every process raises it.

    Example:
        >>> broadcast_object_list(["run-7"])
        ['run-7']
    """
    ranks = runtime.active.collectives
    if ranks.world_size == 1:
        return object_list
    _check_source(from_process, ranks)
    kind = f"{len(object_list)} objects" if isinstance(object_list, list) else type(object_list).__name__
    small: bytes | None = None
    if ranks.rank == from_process and len(content := pickle.dumps(object_list)) <= MAX_SENT_ALONG:
        small = content
    call = f"broadcast_object_list(from_process={from_process})"
    sent = agree(ranks, call, {"": kind}, small)[from_process]
    if not isinstance(object_list, list):
        raise TypeError(f"broadcast_object_list fills a list in place, but got a {type(object_list)}.")
    if sent is None:
        ranks.broadcast_object_list(object_list, from_process)
    elif ranks.rank != from_process:
        object_list[:] = pickle.loads(sent)  # noqa: S301 - from another rank of this program
    return object_list


def reduce(tensor: T, reduction: Reduction = "mean", scale: float = 1.0) -> T:
    """Reduce every tensor of nested data over all processes; one message per dtype.

    Args:
        tensor: Tensors nested in containers, of the same structure, types and shapes on every process.
        reduction: `"sum"`, `"mean"`, `"max"`, `"min"`, `"prod"`, or `"none"`, which is another name of
            `"sum"`.
        scale: A factor for the result.

    Returns:
        The same structure with new tensors, on every process, without a graph. The dtype stays, except that
        the mean of integers or booleans, and any scaled result of them, has the default floating-point
        dtype.

    Raises:
        TypeError: A leaf is not a tensor, is sparse or nested, or is complex and `reduction` is neither a
            sum nor a mean.
        ValueError: `reduction` is unknown.
        DistributedOperationException: Structures, types, shapes, `reduction` or `scale` differ. Every process
            raises it, with the differences.

    Example:
        >>> reduce([torch.tensor([1.0, 2.0])], "sum", scale=0.5)
        [tensor([0.5000, 1.0000])]
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"reduction={reduction!r} is unknown. Choose one of {', '.join(map(repr, _REDUCTIONS))}."
        )
    run = runtime.active
    ranks, op, is_alone = run.collectives, _REDUCTIONS[reduction], _is_alone(run)
    name = op if reduction == "none" else reduction
    leaves, messages, _ = _agree(run, f"reduce({name!r}, scale={float(scale)!r})", tensor)
    for path, leaf in leaves.items():
        if leaf.dtype.is_complex and op != "sum":
            raise TypeError(
                f"reduce(reduction={op!r}) of data{path}, a {leaf.dtype} tensor: complex numbers are only "
                'added. Use "sum" or "mean", or reduce torch.view_as_real(tensor).'
            )
    divisor = 1 if is_alone or reduction != "mean" else ranks.world_size
    is_scaled = reduction == "mean" or scale != 1.0
    for paths in messages:
        flat = _joined(leaves, paths)
        total = _operand(flat) if is_scaled else flat
        if total is flat and len(paths) == 1:
            total = flat.clone()
        if not is_alone:
            ranks.all_reduce(total, op=op)
        final = _scaled(total, flat.dtype, divisor, scale) if is_scaled else total
        for path, part in _split(final, leaves, paths):
            # In memory of its own: an in-place change of one result leaves the others alone.
            leaves[path] = part if len(paths) == 1 else part.clone()
    return replace_leaves(tensor, iter(leaves.values()))


def _agree(
    run: Runtime, call: str, data: Any, *, rows_differ: bool = False
) -> tuple[dict[str, Tensor], list[list[str]], dict[str, tuple[int, ...]]]:
    """Compare the calls of all ranks, and plan the messages.

    Args:
        run: The runtime of this process.
        call: The operation and its other arguments.
        data: The nested data.
        rows_differ: Sizes of dimension 0 need not agree.

    Returns:
        The tensors by path, contiguous, on the device of the run, in the order of `walk`; the paths of each
        message, in the same order on every rank: those of a dtype, and large leaves alone; and the number of
        rows of each leaf on every rank.
    """
    leaves: dict[str, Any] = dict(walk(data))
    in_order, is_alone, operation = sorted(leaves), _is_alone(run), call.partition("(")[0]
    rows: dict[str, tuple[int, ...]] = {}
    if not is_alone:
        facts: dict[str, str] = {}
        own: list[int] = []
        for path in in_order:
            leaf = leaves[path]
            shape: list[Any] = []
            if not isinstance(leaf, Tensor):
                facts[path] = type(leaf).__name__
            elif leaf.is_nested:
                facts[path] = "a nested tensor"
            else:
                shape = [*leaf.shape]
                of_rows = ["*"] if rows_differ and shape else shape[:1]
                sizes = ", ".join(map(str, of_rows + shape[1:]))
                facts[path] = f"{str(leaf.dtype).removeprefix('torch.')}[{sizes}]"  # such as float32[2, 3]
            own.append(shape[0] if shape else 1)
        by_rank = agree(run.collectives, call, facts, own)
        rows = dict(zip(in_order, zip(*by_rank, strict=True), strict=False))  # none without leaves
    messages: dict[tuple[str, str], list[str]] = {}
    for path in in_order:
        leaf = leaves[path]
        if not isinstance(leaf, Tensor):
            raise stray_leaf(data, operation)
        if leaf.is_nested or leaf.layout is not torch.strided:
            raise TypeError(
                f"{operation}(): data{path} is a sparse or nested tensor, but collectives take dense ones. "
                f"Pass its {'to_padded_tensor()' if leaf.is_nested else 'to_dense()'}."
            )
        device = leaf.device if run.collectives.world_size == 1 else run.device
        leaves[path] = leaf = leaf.detach().to(device).contiguous().resolve_conj()
        count = max(rows[path]) * leaf.shape[1:].numel() if rows_differ else leaf.numel()
        alone = path if is_alone or count * leaf.dtype.itemsize >= LARGE else ""
        messages.setdefault((str(leaf.dtype), alone), []).append(path)
    return leaves, [*messages.values()], rows


def _joined(leaves: Mapping[str, Tensor], paths: Sequence[str]) -> Tensor:
    """Return leaves in one flat tensor: a single leaf itself, several in new memory."""
    if len(paths) == 1:
        return leaves[paths[0]].view(-1)
    return torch.cat([leaves[path].view(-1) for path in paths])


def _split(flat: Tensor, leaves: Mapping[str, Tensor], paths: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield paths, and views of their leaves in a flat tensor."""
    parts = [flat] if len(paths) == 1 else flat.split([leaves[path].numel() for path in paths])
    for path, part in zip(paths, parts, strict=True):
        yield path, part.view(leaves[path].shape)


def _gather(
    ranks: Collectives, leaves: dict[str, Tensor], paths: Sequence[str], rows: Mapping[str, Sequence[int]]
) -> None:
    """Replace leaves of one dtype by those of all ranks, in one message; `rows` are their rows on each."""
    sizes: list[list[int]] = [[] for _ in range(ranks.world_size)]  # elements by rank and leaf
    for path in paths:
        for of_rank, count in zip(sizes, rows[path], strict=True):
            of_rank.append(count * leaves[path].shape[1:].numel())
    totals = [*map(sum, sizes)]
    longest, is_uneven = max(totals), min(totals) < max(totals)
    flat = _joined(leaves, paths)
    if is_uneven:
        flat = torch.cat([flat, flat.new_empty(longest - len(flat))])
        if flat.device.type in WITHOUT_STORAGE:
            # Ranks pad differently, so the padding must not be in the program of the collective.
            runtime_module(flat.device).flush()
    received = flat.new_empty(ranks.world_size, longest)
    ranks.all_gather_into(received, flat)
    if len(paths) == 1 and not is_uneven:
        leaves[paths[0]] = received.view(sum(rows[paths[0]]), *leaves[paths[0]].shape[1:])
        return
    by_rank = [
        row[:total].split(of_rank) for row, total, of_rank in zip(received, totals, sizes, strict=True)
    ]
    for path, parts in zip(paths, zip(*by_rank, strict=True), strict=True):
        leaves[path] = torch.cat(parts).view(sum(rows[path]), *leaves[path].shape[1:])


def _operand(flat: Tensor) -> Tensor:
    """Return values in a dtype in which they are added and scaled; float8 has no arithmetic."""
    if flat.dtype.is_floating_point or flat.dtype.is_complex:
        return flat.to(torch.float32) if flat.dtype.itemsize == 1 else flat
    return flat.to(torch.float64 if flat.dtype == torch.uint64 else torch.int64)  # beyond int64's values


def _scaled(total: Tensor, dtype: torch.dtype, divisor: int, scale: float) -> Tensor:
    """Divide and scale a total; integers become the default floating-point dtype."""
    if not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.get_default_dtype()
        if total.dtype == torch.int64:
            total = torch.div(total, divisor, out=torch.empty_like(total, dtype=dtype))
            divisor = 1
    if divisor != 1:
        total.div_(divisor)
    if scale != 1.0:
        total.mul_(scale)
    return total.to(dtype)


def _is_alone(run: Runtime) -> bool:
    """Return whether there is no other rank, or the compiler computes with the data of all (XLA's SPMD)."""
    if run.collectives.world_size == 1:
        return True
    return run.device.type in WITHOUT_STORAGE and runtime_module(run.device).is_global()


def _check_source(from_process: int, ranks: Collectives) -> None:
    if not 0 <= from_process < ranks.world_size:
        raise ValueError(
            f"from_process={from_process!r} does not exist: the ranks are 0 to {ranks.world_size - 1}."
        )
