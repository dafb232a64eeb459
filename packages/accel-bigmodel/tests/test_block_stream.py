"""Offloaded blocks on an accelerator: what they give is what the plain model gives.

On the simulated accelerator, a copy that is not waited for reads NaN, and unordered accesses are errors.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    AlignDevicesHook,
    OffloadedWeightsLoader,
    align_module_device,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel_bigmodel.host_to_device import SLOT_BYTES, SLOTS, HostToDevice, upload
from accel_bigmodel.offloaded_block import StreamedBlocks
from accel_bigmodel.sources import open_checkpoint
from accel_ops.weights.read import load_state_dict
from accel_ops.weights.safetensors_io import SafetensorsFile
from accel_ops.weights.write import save_state_dict
from accel_state.errors import CheckpointError
from accel_state.streams import DeviceStreams, device_streams

CPU = torch.device("cpu")
ACCELERATOR = torch.accelerator.current_accelerator()
DEVICE = CPU if ACCELERATOR is None else torch.device(ACCELERATOR.type, 0)
gpu = pytest.mark.gpu
everywhere = pytest.mark.parametrize("device", [CPU, pytest.param(DEVICE, marks=gpu)], ids=["cpu", "device"])


def is_same(found, expected):
    """Whether tensors of any devices are equal, as far as two devices compute the same."""
    return torch.allclose(found.cpu(), expected.cpu(), rtol=1e-5, atol=1e-6)


@pytest.fixture
def pinned(monkeypatch):
    """The sizes of the buffers that have been pinned."""
    sizes, original = [], DeviceStreams.pinned

    def recorded(streams, nbytes):
        buffer = original(streams, nbytes)
        sizes.append(nbytes)
        return buffer

    monkeypatch.setattr(DeviceStreams, "pinned", recorded)
    return sizes


@contextmanager
def peak_memory():
    """The most bytes that are allocated on the device within the block, beyond those from before it."""
    module, peak = torch.get_device_module(DEVICE), []
    before = module.memory_allocated(0)
    module.reset_peak_memory_stats(0)
    yield peak
    peak.append(module.max_memory_allocated(0) - before)


@pytest.fixture
def limit(simulated):
    """Limit what is free of the device's memory, or the host memory that can be pinned, for this test."""
    with ExitStack() as stack:

        def limit(*, device=None, pinned=None):
            gc.collect()
            if device is not None:
                simulated.empty_cache()
                stack.enter_context(simulated.capacity(simulated.memory_allocated(0) + device))
            if pinned is not None:
                stack.enter_context(simulated.pinned_capacity(pinned))

        yield limit


class Node(nn.Module):
    """Uses its children, then its own parameters: after whatever its children brought."""

    def __init__(self, width, parameters, children, listed):
        super().__init__()
        for index in range(parameters):
            self.register_parameter(f"p{index}", nn.Parameter(torch.randn(width)))
        self.parts = nn.ModuleList(children) if listed else None
        if not listed:
            for index, child in enumerate(children):
                self.add_module(f"c{index}", child)

    def forward(self, x):
        for child in self.children():
            for part in child if isinstance(child, nn.ModuleList) else [child]:
                x = part(x)
        for parameter in self._parameters.values():
            x = torch.tanh(x * parameter + parameter)
        return x


@st.composite
def models(draw, depth=3):
    """Random nestings of blocks, bare parameters above blocks, weights tied across modules."""

    def build(level):
        children = draw(st.integers(0, 3)) if level else 0
        parameters = draw(st.integers(0 if children else 1, 2))
        return Node(
            3, parameters, [build(level - 1) for _ in range(children)], bool(children) and draw(st.booleans())
        )

    model = build(depth)
    owners = [(part, leaf) for part in model.modules() for leaf in part._parameters]
    for _ in range(draw(st.integers(0, 3)) if owners else 0):
        (a, x), (b, y) = draw(st.sampled_from(owners)), draw(st.sampled_from(owners))
        if all(a._parameters[x] is not other for other in b._parameters.values()):
            b._parameters[y] = a._parameters[x]
    return model.eval()


def forwards(model, inputs):
    with torch.no_grad():
        return [model(x) for x in inputs]


