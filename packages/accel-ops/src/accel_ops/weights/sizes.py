"""Bytes: of an element type, of a size that a person wrote, and printed for a person."""

from __future__ import annotations

import re
from math import isfinite
from typing import TYPE_CHECKING

from accel_state.errors import SettingsError
from accel_state.labels import CustomDtype

if TYPE_CHECKING:
    import torch

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_DECIMAL = ("KB", "MB", "GB", "TB")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", re.IGNORECASE)
_CUSTOM_BYTES = {CustomDtype.FP8: 1.0, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Say how many bytes one element takes.

    Args:
        dtype: A torch element type, or one of the sub-byte types of `CustomDtype`. A `torch.bool` counts as
            one bit, as documented; in memory it takes a byte.

    Example:
        >>> import torch
        >>> dtype_byte_size(torch.bfloat16), dtype_byte_size(CustomDtype.INT4)
        (2, 0.5)
    """
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BYTES[dtype]
    return 0.125 if str(dtype) == "torch.bool" else dtype.itemsize


def convert_file_size_to_int(size: float | str) -> int:
    """Turn a size that a person wrote into bytes.

    Args:
        size: Bytes, of which a fraction is dropped; or a number with a unit: decimal (`"5GB"`, `"200MB"`) or
            binary (`"5GiB"`). A small b after a decimal unit means bits (`"5Gb"`).

    Raises:
        SettingsError: The text is not a size, or the number not finite.

    Example:
        >>> convert_file_size_to_int("1GB"), convert_file_size_to_int("1.5GiB")
        (1000000000, 1610612736)
    """
    if isinstance(size, int | float):
        if not isfinite(size):
            raise SettingsError(f"{size!r} is not a size: write a number of bytes")
        return int(size)
    found = _SIZE.fullmatch(size)
    unit = found[2].upper() if found else ""
    if not found or unit not in _UNITS:
        raise SettingsError(f"{size!r} is not a size: write a number with a unit, as in '5GB' or '512MiB'")
    count = int(float(found[1]) * _UNITS[unit])
    return count // 8 if found[2].endswith("b") and unit in _DECIMAL else count


def convert_bytes(size: float) -> str:
    """Print bytes for a person, in binary steps.

    Example:
        >>> convert_bytes(1536 * 1024)
        '1.5 MB'
    """
    number = size
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if number < 1024:
            return f"{round(number, 2)} {unit}"
        number /= 1024
    return f"{round(number, 2)} PB"
