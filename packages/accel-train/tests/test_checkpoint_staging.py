"""Copies of a state tree in host memory: complete after one wait, and serialised to the same bytes."""

from __future__ import annotations

import copy
import io
import threading
import weakref
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accel_train.checkpoint.staging import HostStaging, on_host, write_object

ACCELERATOR = torch.accelerator.current_accelerator()
everywhere = pytest.mark.parametrize("device", ["cpu", pytest.param(ACCELERATOR, marks=pytest.mark.gpu)])


def saved(tree):
    sink = io.BytesIO()
    write_object(tree, sink)
    return sink.getvalue()


def tree(device):
    base = torch.arange(50_000, dtype=torch.float64, device=device)
    shared = ["a", base]
    ordered = OrderedDict(weight=nn.Parameter(torch.ones(3, device=device)))
    ordered._metadata = {"version": 1}
    marked = torch.ones(2, device=device)
    marked.note = "kept"
    return {
        "moments": torch.full((3, 5), 0.25, dtype=torch.bfloat16, device=device).t(),
        "step": torch.tensor(3.0),
        "bytes": torch.arange(7, dtype=torch.uint8, device=device),
        "view": base[10:20],
        "tied": [shared, shared],
        "state": ordered,
        "array": np.arange(6.0).reshape(2, 3).T,
        "empty": torch.empty(0, 4, dtype=torch.int16, device=device),
        "complex": torch.tensor([1 + 2j], device=device),
        "sparse": torch.eye(3).to_sparse(),
        "marked": marked,
        "plain": (1, "two", None, torch.Size([1]), torch.float16),
    }


@everywhere
def test_a_copy_is_serialised_to_the_bytes_of_the_original(device):
    expected, original = saved(tree("cpu")), tree(device)
    staging = HostStaging()
    for _ in range(2):  # the second time into the same memory
        copy = staging.copy(original)
        assert saved(copy) == expected
    original["tied"][0][1].zero_()
    original["tied"][0].append(1)
    original["array"][:] = 0
    assert saved(copy) == expected


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
states = st.lists(st.tuples(dtypes, st.lists(st.integers(0, 5), max_size=3), st.booleans()), max_size=6)


@everywhere
@settings(deadline=None)
@given(states, st.integers(1, 3))
def test_any_state_is_serialised_as_it_was_while_training_goes_on(device, kinds, saves):
    staging, state = HostStaging(), []
    for dtype, shape, tied in kinds:
        tensor = (10 * torch.rand(shape)).to(device, dtype)
        state += [tensor, tensor.view(-1)[1:3]] if tied else [tensor]
    for _ in range(saves):
        # Views that are moved together share memory again.
        expected = saved(copy.deepcopy(state)) if device == "cpu" else saved(on_host(state))
        copied = staging.copy(state)
        for tensor in state:
            tensor.fill_(1)  # the next step
        assert saved(copied) == expected


def test_a_small_state_takes_few_bytes_on_disk():
    state = {"exp_avg": torch.zeros(1000), "step": torch.tensor(1.0)}
    assert len(saved(HostStaging().copy(state))) == len(saved(state))


@pytest.mark.gpu
def test_what_lives_on_is_copied_to_the_same_memory_and_the_rest_is_released():
    staging = HostStaging()
    state = [torch.zeros(1000, device=ACCELERATOR)]
    addresses = {staging.copy(state)[0].data_ptr() for _ in range(3)}
    assert len(addresses) == 1
    kept = staging.copy([torch.zeros(1000, device=ACCELERATOR)])[0]
    copies = weakref.ref(kept.untyped_storage())
    del kept
    assert copies() is None


@pytest.mark.gpu
def test_a_storage_that_was_resized_since_its_last_copy_is_copied_without_a_warning(caplog):
    staging, host = HostStaging(), torch.arange(6.0)
    grown, other = torch.zeros(2, device=ACCELERATOR), torch.ones(3, device=ACCELERATOR)
    staging.copy([grown, other])
    grown.untyped_storage().resize_(host.nbytes)
    grown.set_(grown.untyped_storage(), 0, (6,)).copy_(host)
    copied = staging.copy([other, grown])
    assert saved(copied) == saved([torch.ones(3), host])
    assert copied[1].is_pinned() == copied[0].is_pinned()
    assert staging.copy([grown])[0].data_ptr() == copied[1].data_ptr()  # the same memory again
    assert not caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's stager pins memory of CUDA and ROCm")
def test_memory_that_cannot_be_pinned_is_said_and_does(caplog, monkeypatch):
    def run_out(address, nbytes):
        raise RuntimeError("no memory to pin\nmore")

    monkeypatch.setattr("torch.cuda._pin_memory_utils.pin_memory", run_out)
    host = {"a": torch.ones(1 << 12, dtype=torch.uint8), "b": torch.full((5,), 2.0)}
    state = {name: tensor.to(ACCELERATOR) for name, tensor in host.items()}
    assert saved(HostStaging().copy(state)) == saved(host)
    assert caplog.text.count("could not be pinned (no memory to pin): copies are slower") == 1


def test_what_has_a_gradient_function_or_is_conjugate_is_copied():
    weight = torch.ones(2, requires_grad=True)
    copy = HostStaging().copy([weight, 2 * weight, torch.tensor([1 + 2j]).conj()])
    assert [tensor.requires_grad for tensor in copy] == [True, True, False]
    assert [tensor.tolist() for tensor in copy] == [[1.0, 1.0], [2.0, 2.0], [1 - 2j]]
    assert copy[0].data_ptr() != weight.data_ptr()


def test_another_thread_saves_with_checksums_while_we_save_without():
    seen = []

    class Sink(io.BytesIO):
        def write(self, data):
            if not seen:
                thread = threading.Thread(target=lambda: seen.append(torch.serialization.get_crc32_options()))
                thread.start()
                thread.join()
            return super().write(data)

    write_object({"a": torch.ones(3)}, Sink())
    assert seen == [True]
    assert torch.serialization.get_crc32_options() is True


@pytest.mark.gpu
def test_a_state_on_a_gpu_is_serialised_like_its_copy_in_host_memory():
    device = torch.accelerator.current_accelerator()
    state = {"small": torch.ones(3, device=device), "large": torch.arange(1 << 20, device=device)}
    state["view"] = state["large"][5:9]
    staging = HostStaging()
    for value in (1, 2):
        state["small"].fill_(value)
        torch.get_device_module()._sleep(100_000_000)
        state["large"].add_(value)
        expected = saved(state)
        copy = staging.copy(state)
        state["large"].zero_()
        assert saved(copy) == expected
        assert copy["small"].tolist() == [value] * 3
        assert copy["large"].is_pinned() == torch.cuda.is_available()  # what torch's stager pins
        state["large"].copy_(copy["large"])
