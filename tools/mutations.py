"""Random changes of bytes, as a damaged disk or somebody who means harm would make them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

NUMBERS = ("0", "1", "-1", "-0", "1.5", "65", "2147483648", "9223372036854775807", "18446744073709551616")
WORDS = (
    "null",
    "true",
    "[]",
    "{}",
    '""',
    '"x"',
    "[[[[]]]]",
    "NaN",
    "1e999",
    '"\\ud800"',
    "9" * 5000,
    "[" * 20000,
)
NAMES = ("../x", "/etc/passwd", "", "a/../../b", "__metadata__", "weight_map", "F4", "nul\\u0000", ".")


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change bytes once or a few times."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice((_bit, _cut, _insert, _delete, _swap, _number, _number, _word, _word))(data, rng)
    return data


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    begin = rng.randrange(len(data) + 1)
    return begin, min(len(data), begin + rng.choice((1, 2, 8, 40, 300)))


def _bit(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) or 1)
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if data else b"\0"


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.choice((1, 3, 64))) + data[at:]


def _delete(data: bytes, rng: random.Random) -> bytes:
    begin, end = _span(data, rng)
    return data[:begin] + data[end:]


def _swap(data: bytes, rng: random.Random) -> bytes:
    a, b = sorted((_span(data, rng), _span(data, rng)))
    if a[1] > b[0]:
        return data
    return data[: a[0]] + data[b[0] : b[1]] + data[a[1] : b[0]] + data[a[0] : a[1]] + data[b[1] :]


def _number(data: bytes, rng: random.Random) -> bytes:
    found = [match.span() for match in re.finditer(rb"\d+", data)]
    return _replaced(data, found, rng.choice(NUMBERS + WORDS[:8]), rng)


def _word(data: bytes, rng: random.Random) -> bytes:
    found = [match.span() for match in re.finditer(rb'"[^"]*"|\[[^][]*\]|\w+', data)]
    own = [data[slice(*span)].decode("latin-1") for span in found]
    return _replaced(data, found, rng.choice([*WORDS, *(f'"{name}"' for name in NAMES), *own]), rng)


def _replaced(data: bytes, spans: list[tuple[int, int]], by: str, rng: random.Random) -> bytes:
    if not spans:
        return data
    begin, end = rng.choice(spans)
    return data[:begin] + by.encode("latin-1") + data[end:]
