from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from torch.distributed import TCPStore

from accel_state.topology import free_port, is_port_in_use, reserved_port


def test_a_port_that_somebody_listens_on_is_in_use_until_they_stop():
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        assert is_port_in_use(port)
        assert is_port_in_use(str(port))
    assert not is_port_in_use(port)


def test_a_free_port_can_be_listened_on():
    with socket.socket() as server:
        server.bind(("", free_port()))
        server.listen()


LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a port cannot be kept for another program"
)
IP_LOCAL_PORT_RANGE = 51  # since Linux 6.3


@LINUX
def test_only_the_store_that_gets_a_reserved_port_can_listen_on_it():
    port = reserved_port()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("", port))
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    assert store.get("key") == b"value"


@LINUX
@pytest.mark.parametrize("reuse", [0, 1])
def test_a_reserved_port_is_never_the_one_that_somebody_gets_who_asks_for_any(reuse):
    port = reserved_port()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:  # of all ports this one
            only = (port << 16 | port).to_bytes(4, sys.byteorder)
            other.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, only)
        except OSError:
            pytest.skip("this kernel knows no range of ports for one socket")
        with pytest.raises(OSError, match="Address already in use"):
            other.bind(("", 0))


@LINUX
def test_a_program_that_a_process_becomes_keeps_its_reserved_port():
    begin = (
        "import os, sys; from accel_state.topology import reserved_port; port = str(reserved_port()); "
        "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1], port])"
    )
    after = "import socket, sys; socket.socket().bind(('', int(sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", begin, after], capture_output=True, text=True, check=False)
    assert "Address already in use" in done.stderr