@gpu
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    models(),
    st.sampled_from(["cpu", "disk", "in place", "cast", "map"]),
    st.data(),
)
def test_a_streamed_model_gives_what_the_plain_one_gives(tmp_path_factory, model, kind, data):
    folder = tmp_path_factory.mktemp("model")
    inputs = [torch.randn(2, 3) for _ in range(3)]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if kind == "cast":
        model = model.bfloat16().float()
    expected = forwards(model, inputs)
    if kind == "cpu" and names:
        cpu_offload(model, DEVICE)
    elif kind == "disk" and names:
        disk_offload(model, folder, DEVICE)
    elif kind == "map":
        plan = {"": 0, **{name: "disk" for name in names if data.draw(st.booleans())}}
        dispatch_model(model, plan, main_device=DEVICE, offload_dir=folder)
    elif names:
        state = {name: tensor.clone() for name, tensor in model.state_dict(keep_vars=True).items()}
        stored = torch.bfloat16 if kind == "cast" else torch.float32
        save_file({name: t.detach().to(stored) for name, t in state.items()}, folder / "model.safetensors")
        load_checkpoint_and_dispatch(model, folder, device_map={"": "disk", names[0]: 0})
    for x, wanted in zip(inputs, expected, strict=True):
        assert is_same(forwards(model, [x.to(DEVICE)])[0], wanted)


class Scaled(nn.Module):
    """Uses its own parameter after all of its blocks, like the logit scale of two towers."""

    def __init__(self, blocks=4, width=3):
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 3.0))
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(blocks)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.scale


@gpu
@pytest.mark.parametrize("blocks", [2, 3, 4, 5])
def test_a_parameter_above_blocks_is_right_after_them(tmp_path, blocks):
    model, x = Scaled(blocks).eval(), torch.randn(2, 3)
    expected = model(x)
    dispatch_model(model, {"": "disk"}, main_device=DEVICE, offload_dir=tmp_path)
    assert not model.scale.is_meta
    assert model.blocks[0].weight.is_meta
    for _ in range(4):
        assert is_same(model(x), expected)


@gpu
def test_no_more_than_two_blocks_are_on_the_device_whatever_their_number():
    model, x = Scaled(8, width=256).eval(), torch.randn(2, 256)
    cpu_offload(model, DEVICE)
    with torch.no_grad(), peak_memory() as peak:
        for _ in range(3):
            model(x)
    assert peak[0] < 3 * model.blocks[0].weight.nbytes


@gpu
def test_a_third_block_waits_for_the_memory_of_the_first_while_the_device_lags_behind():
    weights = {f"{number}.w": torch.full((4,), float(number)) for number in range(6)}
    device = device_streams(DEVICE)
    blocks = StreamedBlocks(
        OffloadedWeightsLoader(state_dict=weights), {name[0]: [name] for name in weights}, DEVICE
    )
    host, more, used = device.pinned(16), device.empty(16), device.new_event()
    for number in range(6):
        value = blocks.acquire(str(number))[f"{number}.w"]
        blocks.prefetch(str((number + 1) % 6))
        blocks._worker.submit(int).result()  # the next block has its memory
        assert used.query()  # the last one is not in use any more
        assert (value + 0).tolist() == [number] * 4
        device.copy_(more, host)  # work that nobody waits for yet
        used.record(device.current_stream())
        del value
        blocks.release(str(number))


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_block_that_finds_no_memory_waits_for_the_one_that_runs(dtype, limit):
    """Blocks of 4096 bytes, and 8192 more where they are cast; the memory is enough for one."""
    weights = {f"{number}.w": torch.full((1024,), float(number)) for number in range(4)}
    index = {name: {"dtype": "float64"} for name in weights} if dtype == torch.float64 else {}
    limit(device=20_000 if index else 6000)
    loader = OffloadedWeightsLoader(state_dict=weights)
    if index:
        stored = loader.stored
        loader.stored = lambda name: replace(stored(name), dtype=dtype)
    blocks = StreamedBlocks(loader, {name[0]: [name] for name in weights}, DEVICE)
    for number in [0, 1, 2, 3] * 2:
        value = blocks.acquire(str(number))[f"{number}.w"]
        blocks.prefetch(str((number + 1) % 4))
        blocks._worker.submit(int).result()  # the next block has looked for memory
        assert value.dtype == dtype
        assert bool((value == number).all())
        del value
        blocks.release(str(number))


