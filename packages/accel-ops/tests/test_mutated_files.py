"""Mutated weight files give the content that their format's own reader gives, or an error that names them."""

from __future__ import annotations

import re

import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_ops.weights.safetensors_io import SafetensorsFile
from accel_state.errors import CheckpointError

STATE = {
    "layer.weight": torch.arange(48, dtype=torch.float32).view(6, 8),
    "layer.bias": torch.arange(6, dtype=torch.bfloat16),
    "steps": torch.arange(3),
    "empty": torch.empty(0, 4),
}
RAW = safetensors.torch.save(STATE, {"format": "pt"})
HEADER = RAW[8 : 8 + int.from_bytes(RAW[:8], "little")]
WORDS = [match.span() for match in re.finditer(rb'"[^"]*"|\[[^][]*\]|\w+', HEADER)]
OTHERS = [
    b"0",
    b"-1",
    b"1.5",
    b"18446744073709551616",
    b"null",
    b"[]",
    b"{}",
    b'""',
    b'"F4"',
    b'"../x"',
    b"NaN",
]


@st.composite
def mutated_headers(draw):
    """A header with one or two of its words, or some bytes, replaced; its length is true."""
    header = HEADER
    for _ in range(draw(st.integers(1, 2))):
        begin, end = draw(st.sampled_from(WORDS) | st.tuples(*[st.integers(0, len(HEADER))] * 2).map(sorted))
        header = header[:begin] + draw(st.sampled_from(OTHERS) | st.binary(max_size=9)) + header[end:]
    return len(header).to_bytes(8, "little") + header + RAW[8 + len(HEADER) :]


@given(mutated_headers() | st.integers(0, len(RAW) - 1).map(lambda length: RAW[:length]))
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_mutated_file_is_read_as_the_library_reads_it_or_refused(tmp_path, raw):
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    try:
        file = SafetensorsFile(path)
        found = {name: file.tensor(name) for name in file.entries}
    except CheckpointError as error:
        assert "model.safetensors" in str(error)  # noqa: PT017
        return
    try:
        true = dict(safetensors.deserialize(raw))
    except safetensors.SafetensorError as error:
        assert "invalid JSON in header" in str(error)  # noqa: PT017 - stricter than Python
        return
    assert found.keys() == true.keys()
    for name, tensor in found.items():
        assert list(tensor.shape) == true[name]["shape"]
        assert tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == bytes(true[name]["data"])
