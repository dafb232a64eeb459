"""Check quantised weights that were saved, before kernels read as far as their statistics say.

The kernels of bitsandbytes take addresses, a shape and a block size, and check nothing: a scale too few, or a
shape too large, is a read outside of the tensor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from accel_state.errors import CheckpointError
from accel_state.regular_file import parse_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    Expected = dict[str, tuple[torch.dtype, int]]

STATE_4BIT = "quant_state.bitsandbytes__"
STATE_8BIT = "SCB"

_QUANT_TYPES = ("fp4", "nf4")
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_DTYPES = ("float16", "bfloat16", "float32")
_CODE, _NESTED_CODE = 16, 256  # values of 4 bits, and of the 8 bits of scales that are quantised themselves
_STATE_BYTES = 4096
_FIELDS = {"quant_type", "blocksize", "dtype", "shape"}
_NESTED_FIELDS = {"nested_blocksize", "nested_dtype", "nested_offset"}


def check_4bit(where: str, weight: Tensor, statistics: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
    """Refuse a saved 4-bit weight that does not fit its layer.

    Raises:
        CheckpointError: A part is missing, unknown, or of another type or size.
    """
    parts = dict(statistics)
    state = _state_of(where, parts)
    count = math.prod(shape)
    nested = "nested_absmax" in parts
    _check_fields(where, state, shape, nested=nested)
    blocks = -(-count // state["blocksize"])
    expected: Expected = {"quant_map": (torch.float32, _CODE), "absmax": (torch.float32, blocks)}
    if nested:
        expected |= {
            "absmax": (torch.uint8, blocks),
            "nested_absmax": (torch.float32, -(-blocks // state["nested_blocksize"])),
            "nested_quant_map": (torch.float32, _NESTED_CODE),
        }
    _check_tensors(where, parts, expected)
    _check_tensors(where, {"weight": weight}, {"weight": (torch.uint8, -(-count // 2))})


def check_8bit(where: str, weight: Tensor, statistics: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
    """Refuse a saved 8-bit weight that does not fit its layer; arguments as for `check_4bit`."""
    scales = statistics.get(STATE_8BIT)
    if scales is None:
        raise CheckpointError(f"{where} has no {STATE_8BIT!r}, the scales of an 8-bit weight.")
    _check_tensors(
        where,
        {"weight": weight, STATE_8BIT: scales},
        {"weight": (torch.int8, math.prod(shape)), STATE_8BIT: (torch.float32, shape[0])},
    )
    check_shape(where, weight, shape)


def check_shape(where: str, weight: Tensor, shape: tuple[int, int]) -> None:
    """Refuse a weight of another shape than its layer's; arguments as for `check_4bit`."""
    if tuple(weight.shape) != shape:
        raise CheckpointError(f"{where} has the shape {list(weight.shape)}; its layer needs {list(shape)}.")


def _state_of(where: str, parts: dict[str, Tensor]) -> dict[str, Any]:
    """Take the part out of a state that is JSON, and read it."""
    names = [name for name in parts if name.startswith(STATE_4BIT)]
    if len(names) != 1 or names[0].removeprefix(STATE_4BIT) not in _QUANT_TYPES:
        raise CheckpointError(
            f"{where} needs one tensor {STATE_4BIT}nf4 or {STATE_4BIT}fp4, and has {sorted(names)[:5]}."
        )
    packed = parts.pop(names[0])
    if packed.dtype is not torch.uint8 or packed.layout is not torch.strided or packed.numel() > _STATE_BYTES:
        raise CheckpointError(
            f"{where}: {names[0]!r} is {packed.dtype} of shape {list(packed.shape)}, and not up to "
            f"{_STATE_BYTES} bytes of JSON."
        )
    text = bytes(packed.flatten().tolist())
    state: Any = parse_json(text, where, what="weight that can be used")
    if not isinstance(state, dict) or state.get("quant_type") != names[0].removeprefix(STATE_4BIT):  # pyright: ignore[reportUnknownMemberType]
        raise CheckpointError(f"{where}: {names[0]!r} holds {_shown(state)}, another kind of state.")
    return state  # pyright: ignore[reportUnknownVariableType]


def _check_fields(where: str, state: dict[str, Any], shape: tuple[int, int], *, nested: bool) -> None:
    fields = _FIELDS | _NESTED_FIELDS if nested else _FIELDS
    if state.keys() != fields:
        differing = sorted(state.keys() ^ fields)
        raise CheckpointError(f"{where}: its quantisation state lacks, or has too many: {_shown(differing)}.")
    allowed: dict[str, tuple[Any, ...]] = {
        "blocksize": _BLOCK_SIZES,
        "nested_blocksize": _BLOCK_SIZES,
        "dtype": _DTYPES,
        "nested_dtype": _DTYPES,
    }
    for name in sorted(fields & allowed.keys()):
        value = state[name]
        if type(value) not in {int, str} or value not in allowed[name]:
            choices = ", ".join(map(str, allowed[name]))
            raise CheckpointError(f"{where}: {name} is {_shown(value)}, and not one of {choices}.")
    sizes = state["shape"]
    if not isinstance(sizes, list) or [(type(one), one) for one in sizes] != [(int, one) for one in shape]:  # pyright: ignore[reportUnknownVariableType]
        raise CheckpointError(f"{where} says its shape is {_shown(sizes)}; its layer needs {list(shape)}.")
    offset = state.get("nested_offset", 0.0)
    if (type(offset) is not float and type(offset) is not int) or not abs(offset) < torch.finfo().max:
        raise CheckpointError(f"{where}: nested_offset is {_shown(offset)}, and not a float32 number.")


def _check_tensors(where: str, found: Mapping[str, Tensor], expected: Expected) -> None:
    if found.keys() != expected.keys():
        differing = sorted(found.keys() ^ expected.keys())
        raise CheckpointError(f"{where} lacks tensors, or has too many: {_shown(differing)}.")
    for name, tensor in found.items():
        dtype, count = expected[name]
        if tensor.dtype is not dtype or tensor.numel() != count or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"{where}: {name} is {tensor.dtype} of shape {list(tensor.shape)}; its layer needs {count} "
                f"elements of {dtype}."
            )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
