"""safetensors are mapped and written as the library itself reads them; what it refuses is refused."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from accel_ops.weights.safetensors_io import (
    DTYPES,
    SafetensorsFile,
    as_bytes,
    clean_state_dict_for_safetensors,
    write_safetensors,
)
from accel_state.errors import CheckpointError

DATA = torch.arange(4, dtype=torch.float32).numpy().tobytes()


def row(begin=0, end=16, shape=(4,), dtype="F32", **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def file_of(header, data=DATA):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


REFUSED = {
    "overlap": file_of({"a": row(0, 12, (3,)), "b": row(8, 16, (2,))}),
    "shifted": file_of({"a": row(0, 8, (2,)), "b": row(4, 12, (2,))}),
    "hole": file_of({"a": row(0, 4, (1,)), "b": row(8, 16, (2,))}),
    "hole in front": file_of({"a": row(8, 16, (2,))}),
    "trailing data": file_of({"a": row()}, DATA + b"\0"),
    "data without tensors": file_of({}),
    "offsets as texts": file_of({"a": {**row(), "data_offsets": ["0", "16"]}}),
    "offsets as fractions": file_of({"a": {**row(), "data_offsets": [0.0, 16.0]}}),
    "three offsets": file_of({"a": {**row(), "data_offsets": [0, 8, 16]}}),
    "shape of fractions": file_of({"a": {**row(), "shape": [4.0]}}),
    "a text as shape": file_of({"a": {**row(), "shape": "4"}}),
    "negative shape": file_of({"a": row(shape=(-2, -2))}),
    "a list as dtype": file_of({"a": {**row(), "dtype": ["F32"]}}),
    "an unknown dtype": file_of({"a": {**row(), "dtype": "F33"}}),
    "no dtype": file_of({"a": {"shape": [4], "data_offsets": [0, 16]}}),
    "NaN": file_of(json.dumps({"a": {**row(), "shape": [float("nan")]}}).encode()),
    "no UTF-8": file_of(b'{"\xff":' + json.dumps(row()).encode() + b"}"),
    "deep": file_of(b"[" * 200_000, b""),
    "deep entry": file_of(b'{"a":' * 200_000, b""),
    "a list": file_of(b"[]", b""),
    "nothing": b"",
    "a short length": b"\x01\x02",
    "a long length": b"\xff" * 8 + b"{}",
    "more than there is": file_of({"a": row(0, 32, (8,))}),
    "no JSON": file_of(b"{{{{"),
    "fewer elements than bytes": file_of({"a": row(shape=(3,))}),
    "an end before the begin": file_of({"a": row(16, 0)}),
    "a negative offset": file_of({"a": row(-8, 8)}),
    "too many bytes": file_of({"a": row(0, 16, (2**61, 8))}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_library_refuses_is_refused(kind, tmp_path):
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(REFUSED[kind])
    path = tmp_path / "model.safetensors"
    path.write_bytes(REFUSED[kind])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        SafetensorsFile(path)


def test_elements_of_four_bits_are_read_and_written(tmp_path):
    packed = torch.arange(6, dtype=torch.uint8).view(2, 3)
    with (tmp_path / "m.safetensors").open("wb") as file:
        write_safetensors({"w": packed.view(torch.float4_e2m1fn_x2), "b": torch.ones(2)}, file)
    ((_, facts),) = (
        row for row in safetensors.deserialize((tmp_path / "m.safetensors").read_bytes()) if row[0] == "w"
    )
    assert (facts["dtype"], facts["shape"], bytes(facts["data"])) == ("F4", [2, 6], bytes(range(6)))
    found = SafetensorsFile(tmp_path / "m.safetensors").tensor("w")
    assert (found.dtype, found.view(torch.uint8).tolist()) == (torch.float4_e2m1fn_x2, packed.tolist())


@pytest.mark.parametrize(
    "content",
    [
        file_of({}, b""),
        file_of({"__metadata__": None, "a": row()}),
        file_of(
            {
                "b": row(8, 16, (2,)),
                "a": row(0, 8, (2,)),
                "empty": row(8, 8, (0, 3)),
                "last": row(16, 16, (0,)),
            }
        ),
    ],
)
def test_what_the_library_reads_is_read_alike(content, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    file = SafetensorsFile(path)
    for name, expected in safetensors.deserialize(content):
        assert list(file.entries[name].shape) == expected["shape"]
        assert file.tensor(name).numpy().tobytes() == bytes(expected["data"])
        assert torch.equal(file.tensor(name), file.read(name))


@pytest.mark.skipif(sys.platform == "win32", reason="a file that is open cannot be replaced there")
def test_a_file_that_is_replaced_stays_what_it_was_for_those_who_opened_it(tmp_path):
    path, other = tmp_path / "model.safetensors", tmp_path / "other"
    path.write_bytes(file_of({"a": row()}))
    file = SafetensorsFile(path)
    other.write_bytes(file_of({"aa": row()}, bytes(16)))
    other.replace(path)
    for read in (file.read, file.tensor):
        assert read("a").tolist() == [0.0, 1.0, 2.0, 3.0]


def test_threads_read_from_one_open_file_without_a_lock(tmp_path):
    save_file(
        {f"w{number}": torch.full((1 << 18,), float(number)) for number in range(8)},
        tmp_path / "m.safetensors",
    )
    file = SafetensorsFile(tmp_path / "m.safetensors")
    with ThreadPoolExecutor(8) as pool:
        for number, tensor in enumerate(pool.map(file.read, [f"w{number}" for number in range(8)] * 4)):
            assert bool((tensor == number % 8).all())


def test_cleaning_keeps_parts_of_a_storage_and_drops_second_names(caplog):
    base = torch.arange(6.0)
    weight = torch.ones(2, 3)
    given_dict = {"first": base[:3], "second": base[3:], "w": weight, "tied": weight, "t": weight.t(), "n": 3}
    with caplog.at_level(logging.WARNING):
        cleaned = clean_state_dict_for_safetensors(given_dict)
    assert list(cleaned) == ["first", "second", "w", "t", "n"]
    assert "tied (kept as w)" in caplog.text
    pointers = [t.untyped_storage().data_ptr() for t in cleaned.values() if isinstance(t, torch.Tensor)]
    assert len(set(pointers)) == len(pointers)
    for name in ("first", "second", "w", "t"):
        assert torch.equal(cleaned[name], given_dict[name])
        assert cleaned[name].is_contiguous()


ALL_TYPES = {
    "f32": torch.randn(3, 4),
    "bf16": torch.randn(5).bfloat16(),
    "f8": torch.randn(7).to(torch.float8_e4m3fn),
    "i64": torch.arange(3),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "u8": torch.arange(5, dtype=torch.uint8),
}


def same(left, right):
    return left.shape == right.shape and torch.equal(
        left.contiguous().view(-1).view(torch.uint8) if left.numel() else left,
        right.contiguous().view(-1).view(torch.uint8) if right.numel() else right,
    )


def test_mapped_tensors_equal_what_safetensors_reads(tmp_path):
    save_file(ALL_TYPES, tmp_path / "m.safetensors", metadata={"who": "me"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert file.metadata == {"who": "me"}
    expected = load_file(tmp_path / "m.safetensors")
    assert set(file.entries) == set(expected)
    for name, value in expected.items():
        tensor = file.tensor(name)
        assert tensor.dtype == value.dtype
        assert same(tensor, value)
    file.read_ahead(file.entries)
    assert same(file.tensor("f32"), ALL_TYPES["f32"])


def test_writing_to_a_mapped_tensor_never_changes_the_file(tmp_path):
    save_file({"w": torch.ones(4)}, tmp_path / "m.safetensors")
    mapped = SafetensorsFile(tmp_path / "m.safetensors").tensor("w")
    mapped.fill_(7)
    assert torch.equal(load_file(tmp_path / "m.safetensors")["w"], torch.ones(4))


def test_a_truncated_file_is_named_with_its_size(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"early": torch.ones(4), "late": torch.ones(400)}, path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=rf"of {path.stat().st_size} bytes.* truncated or damaged"):
        SafetensorsFile(path)


def test_a_file_larger_than_memory_is_mapped(tmp_path):
    size = psutil.virtual_memory().total + psutil.swap_memory().total + (1 << 30)
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_of({"w": row(0, size, (size,), "U8")}, b""))
    os.truncate(path, path.stat().st_size + size)  # A sparse file: it takes no room on the disk.
    assert SafetensorsFile(path).tensor("w")[-1] == 0


FOREIGN = """
import os, sys
from pathlib import Path
from accel_ops.weights.safetensors_io import SafetensorsFile
os.setgid(65534), os.setuid(65534)
file = SafetensorsFile(sys.argv[1])
file.read_ahead(file.entries)
_, _, mapping = Path("/proc/self/smaps").read_text().partition(sys.argv[1])
print(next(line for line in mapping.splitlines() if line.startswith("Rss:")).split()[1])
"""


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root of a Linux machine")
def test_weights_of_another_user_are_read_ahead():
    # Not in tmp_path, whose parents only root may enter.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "m.safetensors"
        save_file({"w": torch.ones(1 << 20)}, path)
        path.chmod(0o644)
        done = subprocess.run(
            [sys.executable, "-c", FOREIGN, str(path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) >= 4096  # KiB, all of it


KNOWN = sorted({*DTYPES.values()} - {torch.float8_e8m0fnu, torch.float4_e2m1fn_x2}, key=str)


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
