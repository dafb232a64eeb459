"""Gather, broadcast and reduce nested data: ranks compare their calls, then send one message per dtype."""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import wraps
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from accel_ops.tree import recursively_apply, stray_leaf, walk
from accel_state.collectives import Collectives, ReduceOp
from accel_state.device_kinds import WITHOUT_STORAGE, runtime_module
from accel_state.errors import DistributedOperationException
from accel_state.rank_status import Description, compare_calls
from accel_state.runtime import Runtime, current_or_single

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

MAX_SHOWN = 8  # differing leaves that a message lists
MAX_SENT_ALONG = 512  # bytes of pickled objects that are sent with the description of the call


def gather(tensor: T, *, same_shapes: bool = False) -> T:
    """Concatenate every tensor of nested data over all processes, along dimension 0, in rank order.

    Sizes of dimension 0 may differ between the processes and may be 0; dtypes and the other dimensions must
    agree. Every dtype is supported.

    Args:
        tensor: Tensors nested in lists, tuples, named tuples, mappings and dataclasses.
        same_shapes: All shapes are known to be equal on all processes and are not exchanged. If they are not
            equal, the result is undefined.

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
    runtime = current_or_single()
    ranks = runtime.collectives
    if _is_alone(runtime):
        return tensor
    if runtime.debug:
        detail = f"same_shapes={same_shapes}"
        compare_in_debug_mode(ranks, "gather", tensor, detail=detail, rows_differ=not same_shapes)
    leaves = _leaves(tensor, "gather", runtime.device)
    own = [len(leaf) if leaf.dim() else 1 for leaf in leaves.values()]
    by_rank = [own] * ranks.world_size
    if not same_shapes:
        facts = {
            path: describe(leaf.dtype, ("*", *leaf.shape[1:]) if leaf.dim() else ())
            for path, leaf in leaves.items()
        }
        by_rank = agree(ranks, "gather", facts, own, shown=_described(leaves))
    rows = dict(zip(leaves, zip(*by_rank, strict=True), strict=True))
    results: dict[str, Tensor] = {}
    with torch.no_grad():
        for paths in _messages(leaves, {path: max(counts) for path, counts in rows.items()}):
            results |= _gather(ranks, {path: leaves[path] for path in paths}, rows)
    return _rebuild(tensor, results)


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
    runtime = current_or_single()
    if runtime.collectives.world_size == 1:
        return object
    if runtime.debug:
        compare_in_debug_mode(runtime.collectives, "gather_object")
    if not isinstance(object, (list, tuple)):
        raise TypeError(f"gather_object concatenates lists, not a {type(object)}. Pass [object] instead.")
    return [item for part in runtime.collectives.all_gather_object(object) for item in part]


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
    runtime = current_or_single()
    ranks = runtime.collectives
    if ranks.world_size == 1:
        return tensor
    _check_source(from_process, ranks)
    if runtime.debug:
        compare_in_debug_mode(ranks, "broadcast", tensor, detail=f"from_process={from_process}")
    leaves = _leaves(tensor, "broadcast", runtime.device)
    if _is_alone(runtime):
        return tensor
    agree(ranks, f"broadcast(from_process={from_process})", _described(leaves))
    targets = dict(walk(tensor))
    with torch.no_grad():
        for paths in _messages(leaves):
            flat = _joined(leaves, paths)
            ranks.broadcast(flat, from_process)
            if ranks.rank == from_process:
                continue
            for path, part in _split(flat, leaves, paths):
                target = targets[path].detach()
                if target.device.type in WITHOUT_STORAGE or target.data_ptr() != part.data_ptr():
                    target.copy_(part)
    return tensor


def broadcast_from(data: T, src: int = 0) -> T:
    """Call `broadcast`; the argument is named as in a private function that programs use."""
    return broadcast(data, src)


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
    runtime = current_or_single()
    ranks = runtime.collectives
    if ranks.world_size == 1:
        return object_list
    _check_source(from_process, ranks)
    if runtime.debug:
        compare_in_debug_mode(ranks, "broadcast_object_list", detail=f"from_process={from_process}")
    if not isinstance(object_list, list):
        raise TypeError(f"broadcast_object_list fills a list in place, but got a {type(object_list)}.")
    small: bytes | None = None
    if ranks.rank == from_process and len(content := pickle.dumps(object_list)) <= MAX_SENT_ALONG:
        small = content
    call = f"broadcast_object_list(from_process={from_process})"
    sent = agree(ranks, call, {"": f"{len(object_list)} objects"}, small)[from_process]
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
    runtime = current_or_single()
    ranks, op, is_alone = runtime.collectives, _REDUCTIONS[reduction], _is_alone(runtime)
    if runtime.debug and ranks.world_size > 1:
        compare_in_debug_mode(ranks, "reduce", tensor, detail=f"{reduction!r}, scale={scale!r}")
    leaves = _leaves(tensor, "reduce", None if ranks.world_size == 1 else runtime.device)
    if not is_alone:
        name = op if reduction == "none" else reduction
        agree(ranks, f"reduce({name!r}, scale={float(scale)!r})", _described(leaves))
    for path, leaf in leaves.items():
        if leaf.dtype.is_complex and op != "sum":
            raise TypeError(
                f"reduce(reduction={op!r}) of data{path}, a {leaf.dtype} tensor: complex numbers are only "
                'added. Use "sum" or "mean", or reduce torch.view_as_real(tensor).'
            )
    divisor = 1 if is_alone or reduction != "mean" else ranks.world_size
    is_scaled = reduction == "mean" or scale != 1.0
    results: dict[str, Tensor] = {}
    with torch.no_grad():
        for paths in [[path] for path in leaves] if is_alone else _messages(leaves):
            flat = _joined(leaves, paths)
            total = _operand(flat) if is_scaled else flat
            if total is flat and len(paths) == 1:
                total = flat.clone()
            if not is_alone:
                ranks.all_reduce(total, op=op)
            final = _scaled(total, flat.dtype, divisor, scale) if is_scaled else total
            for path, part in _split(final, leaves, paths):
                # In memory of its own: an in-place change of one result leaves the others alone.
                results[path] = part if len(paths) == 1 else part.clone()
    return _rebuild(tensor, results)


def agree(
    ranks: Collectives,
    call: str,
    facts: Mapping[str, str],
    value: Any = None,
    *,
    shown: Mapping[str, str] | None = None,
) -> list[Any]:
    """Compare the calls of all ranks, and exchange a value with each; over the host.

    Args:
        ranks: The collectives of the run.
        call: The operation and its arguments besides the data, such as `"reduce('sum', scale=1.0)"`.
        facts: What must agree of the data, by path.
        value: What the other ranks get to know.
        shown: What a message shows of the data, by path; the facts, if `None`.

    Returns:
        The values of all ranks.

    Raises:
        DistributedOperationException: The calls or facts differ. Every rank raises it, with the differences.
    """
    text = repr((call, sorted(facts.items())))
    own = hashlib.blake2b(text.encode(), digest_size=8).digest(), value
    digests, values = zip(*ranks.all_gather_object(own), strict=True)
    if len({*digests}) == 1:
        return [*values]
    calls, described, texts = zip(*ranks.all_gather_object((call, facts, shown or facts)), strict=True)
    if len({*calls}) > 1:
        listed = ", ".join(f"rank {rank} calls `{other}`" for rank, other in enumerate(calls))
        raise DistributedOperationException(f"The ranks call different collectives: {listed}.")
    paths = dict.fromkeys(path for of_rank in described for path in of_rank)
    differing = [path for path in paths if len({of_rank.get(path) for of_rank in described}) > 1]
    lines = [
        f"  data{path}: "
        + ", ".join(f"rank {rank} has {of_rank.get(path, 'nothing')}" for rank, of_rank in enumerate(texts))
        for path in differing[:MAX_SHOWN]
    ]
    if len(differing) > MAX_SHOWN:
        lines.append(f"  and {len(differing) - MAX_SHOWN} more")
    raise DistributedOperationException(
        f"`{call}` needs the same structure on every rank. These leaves differ:\n" + "\n".join(lines)
    )


def describe(dtype: torch.dtype, shape: Sequence[Any]) -> str:
    """Describe a leaf, such as `float32[2, 3]`."""
    return f"{str(dtype).removeprefix('torch.')}{[*shape]}"


def _described(leaves: Mapping[str, Tensor]) -> dict[str, str]:
    return {path: describe(leaf.dtype, leaf.shape) for path, leaf in leaves.items()}


def _leaves(data: Any, operation: str, device: torch.device | None) -> dict[str, Tensor]:
    """Return the tensors by path, in the same order on every rank, contiguous and on a device."""
    leaves: dict[str, Tensor] = {}
    for path, leaf in walk(data):
        if not isinstance(leaf, Tensor):
            raise stray_leaf(data, operation)
        if leaf.is_nested or leaf.layout is not torch.strided:
            raise TypeError(
                f"{operation}(): data{path} is a sparse or nested tensor, but collectives take dense ones. "
                f"Pass its {'to_padded_tensor()' if leaf.is_nested else 'to_dense()'}."
            )
        leaves[path] = leaf.detach().to(device or leaf.device).contiguous().resolve_conj()
    return {path: leaves[path] for path in sorted(leaves)}


def _rebuild(data: T, results: Mapping[str, Tensor]) -> T:
    in_order = (results[path] for path, _ in walk(data))
    return recursively_apply(lambda _: next(in_order), data)


def _messages(leaves: Mapping[str, Tensor], rows: Mapping[str, int] | None = None) -> list[list[str]]:
    """Return the paths that are sent together, the same on all ranks: those of a dtype; large leaves alone.

    Args:
        leaves: The tensors by path.
        rows: The largest number of rows of each on any rank, if ranks have different ones.
    """
    messages: dict[tuple[str, str], list[str]] = {}
    for path, leaf in leaves.items():
        count = leaf.numel() if rows is None else rows[path] * math.prod(leaf.shape[1:])
        alone = path if count * leaf.dtype.itemsize >= LARGE else ""
        messages.setdefault((str(leaf.dtype), alone), []).append(path)
    return [messages[key] for key in sorted(messages)]


def _joined(leaves: Mapping[str, Tensor], paths: Sequence[str]) -> Tensor:
    """Return leaves in one flat tensor: a single leaf itself, several in new memory."""
    flat = [leaves[path].view(-1) for path in paths]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _split(flat: Tensor, leaves: Mapping[str, Tensor], paths: Sequence[str]) -> Generator[tuple[str, Tensor]]:
    """Yield paths, and views of their leaves in a flat tensor."""
    parts = flat.split([leaves[path].numel() for path in paths])
    for path, part in zip(paths, parts, strict=True):
        yield path, part.view(leaves[path].shape)


def _gather(
    ranks: Collectives, leaves: Mapping[str, Tensor], rows: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """Gather leaves of one dtype in one message; `rows` are the rows of each leaf on each rank."""
    width = {path: math.prod(leaf.shape[1:]) for path, leaf in leaves.items()}
    counts = [[rows[path][rank] * width[path] for path in leaves] for rank in range(ranks.world_size)]
    longest = max(sum(of_rank) for of_rank in counts)
    flat = _joined(leaves, [*leaves])
    if any(of_rank != counts[0] for of_rank in counts):
        flat = torch.cat([flat, flat.new_empty(longest - len(flat))])
        if flat.device.type in WITHOUT_STORAGE:
            # Ranks pad differently, so the padding must not be in the program of the collective.
            runtime_module(flat.device).flush()
    received = flat.new_empty(ranks.world_size, longest)
    ranks.all_gather_into(received, flat)
    parts = [row[: sum(of_rank)].split(of_rank) for row, of_rank in zip(received, counts, strict=True)]
    gathered: dict[str, Tensor] = {}
    for index, (path, leaf) in enumerate(leaves.items()):
        shape = (sum(rows[path]), *leaf.shape[1:])
        is_all = len(leaves) == 1 and received.numel() == math.prod(shape)
        joined = received if is_all else torch.cat([of_rank[index] for of_rank in parts])
        gathered[path] = joined.view(shape)
    return gathered


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


def _is_alone(runtime: Runtime) -> bool:
    """Return whether there is no other rank, or the compiler computes with the data of all (XLA's SPMD)."""
    if runtime.collectives.world_size == 1:
        return True
    return runtime.device.type in WITHOUT_STORAGE and runtime_module(runtime.device).is_global()


def _check_source(from_process: int, ranks: Collectives) -> None:
    if not 0 <= from_process < ranks.world_size:
        raise ValueError(
            f"from_process={from_process!r} does not exist: the ranks are 0 to {ranks.world_size - 1}."
        )


def compare_in_debug_mode(
    ranks: Collectives, operation: str, *data: Any, detail: str = "", rows_differ: bool = False
) -> None:
    """Check that all ranks are about to call the same collective; called by every rank before each.

    Raises:
        DistributedOperationException: Calls differ. Every rank raises it, with a table of each rank's call
            site, collective and data.
    """
    leaves = (_debug_description(path, leaf) for part in data for path, leaf in walk(part))
    compare_calls(ranks, operation, leaves, detail=detail, rows_differ=rows_differ)


def verify_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a collective whose first argument is nested data, so that debug mode compares its calls.

    Raises:
        DistributedOperationException: `ACCELERATE_DEBUG_MODE` is set, and the ranks pass different shapes,
            types or structures. Every rank raises it, before the call.
    """

    @wraps(function)
    def compare_and_call(*args: Any, **kwargs: Any) -> Any:
        runtime = current_or_single()
        if runtime.debug and runtime.collectives.world_size > 1:
            data = args[0] if args else kwargs["tensor"]
            compare_in_debug_mode(runtime.collectives, function.__name__, data)
        return function(*args, **kwargs)

    return compare_and_call


def chained_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that calls collectives, so that their errors also name the function."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            name = f"{function.__module__}.{function.__name__}"
            raise type(error)(
                f"Error found while calling `{name}`. Please see the earlier error for more details."
            ) from error

    return call


def _debug_description(path: str, leaf: Any) -> Description:
    if isinstance(leaf, Tensor):
        return path, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape)
    return path, type(leaf).__name__, None
