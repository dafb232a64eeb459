"""Blocks on an accelerator: the order of copies and computation, recorded; and real where there is one."""

from __future__ import annotations

import contextlib

import pytest
import torch
from safetensors.torch import save_file

from accel_bigmodel import dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from accel_bigmodel.pinned import PinnedCarrier
from accel_bigmodel.stream import StreamedWeights
from accel_bigmodel.upload import SLOT_BYTES, upload
from accel_ops.weights.safetensors_file import SafetensorsFile
from accel_ops.weights.write import save_state_dict

CPU = torch.device("cpu")


class FakeDevice:
    """The CPU with streams and events that write down what is asked of them."""

    def __init__(self):
        self.log = []
        self.main = FakeStream(self, "compute")
        self.events = 0

    def Stream(self, device):  # noqa: N802 - torch's name
        return FakeStream(self, "copy")

    def Event(self):  # noqa: N802 - torch's name
        self.events += 1
        return FakeEvent(self, self.events)

    def current_stream(self, device):
        return self.main

    @contextlib.contextmanager
    def stream(self, stream):
        self.log.append(("copying", stream.name))
        yield


class FakeStream:
    def __init__(self, device, name):
        self.device, self.name = device, name

    def wait_event(self, event):
        self.device.log.append((self.name, "waits", event.number))

    def wait_stream(self, stream):
        self.device.log.append((self.name, "waits for", stream.name))


class FakeEvent:
    def __init__(self, device, number):
        self.device, self.number = device, number

    def record(self, stream):
        self.device.log.append((stream.name, "records", self.number))

    def synchronize(self):
        pass


def weights_of(count):
    return {
        f"b{i}.{leaf}": torch.full((3, 2), 10.0 * i + j) for i in range(count) for j, leaf in enumerate("wb")
    }


@pytest.mark.parametrize("resident", [True, False])
def test_blocks_pass_through_two_slots_with_their_values(resident):
    weights = weights_of(5)
    blocks = {f"b{i}": [f"b{i}.w", f"b{i}.b"] for i in range(5)}
    carrier = PinnedCarrier(
        weights, blocks, CPU, resident=weights if resident else (), module=FakeDevice(), pin=False
    )
    streamed = StreamedWeights(weights, blocks, carrier)
    places = set()
    for order in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [4, 2, 0, 2]):
        for i in order:
            for leaf in "wb":
                found = streamed[f"b{i}.{leaf}"]
                assert torch.equal(found, weights[f"b{i}.{leaf}"])
                if leaf == "w":
                    places.add(found.data_ptr())
    assert len(places) == 2


def test_a_slot_is_filled_only_after_its_last_use():
    weights = weights_of(3)
    blocks = {f"b{i}": [f"b{i}.w", f"b{i}.b"] for i in range(3)}
    device = FakeDevice()
    carrier = PinnedCarrier(weights, blocks, CPU, resident=weights, module=device, pin=False)
    streamed = StreamedWeights(weights, blocks, carrier)
    for i in (0, 1, 2, 0):
        streamed[f"b{i}.w"]
    # Per slot: free is recorded on the compute stream before the copy stream waits for it and copies again.
    for slot in carrier._slots:
        free, ready = slot.free.number, slot.ready.number
        story = [entry for entry in device.log if entry[-1] in (free, ready)]
        waits = [index for index, entry in enumerate(story) if entry == ("copy", "waits", free)]
        for again in waits[1:]:
            assert ("compute", "records", free) in story[:again]
            last_use = max(i for i, e in enumerate(story[:again]) if e == ("compute", "records", free))
            last_wait = max(i for i, e in enumerate(story[:again]) if e == ("compute", "waits", ready))
            assert last_wait < last_use < again
        for index, entry in enumerate(story):
            if entry == ("compute", "waits", ready):
                assert ("copy", "records", ready) in story[:index]


def test_the_next_block_is_copied_before_the_present_one_is_used_up():
    weights = weights_of(3)
    blocks = {f"b{i}": [f"b{i}.w", f"b{i}.b"] for i in range(3)}
    device = FakeDevice()
    carrier = PinnedCarrier(weights, blocks, CPU, resident=weights, module=device, pin=False)
    streamed = StreamedWeights(weights, blocks, carrier)
    streamed["b0.w"]
    assert device.log.count(("copying", "copy")) == 2  # b0, and already b1
    assert carrier.pinned_views().keys() == weights.keys()


def test_a_file_is_uploaded_through_slots(tmp_path):
    tensors = {
        "big": torch.arange(SLOT_BYTES // 2 + 7, dtype=torch.int32),
        "half": torch.randn(3, 5).bfloat16(),
        "one": torch.tensor(4.0),
        "none": torch.empty(0, 3),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    found = upload(
        SafetensorsFile(tmp_path / "m.safetensors"), list(tensors), CPU, module=FakeDevice(), pin=False
    )
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cpu", "disk", 0])
def test_a_model_runs_on_an_accelerator_wherever_its_blocks_are(toy, toy_class, tokens, tmp_path, place):
    device = torch.device(torch.accelerator.current_accelerator().type, 0)
    save_state_dict(toy.state_dict(), tmp_path, max_shard_size=900)
    with init_empty_weights():
        model = toy_class().eval()
    plan = {"embed": 0, "gain": 0, "blocks.0": place, "blocks.1": place, "blocks.2": place, "head": 0}
    model = load_checkpoint_and_dispatch(model, tmp_path, device_map=plan)
    expected = toy.to(device)(tokens.to(device)).cpu()
    for _ in range(3):
        found = model(tokens)
        assert found.device.type == "cpu"  # where the input was
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.gpu
def test_a_real_model_is_offloaded_to_the_cpu(toy, tokens):
    expected = toy(tokens)
    plan = {"embed": 0, "gain": 0, "blocks": "cpu", "head": 0}
    model = dispatch_model(toy, plan)
    for _ in range(3):
        assert torch.allclose(model(tokens), expected, atol=1e-5)