@gpu
def test_a_block_larger_than_the_device_is_out_of_memory_and_leaves_it_usable(limit):
    weights = {"large": torch.ones(1024), "small": torch.ones(4)}
    limit(device=2048)
    blocks = StreamedBlocks(
        OffloadedWeightsLoader(state_dict=weights), {name: [name] for name in weights}, DEVICE
    )
    with pytest.raises(torch.OutOfMemoryError):
        blocks.acquire("large")
    assert bool((blocks.acquire("small")["small"] == 1).all())
    blocks.release("small")


@gpu
@pytest.mark.parametrize("capacity", [0, 4096, 6000])
@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_a_model_streams_without_pinned_memory(tmp_path, capacity, kind, caplog, limit):
    model, x = Scaled(4, width=32).eval(), torch.randn(2, 32)  # blocks of 4608 bytes
    expected = model(x)
    limit(pinned=capacity)
    with torch.no_grad():
        if kind == "cpu":
            cpu_offload(model, DEVICE)
        else:
            disk_offload(model, tmp_path, DEVICE)
        for _ in range(2):
            assert is_same(model(x), expected)
    assert "could not be pinned" in caplog.text


@gpu
def test_gradients_are_those_of_the_plain_model():
    model, x = Scaled().eval(), torch.randn(2, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    cpu_offload(model, DEVICE)
    (found,) = torch.autograd.grad(model(x).square().sum(), x)
    assert is_same(found, expected)


class Giving(nn.Module):
    """Its output is its weight."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(2, 3))

    def forward(self):
        return self.latents.expand(2, 3)


@gpu
def test_a_weight_that_is_an_output_outlives_its_block():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.giving, self.blocks = Giving(), nn.ModuleList([nn.Linear(3, 3) for _ in range(5)])

        def forward(self, x):
            latents = self.giving()
            for block in self.blocks:
                x = block(x)
            return x + latents

    model, x = Model().eval(), torch.randn(2, 3)
    expected = model(x)
    with torch.no_grad():
        cpu_offload(model, DEVICE)
        for _ in range(2):
            assert is_same(model(x), expected)


class Tied(nn.Module):
    def __init__(self, between=3):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.embed = nn.Embedding(700, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(between)])
        self.head = nn.Linear(4, 700, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) * self.gain
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@gpu
@pytest.mark.parametrize("kind", ["cpu", "disk", "in place"])
@pytest.mark.parametrize("between", [0, 3])
def test_a_tied_weight_is_copied_once_in_a_forward(tmp_path, kind, between, monkeypatch):
    model, tokens = Tied(between).eval(), torch.tensor([1, 2])
    expected = model(tokens)
    if kind == "cpu":
        cpu_offload(model, DEVICE)
    elif kind == "disk":
        disk_offload(model, tmp_path, DEVICE)
    else:
        save_state_dict(model.state_dict(), tmp_path)
        load_checkpoint_and_dispatch(model, tmp_path, device_map={"": "disk", "gain": 0})
    copied, original = [], DeviceStreams.copy_

    def copy_(streams, target, source):
        copied.append(target.nbytes)
        original(streams, target, source)

    monkeypatch.setattr(DeviceStreams, "copy_", copy_)
    with torch.no_grad():
        assert is_same(model(tokens), expected)
        copied.clear()
        for _ in range(4):
            assert is_same(model(tokens), expected)
    assert len([size for size in copied if size >= 700 * 4 * 4]) == 4


@gpu
def test_several_threads_may_run_one_model():
    model = Scaled(5).eval()
    inputs = [torch.randn(2, 3) for _ in range(4)]
    expected = forwards(model, inputs)
    found = {}
    device = device_streams(DEVICE)
    cpu_offload(model, DEVICE)

    def run(index):
        with torch.no_grad(), device.on(device.new_stream()):
            for _ in range(5):
                output = model(inputs[index])
            device.current_stream().synchronize()
            found[index] = output

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, wanted in enumerate(expected):
        assert is_same(found[index], wanted)


@gpu
def test_a_block_that_two_streams_use_is_cast_for_both(tmp_path):
    layer = nn.Linear(3, 3).half().float()
    save_file({name: t.half() for name, t in layer.state_dict().items()}, tmp_path / "m.safetensors")
    index = {
        name: {"safetensors_file": str(tmp_path / "m.safetensors"), "dtype": "float32"}
        for name in ("weight", "bias")
    }
    weights = OffloadedWeightsLoader(index=index)
    device = device_streams(DEVICE)
    blocks = StreamedBlocks(weights, {"a": ["weight", "bias"]}, DEVICE)
    first = blocks.acquire("a")
    with device.on(device.new_stream()):
        second = blocks.acquire("a")
        assert is_same(second["weight"] + 0, layer.weight)
        blocks.release("a")
        del second
    assert is_same(first["weight"] + 0, layer.weight)
    blocks.release("a")
    del first


@gpu
@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_a_model_may_be_deleted_in_mid_prefetch(tmp_path, kind):
    model, x = Scaled(5).eval(), torch.randn(2, 3)
    device = device_streams(DEVICE)
    if kind == "cpu":
        cpu_offload(model, DEVICE)
    else:
        disk_offload(model, tmp_path, DEVICE)
    model.blocks[2](x)  # the next block is on its way
    gone = weakref.ref(model.blocks[0])
    del model
    gc.collect()
    assert gone() is None
    for _ in range(3):  # somebody else gets the memory
        other = device.empty(1 << 6).fill_(7)
        assert bool((other == 7).all())
        del other


@gpu
def test_a_forward_that_fails_releases_its_blocks():
    model, x = Scaled().eval(), torch.randn(2, 3)
    expected = model(x)
    cpu_offload(model, DEVICE)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 4))
    assert all(block.weight.is_meta for block in model.blocks)
    assert is_same(model(x), expected)


def test_a_module_that_uses_the_weights_of_its_children_just_works(tmp_path):
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)]
    model, x = nn.Sequential(*layers).eval(), torch.randn(1, 4, 8)
    plan = {"0": "cpu", "1": "disk", "2": "disk"}
    with torch.inference_mode():
        expected = model(x)
        dispatch_model(model, plan, offload_dir=tmp_path)
        for _ in range(2):
            assert torch.allclose(model(x), expected, atol=1e-6)


@gpu
def test_shapes_are_learnt_without_reading(tmp_path, monkeypatch):
    model = Scaled(3).half()
    save_state_dict(model.state_dict(), tmp_path)
    with init_empty_weights():
        empty = Scaled(3)
    read = []
    original = SafetensorsFile.read_into
    monkeypatch.setattr(
        SafetensorsFile,
        "read_into",
        lambda self, target, begin: (read.append(target.nbytes), original(self, target, begin))[1],
    )
    plan = {"scale": 0, "blocks": "disk"}
    load_checkpoint_and_dispatch(empty, tmp_path, device_map=plan, dtype=torch.float32)
    assert read == [6]  # the scale, which stays on the device
    empty(torch.ones(1, 3))
    assert len(read) >= 7


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_file_that_was_replaced_is_still_read(tmp_path, device, dtype):
    model, x = Scaled().half().float().eval(), torch.randn(2, 3)
    save_state_dict({name: t.to(dtype) for name, t in model.state_dict().items()}, tmp_path)
    expected = model(x)
    load_checkpoint_and_dispatch(model, tmp_path, device_map={"scale": device, "blocks": "disk"})
    assert is_same(model(x), expected)
    save_state_dict({"z": torch.zeros(100)}, tmp_path)
    assert is_same(model(x), expected)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_offloaded_model_is_saved_into_the_folder_that_it_is_read_from(tmp_path, device, dtype):
    model, x = Tied().half().float().eval(), torch.tensor([1, 699])
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    save_state_dict({name: t.to(dtype) for name, t in model.state_dict().items()}, tmp_path)
    expected = model(x)
    with torch.no_grad():
        with init_empty_weights():
            offloaded = Tied().eval()
        load_checkpoint_and_dispatch(offloaded, tmp_path, device_map={"": "disk", "gain": device})
        whole = {}
        for name, module in offloaded.named_modules():
            with align_module_device(module, CPU):
                for leaf, tensor in module.named_parameters(recurse=False):
                    whole[f"{name}.{leaf}".lstrip(".")] = tensor.detach().clone()
        save_state_dict(whole, tmp_path)
        assert is_same(offloaded(x), expected)
    saved = load_state_dict(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in saved.items())


@gpu
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64, torch.float8_e4m3fn])
def test_a_file_is_uploaded_through_a_ring_of_pinned_buffers(tmp_path, slots, wide):
    tensors = {
        "big": torch.arange(1000, dtype=torch.int32),
        "wide": torch.randn(7, 50).to(wide),
        "half": torch.randn(3, 5).bfloat16(),
        "one": torch.tensor(4.0),
        "none": torch.empty(0, 3),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    device = device_streams(DEVICE)
    pipeline = HostToDevice(device, slot_bytes=256, slots=slots)
    for _ in range(2):
        used = device.empty(4096).fill_(1)  # memory that is freed while it is used
        del used
        wanted = {name: tensor.dtype for name, tensor in tensors.items()}
        wanted |= {"wide": torch.bfloat16, "half": torch.float64}  # cast to fewer bytes and to more
        found = upload(file, wanted, pipeline)
        for name, tensor in tensors.items():
            assert found[name].dtype == wanted[name]
            assert torch.equal((found[name] + 0).cpu(), tensor.to(wanted[name]))
        del found


@gpu
def test_an_upload_that_fails_leaves_no_copy_behind(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(500), "b": torch.ones(500)}, path)

    class Shrinking(SafetensorsFile):
        def read_into(self, target, begin):
            super().read_into(target, begin)
            os.truncate(path, 1000)

    file = Shrinking(path)
    device = device_streams(DEVICE)
    pipeline = HostToDevice(device, slot_bytes=512, slots=1)
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        upload(file, dict.fromkeys("ab", torch.float32), pipeline)
    gc.collect()
    other = device.empty(2000).fill_(7)
    device.synchronize()
    assert bool((other == 7).all())


@gpu
@pytest.mark.parametrize("capacity", [0, 256, 512])
def test_an_upload_needs_no_pinned_memory(tmp_path, capacity, caplog, limit, pinned):
    tensors = {"a": torch.randn(500), "b": torch.randn(3, 5)}
    save_file(tensors, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    device = device_streams(DEVICE)
    limit(pinned=capacity)
    pipeline = HostToDevice(device, slot_bytes=256)
    for _ in range(2):
        for name, value in upload(file, dict.fromkeys(tensors, torch.float32), pipeline).items():
            assert is_same(value + 0, tensors[name])
    assert sum(pinned) == capacity
    assert caplog.text.count("could not be pinned") == 1


@gpu
def test_a_reader_that_fails_lets_the_others_finish_first(tmp_path):
    save_file({"a": torch.ones(64), "b": torch.ones(64)}, tmp_path / "m.safetensors")
    failed = threading.Event()

    class Damaged(SafetensorsFile):
        def read_into(self, target, begin):
            if begin == self.entries["a"].begin:
                failed.set()
                raise CheckpointError("a is damaged")
            failed.wait()
            super().read_into(target, begin)

    file = Damaged(tmp_path / "m.safetensors")
    device = device_streams(DEVICE)
    pipeline = HostToDevice(device, slot_bytes=256, slots=2)
    with pytest.raises(CheckpointError, match="a is damaged"):
        upload(file, dict.fromkeys("ab", torch.float32), pipeline)
    pipeline._readers.shutdown()  # only now, too late for the memory of b, if upload did not wait
    gc.collect()
    other = device.empty(256).fill_(7)  # the memory to which b was copied
    device.synchronize()
    assert bool((other == 7).all())


@gpu
def test_all_files_of_a_load_share_one_pipeline(tmp_path, monkeypatch, pinned):
    tensors = {f"p{number}": torch.randn(256) for number in range(8)}  # 1024 bytes each
    save_state_dict(tensors, tmp_path, max_shard_size=1024)
    made, original = [], DeviceStreams.new_stream
    monkeypatch.setattr(DeviceStreams, "new_stream", lambda streams: (made.append(1), original(streams))[1])
    sources = open_checkpoint(tmp_path)
    assert len(sources) == 8
    threads = threading.active_count()
    for source in sources:
        for name, value in source.upload(dict.fromkeys(source.tensors, torch.float32), DEVICE).items():
            assert is_same(value + 0, tensors[name])
    assert len(made) == 1
    assert pinned == [SLOT_BYTES]  # one buffer, for one tensor per file
    assert threading.active_count() <= threads + SLOTS


@gpu
def test_a_file_is_uploaded_in_the_types_of_the_model(tmp_path):
    tensors = {f"p{i}": torch.randn(256) for i in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    with init_empty_weights():
        model = Node(256, 8, [], listed=False)
    model = load_checkpoint_and_dispatch(model, tmp_path, device_map={"": 0}, dtype=torch.bfloat16)
    for name, tensor in tensors.items():
        assert torch.equal((model.get_parameter(name) + 0).cpu(), tensor.bfloat16())


@gpu
def test_pinned_memory_stays_within_its_budget(monkeypatch, pinned):
    model, x = Scaled(6, width=32).eval(), torch.randn(2, 32)  # blocks of 4608 bytes
    expected = model(x)
    monkeypatch.setattr("accel_bigmodel.offloaded_block.available_host_memory", lambda: 40_000)
    cpu_offload(model, DEVICE)
    assert pinned == [4608, 4608]  # for which torch takes powers of two, within half of what is there
    with torch.no_grad():
        for _ in range(2):
            assert is_same(model(x), expected)


@everywhere
def test_weights_that_a_hook_was_given_are_used(device):
    model, x = Scaled().eval(), torch.randn(2, 3)
    with torch.no_grad():
        cpu_offload(model, device)
        layer = model.blocks[1]
        hook = layer._hf_hook
        assert isinstance(hook, AlignDevicesHook)
        assert torch.equal(hook.weights_map["weight"], hook.weights_map.dataset["blocks.1.weight"])
        hook.pre_forward(layer)  # as merging an adapter does
        merged = {name: tensor.detach() + 1 for name, tensor in layer.named_parameters()}
        hook.weights_map = merged
        hook.post_forward(layer, torch.tensor([]))
        assert layer.weight.is_meta
        plain = nn.Sequential(*[nn.Linear(3, 3) for _ in model.blocks])
        for index, target in enumerate(plain):
            source = merged if index == 1 else model.blocks[index]._hf_hook.weights_map
            target.load_state_dict({name: source[name] + 0 for name in ("weight", "bias")})
        assert is_same(model(x), plain(x) * 3)


@everywhere
def test_a_hook_that_is_removed_takes_its_weights_along(device):
    model, x = Scaled().eval(), torch.randn(2, 3)
    expected = model(x)
    with torch.no_grad():
        cpu_offload(model, device)
        remove_hook_from_module(model.blocks[2])
        assert not model.blocks[2].weight.is_meta
        model.blocks[2].to(device)
        assert is_same(model(x), expected)
        remove_hook_from_submodules(model)
        assert not any(parameter.is_meta for parameter in model.parameters())
        assert is_same(model.to("cpu")(x), expected)


def test_a_block_in_use_is_not_moved_to_another_device():
    model = Scaled().eval()
    cpu_offload(model, "cpu")
    layer = model.blocks[0]
    with align_module_device(layer, torch.device("meta")):
        assert layer.weight.is_meta
    with align_module_device(layer):
        assert not layer.weight.is_meta
        layer._hf_hook.execution_device = torch.device("meta")
        with pytest.raises(RuntimeError, match=r"'blocks\.0' are in use on cpu: they cannot be on meta too"):
            layer._hf_hook.pre_forward(layer)
        layer._hf_hook.execution_device = torch.device("cpu")
    assert layer.weight.is_meta


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cpu", "disk", 0])
def test_a_model_runs_on_an_accelerator_wherever_its_blocks_are(toy, toy_class, tokens, tmp_path, place):
    device = torch.device(torch.accelerator.current_accelerator().type, 0)
    save_state_dict(toy.state_dict(), tmp_path, max_shard_size=900)
    with init_empty_weights():
        model = toy_class().eval()
    plan = {"embed": 0, "gain": 0, "blocks.0": place, "blocks.1": place, "blocks.2": place, "head": 0}
    model = load_checkpoint_and_dispatch(model, tmp_path, device_map=plan)
    tokens_there = tokens.to(device)
    expected = toy.to(device)(tokens_there)
    if place == 0:  # A model on one device has no hooks, and its inputs are where it is.
        tokens = tokens_there
    for _ in range(3):
        found = model(tokens)
        assert found.device == tokens.device
        assert torch.allclose(found, expected.to(tokens.device), atol=1e-5)


@pytest.mark.gpu
def test_a_real_model_is_offloaded_to_the_cpu(toy, tokens):
    expected = toy(tokens)
    plan = {"embed": 0, "gain": 0, "blocks": "cpu", "head": 0}
    model = dispatch_model(toy, plan)
    for _ in range(3):
        assert torch.allclose(model(tokens), expected, atol=1e-5)
