"""The simulated accelerator: plain PyTorch on it gives what the CPU gives; mistakes are noticed."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from harness import distributed, simulated

D0, D1 = "npu:0", "npu:1"
NAMES = {"sim": "simccl", "npu": "hccl", "mlu": "cncl", "musa": "mccl", "sdaa": "tccl", "neuron": "neuron"}
NAMED = """\
import torch
from torch.distributed import get_default_backend_for_device
module = torch.get_device_module()
device = torch.ones(2, device=module.NAME).device
is_attribute = module is getattr(torch, module.NAME)
print(device, torch.accelerator.device_count(), get_default_backend_for_device(device), is_attribute)
"""


def fork_and_use() -> str:
    """What a fork of a process that has used the device gets from it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.ones(1, device=D0)
            os.write(writer, b"worked")
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as text:
        return text.read()


@pytest.mark.parametrize("name", ["sim", "mlu"])
def test_it_has_the_name_and_the_collectives_of_a_vendor(name: str) -> None:
    simulated.require()
    environ = {**simulated.environment(name, devices=3), "MLU_VISIBLE_DEVICES": "0,2"}
    done = subprocess.run(
        [sys.executable, "-c", NAMED], env=environ, capture_output=True, text=True, check=False
    )
    count = 2 if name == "mlu" else 3
    assert done.stdout.split() == [f"{name}:0", str(count), NAMES[name], "True"], done.stderr


@distributed(world_size=1, device="npu")
def test_host_code_cannot_touch_device_memory_and_devices_do_not_mix() -> None:
    on_device = torch.ones(4, device=D0)
    with pytest.raises(TypeError, match="numpy"):
        on_device.numpy()
    for other in (torch.ones(4), torch.ones(4, device=D1)):
        with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device.*npu:0 and"):
            on_device + other
    with pytest.raises(RuntimeError, match="same device"):
        nn.functional.linear(on_device.view(1, 4), torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="same device"):
        nn.functional.conv1d(on_device.view(1, 1, 4), torch.ones(1, 1, 2))
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.npu.set_device(7)
    assert (on_device + torch.tensor(1.0)).tolist() == [2.0] * 4
    assert on_device[torch.tensor([0, 1])].shape == (2,)
    assert on_device.data_ptr() >> 60 == 1
    assert torch.npu.touched() == [0, 1]


FUNCTIONS = {
    "sort": torch.sort,
    "topk": lambda t: t.topk(2),
    "max": lambda t: t.max(1),
    "nonzero": torch.nonzero,
    "unique": lambda t: t.unique(),
    "softmax": lambda t: t.softmax(-1),
    "transposed": lambda t: t.t().contiguous(),
    "split": lambda t: t.split(2),
    "mask": lambda t: t[t > 0],
    "where": lambda t: torch.where(t > 0, t, 0),
    "bfloat16": lambda t: t.to(torch.bfloat16).float(),
    "view": lambda t: t.view(torch.int32),
    "norm": lambda t: t.norm(),
    "svd": torch.linalg.svdvals,
    "cat": lambda t: torch.cat([t, t]),
    "einsum": lambda t: torch.einsum("ij,kj->ik", t, t),
    "histc": torch.histc,
    "gelu": nn.functional.gelu,
    "layer norm": lambda t: nn.functional.layer_norm(t, (7,)),
    "rfft": lambda t: torch.fft.rfft(t).abs(),
    "complex": lambda t: torch.complex(t, t).angle(),
    "convolution": lambda t: nn.functional.conv1d(t[None], torch.full((2, 5, 3), 0.3, device=t.device)),
    "attention": lambda t: nn.functional.scaled_dot_product_attention(t[None], t[None], t[None]),
    "repeat": lambda t: torch.repeat_interleave(t, 2, 0),
    "foreach": lambda t: torch._foreach_add([t, t], 1.0),
}


