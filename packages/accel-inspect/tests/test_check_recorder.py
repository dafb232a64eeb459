from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_inspect.check.recorder import CollectiveRecorder, FakeValueMode


@pytest.fixture
def fake_values():
    with FakeTensorMode(allow_non_fake_inputs=True), FakeValueMode(lambda _: None):
        yield


@pytest.mark.usefixtures("fake_values")
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


@pytest.mark.usefixtures("fake_values")
def test_nothing_has_gone_wrong():
    x = torch.randn(3, 4)
    assert not torch.isnan(x.sum())
    assert not torch.isnan(x).any().item()
    assert not (torch.isinf(x) | torch.isnan(x)).any()
    assert torch.isnan(x).sum().item() == 0
    assert torch.isfinite(x).all()
    assert (x != torch.zeros(3, 4)).any()
    assert torch.allclose(x, torch.zeros(3, 4))


def test_what_a_dataset_takes_from_a_tensor_that_was_made_before_is_answered_too():
    recorder = CollectiveRecorder()
    with recorder.on_fake_tensors():
        labels = torch.arange(10)
        with recorder.on_real_tensors():
            assert int(labels[3].item()) == 1
            assert torch.tensor(7).item() == 7, "it has a value"


def test_a_tensor_that_is_moved_to_the_host_and_those_computed_from_it_are_not_on_the_device():
    recorder = CollectiveRecorder()
    with recorder.on_fake_tensors():
        recorder.track([nn.Linear(1, 1)])
        tracker = recorder.tracker
        x = torch.zeros(1000)
        on_host = tracker.move(x, to_host=True)
        twice = torch.cat([on_host, on_host])
        assert max(moment.activations for moment in tracker.moments) == 4000
        assert tracker.host == 12_000
        on_device = tracker.move(twice, to_host=False)
        assert tracker.move(on_device, to_host=False) is on_device
        assert max(moment.activations for moment in tracker.moments) == 12_000
    assert tracker.host == 12_000
