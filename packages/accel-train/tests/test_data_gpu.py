"""On a device, batches are copied while the one before is computed with, and never used too early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_train.data import transfer as device_transfer
from accel_train.data.prepare import prepare_data_loader

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.gpu

CYCLES = 50_000_000  # of the GPU, some hundredths of a second


class Rows(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(40 * 1000, dtype=torch.float32).reshape(40, 1000))


def device_type() -> str:
    return torch.accelerator.current_accelerator().type


def data() -> TensorDataset:
    return TensorDataset(torch.arange(40 * 1000, dtype=torch.float32).reshape(40, 1000), torch.arange(40))


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy begins late: who does not wait for it reads something else."""
    send = device_transfer.send_to_device

    def send_late(*arguments: Any, **options: Any) -> Any:
        torch.get_device_module()._sleep(CYCLES)
        return send(*arguments, **options)

    monkeypatch.setattr(device_transfer, "send_to_device", send_late)


@pytest.mark.usefixtures("late_copies")
@pytest.mark.parametrize(
    "options",
    [{}, {"pin_memory": True}, {"pin_memory": True, "num_workers": 1}],
    ids=["pageable", "pinned", "data-worker"],
)
@pytest.mark.parametrize("dispatch", [False, True])
def test_a_batch_is_used_only_when_it_is_there(options: dict[str, Any], dispatch: bool) -> None:
    loader = prepare_data_loader(
        DataLoader(data(), batch_size=8, **options),
        device_type(),
        put_on_device=True,
        non_blocking=True,
        dispatch_batches=dispatch,
    )
    sums: list[torch.Tensor] = []
    for rows, numbers in loader:
        assert rows.device.type == device_type()
        # New memory is written at once: what was freed too early would be overwritten.
        sums.append(rows.double().sum(1) + numbers)
        del rows, numbers
        torch.full((8, 1000), -1.0, device=device_type())
    expected = data().tensors[0].double().sum(1) + torch.arange(40)
    assert torch.equal(torch.cat(sums).cpu(), expected)


@pytest.mark.usefixtures("late_copies")
def test_the_next_batch_is_copied_while_this_one_is_computed_with() -> None:
    loader = prepare_data_loader(
        DataLoader(data(), batch_size=8, pin_memory=True),
        device_type(),
        put_on_device=True,
        non_blocking=True,
    )
    batches = iter(loader)
    next(batches)
    module = torch.get_device_module()
    computed = module.Event()
    module._sleep(100 * CYCLES)
    computed.record()
    # The copy of the third batch begins here; the second one's, begun before, waits for nothing above.
    flight = next(batches)
    assert not computed.query(), "the loop did not wait for the computation"
    del flight
    module.synchronize()


def test_marked_samples_of_a_stream_are_copied_ahead_too() -> None:
    real: list[float] = []
    for rank in range(3):
        loader = prepare_data_loader(
            DataLoader(Rows(), batch_size=4),
            device_type(),
            num_processes=3,
            process_index=rank,
            put_on_device=True,
            non_blocking=True,
            dispatch_batches=False,
        )
        for batch in loader:
            assert batch.device.type == device_type()
            real += batch[: loader.real_in_batch, 0].tolist()
    assert sorted(real) == [1000.0 * row for row in range(40)]


def test_without_non_blocking_batches_are_there_when_they_are_yielded() -> None:
    loader = prepare_data_loader(DataLoader(data(), batch_size=8), device_type(), put_on_device=True)
    assert device_transfer.batch_transfer(loader.device, prefetching=False).start_copy is None
    assert [numbers.tolist()[0] for _, numbers in loader] == [0, 8, 16, 24, 32]