@distributed(world_size=1, device="npu")
def test_operators_give_what_the_cpu_gives() -> None:
    host = torch.randn(5, 7)
    on_device = host.to(D1)
    for name, function in FUNCTIONS.items():
        expected, result = function(host), function(on_device)
        if name == "attention":  # the CPU has a fused kernel
            torch.testing.assert_close(result.cpu(), expected)
            continue
        leaves = ([expected], [result]) if torch.is_tensor(expected) else (expected, result)
        for right, found in zip(*leaves, strict=True):
            assert found.device == torch.device(D1), name
            assert torch.equal(found.cpu(), right), name
    assert torch.histc(torch.tensor([1, 2, 2], device=D1), 2, 1, 2).tolist() == [1, 2]  # not on the CPU
    for made in (
        torch.arange(5, device=D1),
        torch.full((2,), 3, device=D1),
        torch.tril_indices(3, 3, device=D1),
    ):
        assert made.device == torch.device(D1)


@distributed(world_size=1, device="npu")
def test_storages_are_written_in_place_resized_and_replaced() -> None:
    host = torch.randn(7, 3)
    on_device = host.to(D0)
    out = torch.empty(0, device=D0)
    torch.matmul(on_device, on_device.t(), out=out)
    assert torch.equal(out.cpu(), host @ host.t())
    view = on_device.view(-1)
    view[0] = 42
    assert on_device[0, 0].item() == 42
    other = torch.empty(0, device=D0).set_(on_device)
    assert other.data_ptr() == on_device.data_ptr()
    storage = on_device.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(7 * 3 * 4)
    assert on_device.isnan().all()
    on_device.copy_(host)
    assert torch.equal(other.cpu(), host)
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer.to(D0)
    assert optimizer.param_groups[0]["params"][0] is layer.weight
    assert layer.weight.is_npu


@distributed(world_size=1, device="npu")
def test_memory_is_counted_and_ends() -> None:
    mib = 1 << 20
    before, ended = torch.npu.memory_allocated(0), torch.npu.memory_stats(0)["num_ooms"]
    tensor = torch.empty(mib, dtype=torch.uint8, device=D0)
    assert torch.npu.memory_allocated(0) == torch.accelerator.memory_allocated(0) == before + mib
    torch.npu.reset_peak_memory_stats(0)
    del tensor
    assert torch.npu.memory_allocated(0) == before
    assert torch.npu.max_memory_allocated(0) == torch.npu.memory_reserved(0) == before + mib
    free, total = torch.npu.mem_get_info(0)
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info(0) == (free + mib, total)
    with torch.npu.capacity(before + mib, mib):
        with pytest.raises(torch.OutOfMemoryError, match=r"NPU out of memory. Tried to allocate 1.00 MiB"):
            torch.empty(mib + 1, dtype=torch.uint8, device=D0)
        full = torch.empty(mib, dtype=torch.uint8, device=D0)
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(1, device=D0)
        torch.ones(1, device=D1)
        del full
        torch.ones(1, device=D0)
    assert torch.npu.memory_stats(0)["num_ooms"] == ended + 2
    with torch.npu.pinned_capacity(100), pytest.raises(RuntimeError, match="cannot be pinned"):
        torch.ones(1000).pin_memory()
    for _ in range(2):  # a model leaves nothing
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to(D0)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 8, device=D0)).sum().backward()
        optimizer.step()
        del model, optimizer
        gc.collect()
        assert torch.npu.memory_allocated(0) == before


