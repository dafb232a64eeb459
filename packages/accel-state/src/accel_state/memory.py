"""Release memory of objects and of devices, and find a batch size that fits into memory."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

import torch

from accel_state.device_kinds import available_kind

if TYPE_CHECKING:
    P = ParamSpec("P")
    R = TypeVar("R")

_SHRINK = 0.9
_MESSAGES = (
    " out of memory",  # CUDA, XPU, MPS, HPU, NPU
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's error when there is no memory for its workspace
    "CUBLAS_STATUS_ALLOC_FAILED",
)

logger = logging.getLogger(__name__)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release cached memory of the device to the driver; do nothing on the CPU.

    Args:
        garbage_collection: Collect unreachable objects first.

    Example:
        >>> clear_device_cache()
    """
    if garbage_collection:
        gc.collect()
    empty_cache = getattr(available_kind().module, "empty_cache", None)
    if empty_cache is not None:
        empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Release objects and their memory.

    Args:
        *objects: Models, optimizers, tensors … A function cannot delete its caller's names: the caller must
            reassign them.

    Example:
        >>> model, optimizer = object(), object()
        >>> model, optimizer = release_memory(model, optimizer)
        >>> model is None
        True
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Return whether an error means that device or host memory was too small.

    Example:
        >>> should_reduce_batch_size(RuntimeError("CUDA out of memory. Tried to allocate 1 GiB"))
        True
        >>> should_reduce_batch_size(RuntimeError("shapes differ"))
        False
    """
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exception, RuntimeError) and any(text in str(exception) for text in _MESSAGES)


@overload
def find_executable_batch_size(
    function: Callable[Concatenate[int, P], R],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[P, R]: ...
@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[[Callable[Concatenate[int, P], R]], Callable[P, R]]: ...
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorate a function so that it is retried with smaller batches until one fits into memory.

    The decorated function is called without its first argument, the batch size. The next call starts with the
    batch size found.

    Args:
        function: Takes the batch size first; omit it to decorate with arguments.
        starting_batch_size: The size to try first.
        reduce_batch_size_fn: Returns the next size to try; nine tenths of the last by default.

    Raises:
        RuntimeError: Even a batch of one does not fit; raised by the decorated function.
        TypeError: The decorated function was called with a batch size; raised by it.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=16)
        ... def train(batch_size):
        ...     if batch_size > 12:
        ...         raise torch.OutOfMemoryError("CUDA out of memory.")
        ...     return batch_size
        >>> train()
        12
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    signature = inspect.signature(function)
    batch_size = starting_batch_size

    def next_size() -> int:
        return int(batch_size * _SHRINK) if reduce_batch_size_fn is None else reduce_batch_size_fn()

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        clear_device_cache(garbage_collection=True)
        _check_call(function, signature, args, kwargs)
        while batch_size > 0:
            try:
                return function(batch_size, *args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not should_reduce_batch_size(error):
                    raise
                reason = str(error)  # the frames of the error hold the tensors that did not fit
            clear_device_cache(garbage_collection=True)
            tried, batch_size = batch_size, next_size()
            logger.info("A batch of %d does not fit (%s); trying %d.", tried, reason, batch_size)
        raise RuntimeError("No executable batch size found, reached zero.")

    parameters = list(signature.parameters.values())
    search.__signature__ = signature.replace(parameters=parameters[1:])  # pyright: ignore[reportAttributeAccessIssue] - for inspect
    return search


def _check_call(
    function: Callable[..., Any], signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse a call that passes the batch size, which `find_executable_batch_size` passes itself."""
    try:
        signature.bind(0, *args, **kwargs)
    except TypeError as error:
        shown = ", ".join([*map(repr, args[1:]), *(f"{name}={value!r}" for name, value in kwargs.items())])
        name = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"{error}. The decorator passes the batch size as the first argument of `{name}`: remove it and "
            f"call `{name}({shown})`."
        ) from None
