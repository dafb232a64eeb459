from __future__ import annotations

import socket

from accel_state.ports import free_port, is_port_in_use


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
