"""An S3 server on the loopback, behind a proxy that drops, delays, cuts and repeats what passes it."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Generator

BUCKET = "bucket"
FAULTS = ("drop", "lost", "cut", "delay", "error", "repeat")
_CONTROL = "/-/faults"
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def s3_server() -> Generator[str]:
    """Run moto's server in a process of its own; give its URL. It has the bucket `bucket`."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        with urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")):
            yield url
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


class FaultyProxy(ThreadingHTTPServer):
    """Forwards HTTP requests to a server, with faults as `set_faults` says.

    Args:
        server: The URL of the server.
    """

    daemon_threads = True

    def __init__(self, server: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server_url = server.removeprefix("http://")
        self.faults: dict[str, Any] = {}
        self.chance = random.Random(0)
        self.counts: Counter[str] = Counter()
        self.bytes_read: Counter[str] = Counter()
        self.guard = threading.Lock()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients are cut off on purpose, and die."""

    def fault_of(self, method: str, path: str) -> str | None:
        """Choose the fault of a request."""
        with self.guard:
            fits = method in self.faults.get("methods", method) and self.faults.get("path", "") in path
            if not self.faults or not fits or self.faults.get("most", 1) <= 0:
                return None
            if self.chance.random() >= self.faults.get("rate", 1.0):
                return None
            fault = self.chance.choice(self.faults.get("kinds", FAULTS))
            self.counts[fault] += 1
            self.faults["most"] = self.faults.get("most", 10**9) - 1
            return fault


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy  # pyright: ignore[reportIncompatibleVariableOverride]
    hop_by_hop: ClassVar = {"connection", "transfer-encoding", "content-length", "keep-alive"}

    def log_message(self, *args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        pass

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if self.path.startswith(_CONTROL):
            self._control(body)
            return
        fault = self.server.fault_of(self.command, self.path)
        if fault == "drop":
            self.close_connection = True
            return
        if fault == "delay":
            time.sleep(self.server.faults.get("seconds", 0.05))
        if fault in {"error", "denied"}:
            status, code = (500, "InternalError") if fault == "error" else (403, "AccessDenied")
            text = f"<Error><Code>{code}</Code><Message>{code} by the proxy</Message></Error>".encode()
            self._reply(status, [("Content-Type", "application/xml")], text)
            return
        if fault == "repeat":
            self._forward(body)
        status, headers, content = self._forward(body)
        if fault == "lost":
            self.close_connection = True
            return
        self._reply(status, headers, content, cut=fault == "cut")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer  # noqa: N815 - the names of the base class

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.server.server_url)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in self.hop_by_hop}
        headers.pop("Expect", None)
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        with self.server.guard:
            self.server.bytes_read[self.path.partition("?")[0]] += len(content)
        return response.status, response.getheaders(), content

    def _reply(
        self, status: int, headers: list[tuple[str, str]], content: bytes, *, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in self.hop_by_hop or (self.command == "HEAD" and name == "Content-Length"):
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True

    def _control(self, body: bytes) -> None:
        with self.server.guard:
            if self.command == "PUT":
                self.server.faults = json.loads(body)
                self.server.chance = random.Random(self.server.faults.get("seed", 0))
                self.server.counts.clear()
                self.server.bytes_read.clear()
            seen = {"faults": self.server.counts, "bytes": self.server.bytes_read}
        self._reply(200, [], json.dumps(seen).encode())


@contextlib.contextmanager
def faulty_store() -> Generator[str]:
    """Run a server behind a proxy; give the proxy's URL."""
    with s3_server() as server, FaultyProxy(server) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy.url
        finally:
            proxy.shutdown()
            thread.join()


def set_faults(url: str, **faults: Any) -> None:
    """Say which requests of a proxy fail from now on: none without arguments.

    Args:
        url: Of the proxy.
        **faults: `kinds` (of `FAULTS`, and `denied`), `rate` of requests, the `most` of them, `methods` and a
            part of the `path` of requests, `seconds` of a delay, `seed`.
    """
    request = urllib.request.Request(f"{url}{_CONTROL}", json.dumps(faults).encode(), method="PUT")
    with urllib.request.urlopen(request):
        pass


def seen_by(url: str) -> dict[str, dict[str, int]]:
    """Return the faults since `set_faults` by kind, and the bytes that were read by path."""
    with urllib.request.urlopen(f"{url}{_CONTROL}") as answer:
        return json.load(answer)


@contextlib.contextmanager
def using_store(url: str, **options: Any) -> Generator[str]:
    """Let `s3://` lead to a server in this process, give the URL of the bucket."""
    import fsspec.config  # not in processes that use no store
    import s3fs

    fsspec.config.conf["s3"] = {
        "endpoint_url": url,
        "key": "key",
        "secret": "secret",
        "client_kwargs": {"region_name": "us-east-1"},
        "config_kwargs": {"retries": {"max_attempts": 4}, "connect_timeout": 5, "read_timeout": 20},
        **options,
    }
    try:
        yield f"s3://{BUCKET}"
    finally:
        del fsspec.config.conf["s3"]
        s3fs.S3FileSystem.clear_instance_cache()
