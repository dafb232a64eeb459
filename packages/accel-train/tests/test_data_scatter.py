"""The dispatcher's buffers, with collectives that read and write them at the last moment that they may."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_state.streams import device_streams
from accel_train.data.loader import CopyStream
from accel_train.data.scatter import Receiver, Sender
from accel_train.data.shards import BatchWithMeta

if TYPE_CHECKING:
    from collections.abc import Callable


class LateCollectives:
    """Two ranks, of which rank 0 sends everything before rank 1 receives it.

    A scatter reads what it sends when its end is waited for, or else when the next one begins; what it
    writes is poison until its end is waited for.
    """

    world_size = 2

    def __init__(self, rank: int, mail: deque[Any]) -> None:
        self.rank = rank
        self._mail = mail
        self._unread: Callable[[], None] | None = None

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        assert src == 0
        if self.rank == 0:
            self._mail.append(list(objects))
        else:
            objects[:] = self._mail.popleft()

    def start_scatter(self, out: torch.Tensor, parts: Any, src: int) -> Callable[[], None]:
        assert src == 0
        return self._receive(out) if self.rank else self._send(parts[1])

    def _send(self, part: torch.Tensor) -> Callable[[], None]:
        if self._unread is not None:
            self._unread()
        message = torch.empty(0, dtype=torch.uint8)
        self._mail.append(message)

        def read() -> None:
            if not message.numel():
                message.resize_(part.numel()).copy_(part)

        self._unread = read
        return read

    def _receive(self, out: torch.Tensor) -> Callable[[], None]:
        message = self._mail.popleft()
        assert message.numel() == out.numel()
        out.fill_(0xFF)
        return lambda: out.copy_(message)


rows = st.builds(
    lambda shape, dtype: {"rows": (100 * torch.rand(shape)).to(dtype), "name": str(shape)},
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.float16, torch.uint8]),
)
rounds = st.lists(st.tuples(rows, rows), max_size=6)


@pytest.mark.gpu
@settings(deadline=None)
@given(rounds)
def test_every_round_arrives_before_its_buffer_is_written_again(turns: list[Any]) -> None:
    mail: deque[Any] = deque()
    sender = Sender(
        iter([[BatchWithMeta(part) for part in turn] for turn in turns]), LateCollectives(0, mail)
    )
    kept = [(item.batch, is_last) for item, is_last in sender.pairs()]
    receiver = Receiver(LateCollectives(1, mail))
    received: list[Any] = []
    streams = device_streams(torch.accelerator.current_accelerator())
    assert streams is not None
    side = CopyStream(streams)
    for item, is_last in receiver.pairs():
        batch = side.finish_copy(side.start_copy(item.batch))
        received.append(({"rows": (batch["rows"] + 0).cpu(), "name": batch["name"]}, is_last))
        del batch
    assert not mail
    for rank, pairs in enumerate((kept, received)):
        assert [is_last for _, is_last in pairs] == [
            number == len(turns) for number in range(1, len(turns) + 1)
        ]
        for (batch, _), turn in zip(pairs, turns, strict=True):
            torch.testing.assert_close(batch["rows"], turn[rank]["rows"], rtol=0, atol=0)
            assert batch["name"] == turn[rank]["name"]


def test_an_error_of_the_main_process_comes_after_the_rounds_before_it() -> None:
    mail: deque[Any] = deque()

    def broken() -> Any:
        yield [BatchWithMeta(torch.zeros(2)), BatchWithMeta(torch.ones(2))]
        raise ValueError("a bad sample")

    with pytest.raises(ValueError, match="a bad sample"):
        list(Sender(broken(), LateCollectives(0, mail)).pairs())
    received = Receiver(LateCollectives(1, mail)).pairs()
    assert next(received)[0].batch.tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="a bad sample"):
        next(received)
