"""safetensors written as a stream are what the library itself reads, byte for byte."""

from __future__ import annotations

import io

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_ops.weights.safetensors_io import DTYPES, SafetensorsFile, as_bytes, write_safetensors
from accel_state.errors import CheckpointError

KNOWN = sorted(
    (dtype for dtype in DTYPES.values() if dtype != getattr(torch, "float8_e8m0fnu", None)), key=str
)


def content(tensor):
    return bytes(as_bytes(tensor))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KNOWN), st.lists(st.integers(0, 4), max_size=3)), max_size=6))
def test_the_library_reads_what_is_streamed(shapes):
    tensors = {
        f"t{index}": torch.randint(0, 2, shape).to(dtype) for index, (dtype, shape) in enumerate(shapes)
    }
    stream = io.BytesIO()
    write_safetensors(tensors, stream)
    read = safetensors.torch.load(stream.getvalue())
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert content(read[name]) == content(tensor)


def test_every_tensor_is_aligned_to_its_elements(tmp_path):
    path = tmp_path / "w.safetensors"
    with path.open("wb") as file:
        write_safetensors({"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1).double()}, file)
    for entry in SafetensorsFile(path).entries.values():
        assert entry.begin % entry.dtype.itemsize == 0


def test_views_and_conjugates_are_written_by_value():
    stream = io.BytesIO()
    columns, conjugate = torch.arange(6.0).view(2, 3).t(), torch.tensor([1 + 2j]).conj()
    write_safetensors({"columns": columns, "conjugate": conjugate}, stream)
    read = safetensors.torch.load(stream.getvalue())
    assert torch.equal(read["columns"], columns)
    assert torch.equal(read["conjugate"], conjugate.resolve_conj())


def test_large_tensors_are_not_copied():
    tensor = torch.ones(1000)

    class Sink:
        seen = 0

        def write(self, data):
            if len(data) == 4000:
                self.seen = torch.frombuffer(data, dtype=torch.float32).data_ptr()

    sink = Sink()
    write_safetensors({"a": tensor}, sink)
    assert sink.seen == tensor.data_ptr()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (torch.eye(2).to_sparse(), "tensor on cpu"),
        (torch.ones(1, device="meta"), "tensor on meta"),
        ("text", "str"),
    ],
)
def test_what_the_format_cannot_hold_is_named(value, named):
    with pytest.raises(CheckpointError, match=f"'odd' is a {named}.*safe_serialization=False"):
        write_safetensors({"odd": value}, io.BytesIO())
