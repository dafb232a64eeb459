"""Fuzz the file readers: mutate real files of every kind that accel reads, for a given time.

A reader gives the true content or ends in a sentence that names the file: never another error, a hang, a
crash, or a value that is not in the file. `--seconds`, `--seed` and `--kind` choose what runs; a failure
prints the case that reproduces it.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors
import safetensors.torch
import torch

from accel_cli.config_file import read_config
from accel_cli.launch.hosts import read_hosts
from accel_ops.weights.read import find_checkpoint_files, load_state_dict
from accel_ops.weights.safetensors_io import SafetensorsFile
from accel_ops.weights.write import save_state_dict
from accel_plugins import sharding
from accel_quant import BnbQuantizationConfig, load_and_quantize_model
from accel_state.errors import CheckpointError, SettingsError
from accel_train.checkpoint.layout import FileRecord, Manifest

if TYPE_CHECKING:
    from collections.abc import Callable

HANG_SECONDS = 60
MEMORY = 6 << 30  # of addresses; torch alone has three
BATCH = 25
STATE = {
    "layer.weight": torch.arange(48, dtype=torch.float32).view(6, 8),
    "layer.bias": torch.arange(6, dtype=torch.bfloat16),
    "steps": torch.arange(3),
    "empty": torch.empty(0, 4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of file.

    Args:
        file: Its name in the folder.
        make: Writes real files into a folder.
        read: Reads the mutated file, and raises AssertionError if what it gets is not in the file.
        opened: The part of a file's bytes that is worth mutating, and how bytes come of it.
    """

    file: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    opened: Callable[[bytes], tuple[bytes, Callable[[bytes], bytes]]] = lambda raw: (raw, lambda part: part)


