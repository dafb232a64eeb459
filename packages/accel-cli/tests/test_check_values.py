from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from accel_cli.commands.check.patches import Chunks
from accel_cli.commands.check.recorder import CollectiveRecorder, FakeValueMode
from accel_cli.commands.check.strategy import ELEMENTWISE, step_on_local_shards
from accel_cli.commands.estimate.trace import LiveStorageTracker


@pytest.fixture
def without_values():
    with FakeTensorMode(allow_non_fake_inputs=True), FakeValueMode(lambda _: None):
        yield


@pytest.mark.usefixtures("without_values")
def test_numbers_are_one_and_masks_select_everything():
    x = torch.randn(3, 4, requires_grad=True)
    assert x.sum().item() == 1.0
    assert bool(x.sum() > 7)
    assert x[x > 0].shape == (12,)
    assert x[:, torch.ones(4) > 0].shape == (3, 4)
    assert torch.nonzero(x > 0).shape == (12, 2)
    assert torch.masked_select(x, x[0] > 0).shape == (12,)
    values, counts = torch.unique(torch.arange(5), return_counts=True)
    assert (values.shape, counts.shape) == ((5,), (5,))
    x[x > 0].sum().backward()
    assert x.grad.shape == (3, 4)


@pytest.mark.usefixtures("without_values")
def test_nothing_has_gone_wrong():
    x = torch.randn(3, 4)
    assert not torch.isnan(x.sum())
    assert not torch.isnan(x).any().item()
    assert not (torch.isinf(x) | torch.isnan(x)).any()
    assert torch.isnan(x).sum().item() == 0
    assert torch.isfinite(x).all()
    assert (x != torch.zeros(3, 4)).any()


def test_what_a_dataset_takes_from_a_tensor_that_was_made_before_is_answered_too():
    recorder = CollectiveRecorder()
    with recorder.watching():
        labels = torch.arange(10)
        with recorder.outside():
            assert int(labels[3].item()) == 1
            assert torch.tensor(7).item() == 7, "this one has a value"


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda one: one.__name__))
def test_an_optimizer_of_plain_tensors_steps_as_ever(kind):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    for one, context in ((model, step_on_local_shards), (other, None)):
        optimizer = kind(one.parameters(), lr=0.1)
        for _ in range(2):
            one(torch.ones(1, 3)).sum().backward()
            if context is None:
                optimizer.step()
            else:
                with context(optimizer):
                    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("length", "parts"), [(8, 4), (7, 4), (5, 4), (2, 4), (6, 1)])
def test_the_chunks_of_fsdp_are_those_of_torch(length, parts):
    tensor = torch.arange(length * 2).reshape(length, 2)
    right, found = _chunk_with_empty(tensor, parts, 0), Chunks(tensor, parts, 0)
    for rank in range(parts):
        assert torch.equal(found[rank], right[rank])


def test_what_is_moved_to_the_host_and_what_comes_of_it_is_not_on_the_device():
    recorder = CollectiveRecorder()
    with recorder.watching():
        model = nn.Linear(1, 1)
        recorder.ledger = LiveStorageTracker(model)
        with recorder.ledger:
            x = torch.zeros(1000)
            there = recorder.moved(x, to_host=True)
            twice = torch.cat([there, there])
            assert max(one.activations for one in recorder.ledger.moments) == 4000
            assert recorder.host == 12_000
            back = recorder.moved(twice, to_host=False)
            assert recorder.moved(back, to_host=False) is back
            assert max(one.activations for one in recorder.ledger.moments) == 12_000
    assert recorder.host == 12_000