@distributed(world_size=1, device="npu")
def test_each_device_has_random_numbers_of_its_own() -> None:
    def draw(device: str) -> list[torch.Tensor]:
        dropped = nn.functional.dropout(torch.ones(8, device=device))
        return [torch.randn(4, device=device), dropped, torch.randperm(9, device=device)]

    torch.manual_seed(3)
    first, second, host = draw(D0), draw(D1), torch.randn(4)
    torch.manual_seed(3)
    for right, found in zip(first + second, draw(D0) + draw(D1), strict=True):
        assert torch.equal(right, found)
    assert torch.equal(host, torch.randn(4)), "the CPU's generator is not used"
    assert not torch.equal(host, first[0].cpu())
    state = torch.npu.get_rng_state(0)
    assert (state.device.type, state.numel()) == ("cpu", 16)
    right = draw(D0)
    torch.npu.set_rng_state(state, 0)
    assert all(torch.equal(a, b) for a, b in zip(right, draw(D0), strict=True))
    generator = torch.Generator(D1).manual_seed(7)
    state = generator.get_state()
    right = torch.randn(2, device=D1, generator=generator)
    generator.set_state(state)
    assert torch.equal(right, torch.randn(2, device=D1, generator=generator))
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(2, device=D0, generator=torch.Generator())
    with torch.random.fork_rng(devices=[0], device_type="npu"):
        torch.rand(1, device=D0)


@distributed(world_size=1, device="npu")
def test_a_copy_that_nobody_waits_for_reads_nan() -> None:
    host, side = torch.arange(4.0).pin_memory(), torch.npu.Stream(D0)
    current = torch.npu.current_stream()
    with torch.npu.stream(side):
        copied = host.to(D0, non_blocking=True)
        event = torch.npu.Event()
        event.record(side)
    assert (torch.npu.late_copies(), event.query()) == (1, False)  # asking lets it run
    assert event.query()
    with torch.npu.stream(side):
        copied = host.to(D0, non_blocking=True)
    assert copied.isnan().all()
    assert any("aten::" in race and "a wait is missing" in race for race in torch.npu.take_races())
    current.wait_stream(side)
    copied.record_stream(current)
    assert copied.tolist() == [0, 1, 2, 3]
    back = copied.to("cpu", non_blocking=True)
    assert back.is_pinned()
    assert back.isnan().all()
    current.record_event().synchronize()
    assert back.tolist() == [0, 1, 2, 3]
    assert not torch.npu.take_races()


@distributed(world_size=1, device="npu")
def test_work_that_nothing_orders_is_a_race_though_it_ran_in_time() -> None:
    side, current = torch.npu.Stream(D0), torch.npu.current_stream(D0)
    data = torch.ones(4, device=D0)
    with torch.npu.stream(side):
        side.wait_stream(current)
        data.add_(1)
        unordered = data * 2
    assert unordered.tolist() == [4.0] * 4  # the values are right: operators run at once
    (race,) = set(torch.npu.take_races())
    assert race == (
        f"aten::copy_ on the default stream of device 0 reads what stream {side.stream_id} "
        "may not have written: a wait is missing"
    )
    current.wait_stream(side)
    data.zero_()  # after the other stream's read
    assert not torch.npu.take_races()
    side.wait_stream(current)
    with torch.npu.stream(side):
        data + 1
    torch.npu.synchronize(0)
    data.zero_()
    assert not torch.npu.take_races(), "the host waited"


@distributed(world_size=1, device="npu")
@pytest.mark.parametrize("how", ["nothing", "record_stream", "wait", "synchronize"])
def test_memory_freed_while_another_stream_uses_it_is_a_race(how: str) -> None:
    side, current = torch.npu.Stream(D0), torch.npu.current_stream(D0)
    data = torch.ones(4, device=D0)
    side.wait_stream(current)
    with torch.npu.stream(side):
        kept = data * 2
    if how == "record_stream":
        data.record_stream(side)
    if how == "wait":
        current.wait_stream(side)
    if how == "synchronize":
        side.synchronize()
    del data
    torch.empty(1, device=D0)
    races = torch.npu.take_races()
    assert len(races) == (how == "nothing"), races
    assert all("neither record_stream nor a wait" in race for race in races)
    del kept