def content_of(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """What has to be equal."""
    flat = tensor.detach().contiguous().view(-1)
    return (
        tensor.dtype,
        tuple(tensor.shape),
        flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"",
    )


def header_of(raw: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    """The header of a safetensors file, its length kept true."""
    length = int.from_bytes(raw[:8], "little")
    return raw[8 : 8 + length], lambda part: len(part).to_bytes(8, "little") + part + raw[8 + length :]


def pickle_of(raw: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    """The pickle in an archive of torch.save, its checksum kept true."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        records = {row.filename: archive.read(row) for row in archive.infolist()}
    name = next(name for name in records if name.endswith("data.pkl"))

    def close(part: bytes) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for record, content in records.items():
                archive.writestr(record, part if record == name else content)
        return stream.getvalue()

    return records[name], close


def quantized_net(*where: object) -> torch.nn.Module:
    """A model with one 4-bit layer; from a file, or quantised here."""
    settings = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, skip_modules=["1"])
    with torch.device("meta" if where else "cpu"):
        net = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 4))
    return load_and_quantize_model(net, settings, *where)  # pyright: ignore[reportArgumentType] - one path


def quant_state_of(raw: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    """The JSON in the statistics of a 4-bit weight."""
    tensors = safetensors.torch.load(raw)
    name = next(name for name in tensors if "quant_state" in name)
    content = bytes(tensors[name].tolist())

    def close(part: bytes) -> bytes:
        changed = torch.tensor(list(part), dtype=torch.uint8)
        return safetensors.torch.save({**tensors, name: changed})

    return content, close


def read_quantized(path: Path) -> None:
    """What was accepted runs, and has the tensors of the file."""
    model = quantized_net(path)
    model(torch.ones(2, 64, dtype=torch.float16))
    found, true = model.state_dict(), safetensors.torch.load(path.read_bytes())
    for name, value in true.items():
        if name in found and "quant_state" not in name:
            assert torch.equal(found[name].to(value.dtype).nan_to_num(), value.nan_to_num()), name


def read_safetensors(path: Path) -> None:
    """Compare with the safetensors library, which is the format's own reader."""
    raw = path.read_bytes()
    file = SafetensorsFile(path)
    found = {name: content_of(file.tensor(name)) for name in file.entries}
    try:
        true = dict(safetensors.deserialize(raw))
    except safetensors.SafetensorError as error:
        if "invalid JSON in header" in str(error):  # it reads JSON more strictly than Python
            return
        raise AssertionError(f"accepted what the library refuses: {error}") from error
    assert found.keys() == true.keys()
    for name, (_, shape, data) in found.items():
        assert list(shape) == true[name]["shape"], name
        assert data == bytes(true[name]["data"]), name


def read_bin(path: Path) -> None:
    """Compare with torch.load without mapping, which checks its records."""
    found = load_state_dict(path)
    try:
        true = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Mapped values are not summed: a changed checksum alone makes no difference.
        if "crc" in str(error).lower():
            return
        raise AssertionError(f"accepted what torch refuses: {error}") from error
    assert found.keys() == true.keys()
    for name, value in found.items():
        assert not isinstance(value, torch.Tensor) or content_of(value) == content_of(true[name]), name


def read_index(path: Path) -> None:
    """Every file is in the folder, and the table is that of the index."""
    files = find_checkpoint_files(path)
    table = json.loads(path.read_text())["weight_map"]
    weight_map = {name: Path(str(file)) for name, file in (files.weight_map or {}).items()}
    assert {name: str(file.relative_to(path.parent)) for name, file in weight_map.items()} == {
        name: str(Path(str(shard))) for name, shard in table.items()
    }
    assert all(Path(str(file)).resolve().parent == path.parent.resolve() for file in files.files)


def read_manifest(path: Path) -> None:
    """A manifest that is read is written as it was."""
    manifest = Manifest.from_text(path.read_bytes(), path)
    table = json.loads(path.read_bytes())
    again = json.loads(manifest.to_text())
    assert again == {name: table[name] for name in again}, again


def read_sharded(path: Path) -> None:
    """A sharded state is read, or refused."""
    sharding.folder.read_all(path.parent, lambda entry: torch.empty(entry.shape or (), dtype=entry.dtype))


KINDS = {
    "safetensors": Kind(
        file="model.safetensors",
        make=lambda folder: safetensors.torch.save_file(
            STATE, folder / "model.safetensors", {"format": "pt"}
        ),
        read=read_safetensors,
        opened=header_of,
    ),
    "bin": Kind(
        file="pytorch_model.bin",
        make=lambda folder: torch.save(STATE, folder / "pytorch_model.bin"),
        read=read_bin,
        opened=pickle_of,
    ),
    "index": Kind(
        file="model.safetensors.index.json",
        make=lambda folder: save_state_dict(STATE, folder, max_shard_size=100),
        read=read_index,
    ),
    "manifest": Kind(
        file="accel_manifest.json",
        make=lambda folder: (folder / "accel_manifest.json").write_text(
            Manifest(
                world_size=2, step=1, iteration=3, files={"a": FileRecord(size=5, checksum="0f" * 8)}
            ).to_text()
        ),
        read=read_manifest,
    ),
    "quantised": Kind(
        file="model.safetensors",
        make=lambda folder: safetensors.torch.save_file(
            quantized_net().state_dict(), folder / "model.safetensors"
        ),
        read=read_quantized,
        opened=quant_state_of,
    ),
    "dcp": Kind(
        file=".metadata",
        make=lambda folder: importlib.import_module("torch.distributed.checkpoint").save(
            dict(STATE), checkpoint_id=folder, no_dist=True
        ),
        read=read_sharded,
    ),
    "yaml": Kind(
        file="config.yaml",
        make=lambda folder: (folder / "config.yaml").write_text(
            "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n"
            "fsdp_config: &f\n"
            "  fsdp_version: 2\n  fsdp_transformer_layer_cls_to_wrap: [Block, 'Other']\n"
            "mixed_precision: bf16\n"
        ),
        read=lambda path: read_config(str(path), {}),
    ),
    "hostfile": Kind(
        file="hosts",
        make=lambda folder: (folder / "hosts").write_text("worker-1 slots=4\nworker-2 slots=8 # large\n"),
        read=lambda path: read_hosts(str(path)),
    ),
}


def bytes_of(kind: Kind, original: bytes, rng: random.Random) -> bytes:
    """The bytes of a case: four times of five the inner part is changed, and all around it fits."""
    if rng.random() < 0.2:
        return mutate(original, rng)
    part, close = kind.opened(original)
    return close(mutate(part, rng))


def failure_of(kind: Kind, path: Path) -> str | None:
    """Read a mutated file; say what is wrong with the outcome."""
    try:
        kind.read(path)
    except (CheckpointError, SettingsError) as error:
        text = str(error)
        if path.name not in text and path.parent.name not in text:
            return f"the message names no file: {text[:300]}"
        return f"a message of {len(text)} characters: {text[:100]}" if len(text) > 10_000 else None
    except AssertionError as error:
        return f"a wrong value: {str(error)[:300]}"
    except FileNotFoundError as error:
        return None if str(path.parent) in str(error.filename) else f"a raw error: {error}"
    except Exception as error:  # what this looks for  # noqa: BLE001
        return f"a raw {type(error).__name__}: {str(error)[:300]}"
    return None


def run_cases(name: str, folder: Path, cases: range, seed: int) -> str | None:
    """Run cases in a child process, which may crash or hang; give the first failure."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run_in_child(name, folder, cases, seed, writer)
    os.close(writer)
    with os.fdopen(reader) as lines:
        last = "".join(lines)
    _, status = os.waitpid(child, 0)
    number, _, message = last.rpartition("case ")[2].partition(" ")
    if message.strip():
        return f"{number}: {message.strip()}"
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGALRM:
        return f"{number}: hangs, {HANG_SECONDS} s are over"
    return f"{number}: the process ended with {code}" if code else None


def _run_in_child(name: str, folder: Path, cases: range, seed: int, writer: int) -> None:
    kind = KINDS[name]
    path = folder / kind.file
    original = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for case in cases:
        os.write(writer, f"case {case} ".encode())
        signal.alarm(HANG_SECONDS)
        path.write_bytes(bytes_of(kind, original, random.Random(f"{seed} {name} {case}")))
        wrong = failure_of(kind, path)
        if wrong:
            os.write(writer, wrong.encode())
            break
    path.write_bytes(original)
    os._exit(0)


def main() -> int:
    """Run; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--case", type=int, help="one case alone, of one kind")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of torch about odd pickles
    torch.set_num_threads(1)
    failures: dict[str, str] = {}
    done = dict.fromkeys(options.kind or KINDS, 0)
    with tempfile.TemporaryDirectory() as root:
        end = time.monotonic() + options.seconds
        while any(name not in failures for name in done):
            for name in [name for name in done if name not in failures]:
                folder = Path(root, f"{name}-files")
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                KINDS[name].make(folder)
                first = done[name] if options.case is None else options.case
                cases = range(first, first + (BATCH if options.case is None else 1))
                wrong = run_cases(name, folder, cases, options.seed)
                done[name] += len(cases)
                if wrong:
                    failures[name] = wrong
            if time.monotonic() > end or options.case is not None:
                break
    print(", ".join(f"{name} {count}" for name, count in done.items()), "cases")
    for name, wrong in failures.items():
        case = wrong.partition(":")[0]
        print(f"{name} {wrong}\n  tools/fuzz.py --seed {options.seed} --kind {name} --case {case}")
    return 1 if failures else 0


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


if __name__ == "__main__":
    sys.exit(main())
