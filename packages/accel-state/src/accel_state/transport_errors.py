"""Distinguish errors of the transport between ranks from those of the program, by their type and origin.

The message alone is not enough: a download of the user may also fail with `"timed out"`.
"""

from __future__ import annotations

import re

import torch.distributed as dist

_TYPES = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
# gloo's errors are plain RuntimeErrors that begin with a line of gloo's own source.
_GLOO = re.compile(r"\[(?P<enforced>enforce fail at )?\S*\bgloo/\S+:\d+\] ")
_NCCL_STALL = re.compile(r"timed? ?out|connection|remote|peer|system error|aborted", re.IGNORECASE)


def is_transport_error(error: BaseException | None) -> bool:
    """Return whether an error was raised by a process-group backend or by the store.

    Example:
        >>> is_transport_error(RuntimeError("request timed out"))
        False
        >>> is_transport_error(RuntimeError("[/gloo/transport/tcp/pair.cc:561] Connection closed by peer"))
        True
    """
    return isinstance(error, _TYPES) or (type(error) is RuntimeError and _GLOO.match(str(error)) is not None)


def is_stall(error: BaseException) -> bool:
    """Return whether a transport error means that another rank did not take part, not that ranks disagree.

    Example:
        >>> is_stall(RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:464] 8 vs 4"))
        False
    """
    origin = _GLOO.match(str(error))
    if origin is not None:
        return origin["enforced"] is None
    return not isinstance(error, dist.DistBackendError) or _NCCL_STALL.search(str(error)) is not None


def first_sentence(error: BaseException) -> str:
    """Return the message of a transport error, without its source location and advice.

    Example:
        >>> first_sentence(RuntimeError("[/gloo/transport/tcp/pair.cc:561] Read error. Look elsewhere"))
        'Read error'
    """
    line = re.sub(r"^\[[^\]]*\] ", "", (str(error).strip().splitlines() or [""])[0])
    return line.split(". ")[0].rstrip(".") or type(error).__name__