@distributed(world_size=1, device="npu")
def test_synchronisations_and_copies_are_counted() -> None:
    host, pinned, index = torch.ones(3), torch.ones(3).pin_memory(), torch.tensor([0], device=D0)
    with torch.npu.counting() as counted:
        on_device = host.to(D0)
        pinned.to(D0, non_blocking=True)
        on_device.to(D1)
        (on_device * 2 + 1).sum()
    assert counted.synchronisations == {"copy": 1}
    assert counted.copies == {"host_to_device": 2, "device_to_device": 1}
    with torch.npu.counting() as counted:
        assert on_device.sum() == 3
        on_device[on_device > 0]
        on_device[index]
        on_device.nonzero()
        on_device.cpu()
        torch.npu.synchronize()
        torch.npu.current_stream().synchronize()
        torch.npu.current_stream().record_event().synchronize()
    assert counted.synchronisations == {
        "item": 1, "aten::index": 1, "aten::nonzero": 1, "copy": 1, "device": 1, "stream": 1, "event": 1
    }  # fmt: skip
    assert counted.copies == {"device_to_host": 1}


@distributed(world_size=1, device="npu")
def test_tensors_are_saved_pickled_and_copied(tmp_path) -> None:
    tensors = {"a": torch.arange(3.0, device=D1), "b": torch.ones(2, device=D0)[1:]}
    torch.save(tensors, tmp_path / "x.pt")
    for where, device in ((None, D1), ("cpu", "cpu"), (D0, D0), ({D1: D0}, D0)):
        loaded = torch.load(tmp_path / "x.pt", map_location=where)
        assert loaded["a"].device == torch.device(device)
        assert loaded["a"].tolist() == [0, 1, 2]
    layer = pickle.loads(pickle.dumps(nn.Linear(2, 2).to(D1)))
    other = copy.deepcopy(layer)
    assert other.weight.device == torch.device(D1)
    assert other.weight.data_ptr() != layer.weight.data_ptr()
    save_file({"a": tensors["a"]}, tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors")["a"].tolist() == [0, 1, 2]


def train(
    device: str, dtype: torch.dtype | None = None, **options: bool
) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    inputs, targets = torch.randn(32, 8).to(device), torch.randn(32, 1).to(device)
    kind = torch.device(device).type
    scaler = torch.amp.GradScaler(kind, enabled=dtype == torch.float16)
    losses = []
    for _ in range(4):
        with torch.autocast(kind, dtype, enabled=dtype is not None):
            loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


@distributed(world_size=1, device="npu")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_training_gives_what_the_cpu_gives(options: dict[str, bool], dtype: torch.dtype | None) -> None:
    right, found = train("cpu", dtype, **options), train(D1, dtype, **options)
    if dtype is None:
        assert found[0] == right[0]
        assert all(torch.equal(a, b) for a, b in zip(found[1], right[1], strict=True))
    else:  # autocast of the CPU casts other operators
        torch.testing.assert_close(found[0], right[0], rtol=0.05, atol=0.02)


@distributed(world_size=1, device="npu")
def test_autocast_and_checkpointing() -> None:
    ones = torch.ones(2, 2, device=D0)
    with torch.autocast("npu", torch.bfloat16):
        assert (ones @ ones).dtype == torch.bfloat16
        assert ones.softmax(-1).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(ones, ones)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(D0)
    for use_reentrant in (False, True):
        checkpoint(
            model, torch.ones(3, 4, device=D0, requires_grad=True), use_reentrant=use_reentrant
        ).sum().backward()


@distributed(world_size=1, device="npu", restart=True)
def test_a_fork_of_a_process_that_used_it_is_refused() -> None:
    torch.ones(1, device=D0)
    assert "Cannot re-initialize NPU in forked subprocess" in fork_and_use()


@distributed(world_size=1, device="npu")
def test_threads_have_current_devices_of_their_own_and_data_is_pinned() -> None:
    devices = []
    with torch.npu.device(1):
        thread = threading.Thread(target=lambda: devices.append(torch.ones(1, device="npu").device.index))
        thread.start()
        thread.join()
        assert torch.ones(1, device="npu").device.index == 1
    assert devices == [0]
    for batch in DataLoader(torch.arange(8.0), batch_size=4, pin_memory=True):
        assert batch.is_pinned()
        assert batch.to(D1, non_blocking=True).sum().item() in {6, 22}
