"""Traverse, move and convert nested data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from types import NoneType
from typing import Any, ParamSpec, TypeGuard, TypeVar

import torch
from torch import Tensor

from accel_state import runtime
from accel_state.errors import DistributedOperationException

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class TensorInformation:
    """Shape and dtype of a tensor.

    Example:
        >>> get_data_structure({"x": torch.zeros(2, 3)})
        {'x': TensorInformation(shape=torch.Size([2, 3]), dtype=torch.float32)}
    """

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor (parameters and other subclasses included)."""
    return isinstance(tensor, torch.Tensor)


def is_tensor_information(tensor_info: Any) -> TypeGuard[TensorInformation]:
    """Return whether a value is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Return whether a value is a named tuple.

    Example:
        >>> is_namedtuple((1, 2))
        False
    """
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def honor_type(obj: Any, generator: Any) -> Any:
    """Create a value of the type of `obj` from items, by the constructor, or by fields for a named tuple.

    Example:
        >>> honor_type((0,), [1, 2])
        (1, 2)
    """
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def children(data: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys (or indices, or field names) and values of a container; None for a leaf."""
    if isinstance(data, Tensor):
        return None
    if isinstance(data, (list, tuple)):
        return list(enumerate(data))
    if isinstance(data, Mapping):
        return list(data.items())
    if is_dataclass_instance(data):
        return [(field.name, getattr(data, field.name)) for field in dataclasses.fields(data)]
    return None


def replace_leaves(data: T, values: Iterator[Any]) -> T:
    """Return the same structure with other leaves, in the order of `walk`."""
    inside = children(data)
    if inside is None:
        new: Any = next(values)
        return new
    return rebuild(data, [replace_leaves(value, values) for _, value in inside])


def is_dataclass_instance(data: Any) -> bool:
    """Return whether a value is a dataclass to traverse; a `TensorInformation` is a leaf."""
    return dataclasses.is_dataclass(data) and not isinstance(data, (type, TensorInformation))


def rebuild(data: Any, values: Iterable[Any]) -> Any:
    """Return a container with the type and keys of `data` and new values, in the order of `children`."""
    if isinstance(data, (list, tuple)):
        content: Any = list(values)
    elif isinstance(data, Mapping):
        content = dict(zip(data, values, strict=True))
        if type(data) is dict:
            return content
    else:
        # Without `__init__`, whose arguments may differ from the fields.
        new = object.__new__(type(data))
        getattr(new, "__dict__", {}).update(getattr(data, "__dict__", {}))
        for field, value in zip(dataclasses.fields(data), values, strict=True):
            object.__setattr__(new, field.name, value)
        return new
    try:
        return honor_type(data, content)
    except (TypeError, ValueError):
        if not hasattr(data, "__setitem__"):
            raise
    # The constructor takes something else than items, as a `defaultdict`'s does.
    replaced: Any = copy(data)
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        replaced[key] = value
    return replaced


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to every leaf selected by `test_type`; containers keep their types.

    Args:
        func: Called with the leaf, then `args` and `kwargs`.
        data: A leaf, or leaves nested in lists, tuples, named tuples, mappings and dataclasses.
        *args: Passed on to `func`.
        test_type: Selects the leaves for `func`; the others stay unchanged.
        error_on_other_type: Raise an error for leaves that fail the test instead of keeping them.
        **kwargs: Passed on to `func`.

    Returns:
        The same structure with the results in place of the leaves.

    Raises:
        TypeError: A leaf fails the test and `error_on_other_type` is set; the message has its path and type.

    Example:
        >>> recursively_apply(lambda t, by: t * by, {"x": [torch.ones(2), "kept"]}, by=3)
        {'x': [tensor([3., 3.]), 'kept']}
    """
    return _apply(
        lambda leaf: func(leaf, *args, **kwargs),
        data,
        test_type,
        (lambda: stray_leaf(data, _name(func), test_type)) if error_on_other_type else None,
    )


def _apply(
    func: Callable[[Any], Any],
    data: Any,
    test_type: Callable[[Any], bool],
    error: Callable[[], TypeError] | None,
) -> Any:
    # An inner function that calls itself would be a cycle, which holds the data until Python collects it.
    if not isinstance(data, (list, tuple, Mapping)):
        if test_type(data):
            return func(data)
        if not is_dataclass_instance(data):
            if error is not None:
                raise error()
            return data
    return rebuild(data, [_apply(func, value, test_type, error) for _, value in children(data) or ()])


def walk(data: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """Yield every leaf with its path, such as `['logits'][0]`, depth first.

    Example:
        >>> list(walk({"a": [1, 2], "b": 3}))
        [("['a'][0]", 1), ("['a'][1]", 2), ("['b']", 3)]
    """
    inside = children(data)
    if inside is None:
        yield path, data
        return
    names = getattr(data, "_fields", None) if isinstance(data, tuple) else None
    attribute = names or not isinstance(data, (list, tuple, Mapping))
    for position, (key, value) in enumerate(inside):
        if attribute:
            step = f".{names[position] if names else key}"
        elif isinstance(key, (str, bytes, int, float, tuple, NoneType)):
            step = f"[{key!r}]"
        else:  # its repr may contain an address, and paths are equal in every process
            step = f"[<{type(key).__qualname__} {position}>]"
        yield from walk(value, path + step)


def stray_leaf(data: Any, operation: str, test_type: Callable[[Any], bool] = is_torch_tensor) -> TypeError:
    """Create the error for data with a leaf that fails a test, with the first such leaf and its path."""
    path, leaf = next((path, leaf) for path, leaf in walk(data) if not test_type(leaf))
    return TypeError(
        f"Unsupported type {type(leaf)} at {'data' + path} passed to `{operation}`. Only nested "
        f"lists, tuples, dicts and dataclasses of objects that are valid for `{_name(test_type)}` can "
        "be passed. Remove other objects first."
    )


def find_batch_size(data: Any) -> int:
    """Return the size of the first dimension of the first tensor that has a dimension.

    Raises:
        ValueError: `data` is empty.
        TypeError: There are leaves, and none is a tensor with a dimension.

    Example:
        >>> find_batch_size({"ids": torch.zeros(8, 3)})
        8
    """
    other: Any = None
    empty = True
    for _, leaf in walk(data):
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0:
            return leaf.shape[0]
        other, empty = leaf, False
    if empty:
        raise ValueError(f"Cannot find the batch size from empty {type(data)}.")
    kind = "a tensor without dimensions" if isinstance(other, torch.Tensor) else type(other)
    raise TypeError(f"Can only find the batch size of tensors but got {kind}.")


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the batch size as `find_batch_size` does, but None if there is none.

    Example:
        >>> ignorant_find_batch_size(["no", "tensors"]) is None
        True
    """
    try:
        return find_batch_size(data)
    except (TypeError, ValueError):
        return None


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor; None without a tensor.

    Example:
        >>> find_device({"a": "text", "b": torch.ones(1)})
        device(type='cpu')
    """
    return next((leaf.device for _, leaf in walk(data) if isinstance(leaf, torch.Tensor)), None)


def get_data_structure(data: Any) -> Any:
    """Replace every tensor by its `TensorInformation`."""
    return recursively_apply(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Invert `get_data_structure`: replace each `TensorInformation` by an uninitialised CPU tensor."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype, device="cpu"),
        data_structure,
        test_type=is_tensor_information,
    )


def listify(data: Any) -> Any:
    """Replace every tensor by a number or nested lists of numbers.

    Example:
        >>> listify({"loss": torch.tensor(0.5), "ids": torch.arange(2)})
        {'loss': 0.5, 'ids': [0, 1]}
    """
    return recursively_apply(lambda tensor: tensor.detach().tolist(), data)


def slice_tensors(
    data: T, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> T:
    """Slice every tensor along its first dimension; a 0-d tensor stays unchanged.

    Args:
        data: Nested data.
        tensor_slice: The slice of dimension 0.
        process_index: Unused. The loader that dispatches batches passes it to its slicing function
            (`slice_fn_for_dispatch`), of which this function is the default.
        num_processes: Unused, likewise.

    Example:
        >>> slice_tensors([torch.arange(4), "kept"], slice(1, 3))
        [tensor([1, 2]), 'kept']
    """
    del process_index, num_processes
    return recursively_apply(lambda tensor: tensor[tensor_slice] if tensor.ndim else tensor, data)


def concatenate(data: list[Any] | tuple[Any, ...], dim: int = 0) -> Any:
    """Concatenate several structures of the same form, leaf by leaf.

    Args:
        data: The structures; all leaves are tensors, and 0-d tensors are stacked. In a single structure,
            leaves that are not tensors stay unchanged.
        dim: The dimension.

    Raises:
        ValueError: There is no structure.
        TypeError: A leaf of several structures is not a tensor.

    Example:
        >>> concatenate([{"x": torch.zeros(1)}, {"x": torch.ones(2)}])
        {'x': tensor([0., 1., 1.])}
    """
    if not data:
        raise ValueError(f"Cannot concatenate the empty {data!r}.")
    first = data[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim) if first.ndim else torch.stack(list(data))
    if children(first) is None:
        if len(data) == 1:
            return first
        raise TypeError(f"Can only concatenate tensors but got {type(first)}")
    if isinstance(first, Mapping):
        return rebuild(first, [concatenate([part[key] for part in data], dim=dim) for key in first])
    columns = zip(*([value for _, value in children(part) or ()] for part in data), strict=True)
    return rebuild(first, [concatenate(column, dim=dim) for column in columns])


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def send_to_device(
    tensor: T,
    device: str | int | torch.device,
    non_blocking: bool = False,
    skip_keys: str | Collection[str] | None = None,
    *,
    reuse_containers: bool = False,
) -> T:
    """Move all objects with a `to` method in nested data to a device; other leaves stay unchanged.

    Args:
        tensor: Tensors, or other objects with a `to` method (such as a tokenizer's batch), nested in lists,
            tuples, named tuples, mappings and dataclasses.
        device: The target device.
        non_blocking: Do not wait for copies from pinned memory.
        skip_keys: Keys of mappings (and fields of dataclasses) whose values are not moved.
        reuse_containers: Return a container itself, instead of a copy, if nothing in it has moved; replace
            the fields of a dataclass in place. What several layers write into a container is then kept.

    Returns:
        The same structure on the device. A tensor that is already there is not copied.

    Example:
        >>> send_to_device({"x": torch.ones(1), "label": "cat"}, "cpu")
        {'x': tensor([1.]), 'label': 'cat'}
    """
    skipped = () if skip_keys is None else (skip_keys,) if isinstance(skip_keys, str) else skip_keys
    # Not every `to` method accepts `npu` without an index: it means the first device.
    where = f"{device}:0" if device == "npu" else device
    return _send(tensor, where, non_blocking, skipped, reuse_containers)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Broadcast a tensor from one rank to all ranks, which need not know its shape.

    Args:
        tensor: The tensor on one process, None on the others.

    Raises:
        DistributedOperationException: No process has a tensor, or several have; every process raises it.

    Example:
        >>> copy_tensor_to_devices(torch.ones(1))
        tensor([1.])
    """
    run = runtime.active
    collectives = run.collectives
    own = None if tensor is None else (tensor.dtype, tuple(tensor.shape))
    calls = collectives.all_gather_object(own)
    owners = [rank for rank, facts in enumerate(calls) if facts is not None]
    if len(owners) != 1:
        problem = f"ranks {owners} have one" if owners else "no rank has one"
        raise DistributedOperationException(
            f"copy_tensor_to_devices needs a tensor on exactly one rank; {problem}."
        )
    if tensor is None:
        dtype, shape = calls[owners[0]]
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    copy = tensor.detach().to(run.device, copy=True).contiguous()
    collectives.broadcast(copy, owners[0])
    return copy


def _send(
    data: Any, device: str | int | torch.device, non_blocking: bool, skipped: Collection[str], reuse: bool
) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    # A mapping may look up missing attributes among its items.
    owner: Any = type(data) if isinstance(data, Mapping) else data
    if callable(getattr(owner, "to", None)) and not isinstance(data, type):
        movable: Any = data
        try:
            return movable.to(device, non_blocking=non_blocking)
        except TypeError as error:
            if "non_blocking" not in str(error):
                raise
            return movable.to(device)
    inside = children(data)
    if inside is None:
        return data
    values = [
        value if key in skipped else _send(value, device, non_blocking, skipped, reuse)
        for key, value in inside
    ]
    if reuse and all(new is old for new, (_, old) in zip(values, inside, strict=True)):
        return data
    if reuse and is_dataclass_instance(data):
        with contextlib.suppress(dataclasses.FrozenInstanceError):
            for value, (name, _) in zip(values, inside, strict=True):
                setattr(data, name, value)
            return data
    return rebuild(data, values)


_LOW = frozenset({torch.float16, torch.bfloat16})


def convert_to_fp32(tensor: T) -> T:
    """Convert the float16 and bfloat16 tensors in nested data to float32; other leaves stay unchanged.

    Example:
        >>> convert_to_fp32([torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int64)])
        [tensor([1.]), tensor([1])]
    """
    return recursively_apply(
        torch.Tensor.float,
        tensor,
        test_type=lambda leaf: isinstance(leaf, torch.Tensor) and leaf.dtype in _LOW,
    )


def convert_outputs_to_fp32(model_forward: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that its float16 and bfloat16 outputs are converted to float32.

    Example:
        >>> convert_outputs_to_fp32(lambda x: x.half())(torch.ones(1))
        tensor([1.])
    """

    @functools.wraps(model_forward)
    def forward(*args: P.args, **kwargs: P.kwargs) -> T:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def is_dtensor(value: object) -> bool:
    """Return whether a value is a `DTensor`."""
    # There is no DTensor before this import.
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a `DTensor`, sharing its memory; return any other tensor unchanged."""
    return local_parts([tensor])[0]


def local_parts(tensors: Iterable[Any]) -> list[Tensor]:
    """Return this rank's shards of tensors; calls no function for each of what may be thousands."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    # `to_local()` would also wait for the tensor and record autograd.
    return [tensor._local_tensor if isinstance(tensor, kind) else tensor for tensor in tensors]


def by_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return this rank's shards of tensors, grouped by device, for operations on many tensors at once."""
    groups: dict[torch.device, list[Tensor]] = {}
    for part in local_parts(tensors):
        groups.setdefault(part.device, []).append(part)
    return [*groups.values()]


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the detached full tensor; a collective over all ranks of a `DTensor`'s mesh."""
    sharded: Any = tensor.detach()
    return sharded.full_tensor() if is_dtensor(sharded) else sharded
