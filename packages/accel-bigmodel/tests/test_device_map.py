"""Device maps: the promises, checked against brute force on random module trees."""

from __future__ import annotations

import gc
import logging
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accel_bigmodel import (
    check_device_map,
    check_tied_parameters_on_same_device,
    compute_module_sizes,
    dispatch_model,
    explain,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel_bigmodel.device_map import smallest_bound
from accel_bigmodel.device_plan import units_of
from accel_bigmodel.dispatch import _warn_of_peer_access
from accel_bigmodel.host_to_device import cgroup_headroom
from accel_bigmodel.sizes import (
    Layers,
    compute_module_total_buffer_size,
    get_module_size_with_ties,
    read_layers,
)
from accel_ops.weights.read import device_of
from accel_ops.weights.write import save_state_dict
from accel_state.errors import SettingsError
from accel_state.labels import CustomDtype
from accel_state.streams import DeviceStreams


class Kept(nn.Module):
    """A class that stays whole."""


class Free(nn.Module):
    """A class that may be split."""


def leaf(sizes):
    module = Free()
    for index, (size, is_buffer) in enumerate(sizes):
        tensor = torch.empty(size, device="meta")
        if is_buffer:
            module.register_buffer(f"t{index}", tensor)
        else:
            module.register_parameter(f"t{index}", nn.Parameter(tensor))
    return module


tensors = st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=3)


@st.composite
def trees(draw, depth=3):
    """A random module tree with bare tensors, classes that stay whole, and shared parameters."""

    def build(level):
        module = leaf(draw(tensors))
        if level and draw(st.booleans()):
            module.__class__ = draw(st.sampled_from([Free, Free, Kept]))
            for index in range(draw(st.integers(1, 3))):
                module.add_module(f"m{index}", build(level - 1))
            if draw(st.booleans()):
                module.add_module("parts", nn.ModuleList([build(level - 1)]))
        return module

    model = build(depth)
    owners = [
        (part, name)
        for part in model.modules()
        for name in list(part._parameters)
        if part._parameters[name] is not None
    ]
    if len(owners) > 1:
        for _ in range(draw(st.integers(0, 2))):
            (a, x), (b, y) = draw(st.sampled_from(owners)), draw(st.sampled_from(owners))
            b._parameters[y] = a._parameters[x]
    return model


memories = st.fixed_dictionaries(
    {}, optional={0: st.integers(0, 400), 1: st.integers(0, 400), "cpu": st.integers(0, 400)}
)


def blocks_by_hand(model, plan, offloaded):
    """The bytes of the blocks that are streamed: what is below entries and has no list of modules in it."""

    def below(module):
        lists = [part for part in module.modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
        if not any(tensor.numel() for part in lists for tensor in [*part.parameters(), *part.buffers()]):
            if not isinstance(module, (nn.ModuleList, nn.Sequential)):
                yield sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
            return
        for child in module.children():
            yield from below(child)

    for name, device in plan.items():
        if device in offloaded:
            parent, _, leaf = name.rpartition(".")
            module = model.get_submodule(parent)._modules.get(leaf) if name else model
            if module is not None:
                yield from below(module)


def atoms_by_hand(model, name="", kept=("Kept",)):
    """The layers, found anew: (name, {id: bytes}, {id: bytes of buffers})."""

    def below(module):
        found, buffers = {}, {}
        for part in module.modules():
            for tensor in part._parameters.values():
                if tensor is not None:
                    found[id(tensor)] = tensor.numel() * 4
            for tensor in part._buffers.values():
                found[id(tensor)] = buffers[id(tensor)] = tensor.numel() * 4
        return found, buffers

    children = list(model._modules.items())
    if not children or type(model).__name__ in kept:
        yield name, *below(model)
        return
    prefix = f"{name}." if name else ""
    for key, tensor in model._parameters.items():
        yield prefix + key, {id(tensor): tensor.numel() * 4}, {}
    for key, tensor in model._buffers.items():
        size = {id(tensor): tensor.numel() * 4}
        yield prefix + key, size, size
    for key, child in children:
        yield from atoms_by_hand(child, prefix + key, kept)


@pytest.mark.filterwarnings("ignore:The buffers of offloaded layers")
@settings(max_examples=150, deadline=None)
@given(trees(), memories, st.booleans(), st.booleans())
def test_a_map_keeps_every_promise(model, memory, clean, offload_buffers):
    plan = infer_auto_device_map(
        model, memory, no_split_module_classes="Kept", clean_result=clean, offload_buffers=offload_buffers
    )
    check_device_map(model, plan)
    atoms = list(atoms_by_hand(model))
    where = {name: device_of(name, plan) for name, _, _ in atoms}
    # Classes that stay whole are whole: each layer has one device.
    assert None not in where.values()
    executors = [key for key in (0, 1) if key in memory] or ["cpu"]
    held = {}
    for name, sizes, _ in atoms:
        held.setdefault(where[name], {}).update(sizes)
    # Tied weights live together, and count once.
    homes = {}
    for name, sizes, _ in atoms:
        for key in sizes:
            assert homes.setdefault(key, where[name]) == where[name]
    away = [b for name, s, b in atoms if where[name] not in executors and s]
    streamed = max(blocks_by_hand(model, plan, {"cpu", "disk"} - set(executors)), default=0)
    on_disk = [sum(s.values()) for name, s, _ in atoms if where[name] == "disk" and s]
    # The main device: the first that holds any layer; nothing is reserved where nothing runs.
    main = next((key for key in executors if key in where.values()), None)
    for device, room in memory.items():
        used = sum(held.get(device, {}).values())
        reserve = 0
        if device == main:
            kept = {} if offload_buffers else {k: v for b in away for k, v in b.items()}
            reserve = streamed + sum(kept.values())
        elif device == "cpu" and executors != ["cpu"]:
            reserve = max(on_disk, default=0)
        if used:
            assert used + reserve <= room, (device, plan)


@pytest.mark.filterwarnings("ignore:The buffers of offloaded layers")
@settings(max_examples=100, deadline=None)
@given(trees(), memories)
def test_a_clean_map_says_the_same_with_fewest_entries(model, memory):
    long = infer_auto_device_map(model, memory, clean_result=False)
    short = infer_auto_device_map(model, memory)
    assert {name: device_of(name, short) for name in long} == long
    assert len(short) <= len(long)
    # No parent could stand for its children.
    prefixes = {name.rpartition(".")[0] for name in short if name}
    for prefix in prefixes - {""}:
        inside = {d for n, d in long.items() if n == prefix or n.startswith(f"{prefix}.")}
        assert len(inside) > 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(2, 4))
def test_the_smallest_bound_is_that_of_brute_force(sizes, devices):
    layers = Layers(
        names=[str(i) for i in range(len(sizes))], sizes=sizes, totals=sizes, buffers=[0] * len(sizes)
    )

    def brute(start, parts):
        if parts == 1:
            return sum(sizes[start:])
        return min(max(sum(sizes[start:cut]), brute(cut, parts - 1)) for cut in range(start, len(sizes) + 1))

    assert smallest_bound(units_of(layers), [10**6] * devices) == brute(0, devices)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=10), st.integers(2, 4))
def test_a_balanced_map_has_the_smallest_largest_share(sizes, devices):
    model = nn.ModuleList([leaf([(size, False)]) for size in sizes])
    memory = dict.fromkeys(range(devices), 10**6)
    plan = infer_auto_device_map(model, get_balanced_memory(model, memory))
    shares = [0] * devices
    for index, size in enumerate(sizes):
        shares[device_of(str(index), plan)] += 4 * size
    layers = read_layers(model, frozenset(), None)
    assert max(shares) == smallest_bound(units_of(layers), [10**6] * devices)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ({0: 200, 1: 200}, {"linear1": 0, "batchnorm": 1, "linear2": 1}),
        ({0: 236}, {"": 0}),
        ({0: 163}, {"": "disk"}),
        ({0: 50, 1: 500}, {"": 1}),
        ({0: 300, "cpu": 300}, {"": 0}),
        ({"cpu": 236}, {"": "cpu"}),
        ({"cpu": 205}, {"linear1": "cpu", "batchnorm": "disk", "linear2": "disk"}),
        ({0: "1KB", "disk": 0}, {"": 0}),
        ({}, {"": "disk"}),
    ],
)
def test_known_maps(memory, expected):
    assert infer_auto_device_map(Small(), memory) == expected


class Tower(nn.Module):
    """Blocks of 12 KiB in two leaves each, between an embedding and a head of 4 KiB."""

    def __init__(self, blocks=6, dtype=None):
        super().__init__()
        self.embed = nn.Embedding(32, 32, dtype=dtype)
        self.blocks = nn.ModuleList([Residual(dtype) for _ in range(blocks)])
        self.head = nn.Linear(32, 32, bias=False, dtype=dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, dtype=None):
        super().__init__()
        self.up = nn.Linear(32, 48, bias=False, dtype=dtype)
        self.down = nn.Linear(48, 32, bias=False, dtype=dtype)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.gpu
@pytest.mark.parametrize("no_split", [None, "Residual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_room_that_a_map_keeps_is_enough_to_stream_two_blocks(
    tmp_path, no_split, dtype, simulated, monkeypatch
):
    """From float32 in the file; a block that is used as float64 takes 24 KiB on the device."""
    model, tokens = Tower().to(dtype).eval(), torch.tensor([[1, 2, 31]])
    save_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()}, tmp_path)
    model.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    with torch.no_grad():
        expected = model(tokens)
    wide = dtype.itemsize // 4
    capacity = wide * (4 + 12 + 2 * 12 + 4) << 10  # the last for activations
    plan = infer_auto_device_map(model, {0: capacity}, no_split)
    resident = [name for name in model.state_dict() if device_of(name, plan) == 0]
    assert resident == ["embed.weight", "blocks.0.up.weight", "blocks.0.down.weight"]
    with init_empty_weights():
        empty = Tower(dtype=dtype).eval()
    failures, original = [], DeviceStreams.empty

    def allocate(streams, nbytes):
        try:
            return original(streams, nbytes)
        except torch.OutOfMemoryError as error:
            failures.append(error)
            raise

    gc.collect()
    simulated.empty_cache()
    with simulated.capacity(simulated.memory_allocated(0) + capacity), torch.no_grad():
        empty = load_checkpoint_and_dispatch(empty, tmp_path, plan)
        monkeypatch.setattr(DeviceStreams, "empty", allocate)
        for _ in range(3):
            assert torch.equal(empty(tokens), expected)
    assert not failures


@pytest.mark.parametrize(
    ("capacity", "resident"),
    [(28, ["embed"]), (27, ["embed", "blocks.0.up"]), (17, ["embed"]), (15, [])],
)
def test_a_device_without_room_for_two_blocks_keeps_room_for_one(capacity, resident):
    plan = infer_auto_device_map(Tower(), {0: capacity << 10, "cpu": 1 << 20}, clean_result=False)
    assert [name for name, where in plan.items() if where == 0] == resident


def test_large_blocks_count_as_the_allocator_rounds_them():
    model = nn.ModuleList([leaf([((5 << 20) // 4, False)]) for _ in range(5)])  # 5 MiB, and 6 as allocated
    for capacity, expected in ((22 << 20, 2), ((22 << 20) - 1, 1)):
        plan = infer_auto_device_map(model, {0: capacity, "cpu": 1 << 30})
        assert [device_of(str(index), plan) for index in range(5)].count(0) == expected


def test_an_empty_accelerator_gets_what_fits_when_asked():
    model = nn.ModuleList([nn.Linear(20, 20), nn.Linear(2, 2), nn.Linear(3, 3)])
    memory = {0: 90, 1: 90}
    assert set(infer_auto_device_map(model, memory).values()) == {"disk"}
    plan = infer_auto_device_map(
        nn.ModuleList([nn.Linear(20, 20), nn.Linear(2, 2), nn.Linear(20, 20)]),
        {0: 1710, "cpu": 10**6},
        fallback_allocation=True,
    )
    assert plan == {"0": "cpu", "1": 0, "2": "cpu"}


def test_a_verbose_plan_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        infer_auto_device_map(Small(), {0: 500}, verbose=True)
    assert "linear1: 64 bytes on 0" in caplog.text


def test_sizes_follow_the_types_that_weights_will_have():
    model = Small()
    assert compute_module_sizes(model)[""] == 236
    half = compute_module_sizes(model, dtype="float16")
    assert (half["linear1"], half["batchnorm"]) == (32, 40)  # the batch counter stays int64
    assert compute_module_sizes(model, dtype=CustomDtype.INT4)["linear1.weight"] == 6
    special = compute_module_sizes(model, special_dtypes={"linear1.weight": torch.float64})
    assert special["linear1.weight"] == 96
    assert compute_module_sizes(model, buffers_only=True)[""] == 40
    assert compute_module_sizes(model, dtype="fp8")["linear1"] == 16
    with pytest.raises(ValueError, match="'flat16' is not a torch dtype"):
        compute_module_sizes(model, dtype="flat16")


def test_buffers_and_modules_with_tied_weights_have_their_bytes():
    model = Small()
    assert compute_module_total_buffer_size(model) == 40
    sizes = {"": 30, "head": 12, "body": 7, "body.a": 5, "body.b": 1}
    modules = [("body", model), ("head", model.linear1)]
    assert get_module_size_with_ties(["body.a", "body.b"], 12, sizes, modules) == (13, ["body"], [model])
    assert get_module_size_with_ties([], 12, sizes, modules) == (12, [], [])
    tied = nn.ModuleDict({"embed": nn.Embedding(5, 2), "head": nn.Linear(2, 5)})
    tied["head"].weight = tied["embed"].weight  # counted at its first name
    sizes = compute_module_sizes(tied)
    result = get_module_size_with_ties(["head.weight"], sizes["embed"], sizes, [("head", tied["head"])])
    assert result == (40 + 20, ["head"], [tied["head"]])


def test_the_largest_layers_are_named():
    model = nn.Sequential(Small(), Small())
    sizes = compute_module_sizes(model)
    children = list(model.named_children())
    assert get_max_layer_size(children, sizes, []) == (100, ["0.linear2", "1.linear2"])
    assert get_max_layer_size(children, sizes, "Small") == (236, ["0", "1"])


def test_memory_is_read_in_order_and_refused_by_name():
    assert list(get_max_memory({"disk": 1, "cpu": "1GB", 1: 5, 0: "2GiB"}).items()) == [
        (0, 2**31),
        (1, 5),
        ("cpu", 10**9),
        ("disk", 1),
    ]
    given = {"cpu": 1e9 * 0.9, 0: "2GiB"}
    assert get_max_memory(given) == given == {0: 2**31, "cpu": 900_000_000}, "callers read it from their own"
    assert set(get_max_memory()) >= {"cpu"}
    with pytest.raises(SettingsError, match="'gpu zero', which is not a device"):
        get_max_memory({"gpu zero": 1})
    with pytest.raises(SettingsError, match="-5"):
        get_max_memory({0: -5})
    with pytest.raises(SettingsError, match="'lots' is not a size"):
        get_max_memory({0: "lots"})


@pytest.mark.parametrize("cpu", ["cpu", torch.device("cpu")])
@pytest.mark.parametrize("gpu", [0, "0", np.int64(0), torch.device("cuda", 0), "cuda:0"])
@pytest.mark.parametrize("size", [200, 200.0, "200", np.int64(200), np.float32(200)])
def test_every_form_of_a_budget_counts(cpu, gpu, size):
    given = {gpu: size, cpu: 10**6}
    key = "cuda:0" if gpu == "cuda:0" else 0
    assert get_max_memory(given) == {key: 200, "cpu": 10**6}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # 160 bytes
    assert infer_auto_device_map(model, given) == {"": key}
    assert infer_auto_device_map(model, {gpu: 0, cpu: size}) == {"": "cpu"}


@pytest.mark.parametrize("key", [0.0, (0,), None, True])
def test_a_budget_for_what_is_no_device_is_refused(key):
    with pytest.raises(
        SettingsError, match=rf"{re.escape(repr(key))}.* is not a device: use 0, 'cpu' or 'disk'"
    ):
        get_max_memory({key: 1000, "cpu": 1})


def test_balancing_leaves_the_first_accelerator_low_when_asked():
    model = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(6)])
    memory = get_balanced_memory(model, {0: 1000, 1: 1000, 2: 1000}, low_zero=True)
    assert memory[0] == 0
    plan = infer_auto_device_map(model, memory)
    assert sorted(plan.values()) == [1, 1, 1, 2, 2, 2]
    assert get_balanced_memory(model, {0: 1000, "cpu": 5}) == {0: 1000, "cpu": 5}
    assert get_balanced_memory(model, {0: 10, 1: 10}) == {0: 10, 1: 10}


def test_a_map_that_leaves_tensors_out_names_them(toy):
    with pytest.raises(SettingsError, match=r"part of Toy: 'blokcs', and has no device for gain, "):
        check_device_map(toy, {"embed": 0, "blokcs": 0, "head": 0})


@pytest.mark.parametrize("extra", [{"blokcs": "cpu"}, {"blocks.7": "cpu"}, {"embed.bias": "cpu"}])
def test_what_a_map_names_and_the_model_lacks_is_warned_of(toy, tokens, extra):
    expected = toy(tokens)
    with pytest.warns(
        UserWarning, match=rf"do not match any submodules in the model: \['{next(iter(extra))}'\]"
    ):
        model = dispatch_model(toy, {"": "cpu", **extra})
    assert torch.equal(model(tokens), expected)
    check_device_map(toy, {"": "cpu", "head.weight": "cpu", "blocks.0.scale": 0})  # without a warning


@pytest.mark.parametrize("placed", [{"": "cpu"}, {"": "cpu", "head": "disk"}])
def test_a_device_that_only_a_stray_entry_names_is_not_touched(toy, tokens, placed, tmp_path):
    expected = toy(tokens)
    plan = {**placed, "blokcs": "cuda:7"}
    with pytest.warns(UserWarning, match="do not match any submodules in the model: .'blokcs'"):
        model = dispatch_model(toy, plan, offload_dir=tmp_path)
    assert torch.equal(model(tokens), expected)
    assert model.hf_device_map == plan


@pytest.mark.parametrize("device", [1.5, True, ["cpu"], None, "gpu zero", -2])
def test_a_map_with_a_value_that_is_no_device_ends_in_one_sentence(toy, tmp_path, device):
    with pytest.raises(SettingsError, match=r"sends '' to .*, which is not a device: use 0, 'cpu' or 'disk'"):
        check_device_map(toy, {"": device})
    with pytest.raises(SettingsError, match="which is not a device"):
        load_checkpoint_in_model(toy, tmp_path, device_map={"": device})


def test_a_map_that_is_no_mapping_ends_in_one_sentence(toy):
    with pytest.raises(SettingsError, match="pass a mapping of module names to devices"):
        check_device_map(toy, ["cpu"])
    with pytest.raises(SettingsError, match="has the key 3"):
        check_device_map(toy, {3: "cpu"})


@settings(max_examples=100, deadline=None)
@given(trees(), st.booleans())
def test_a_model_that_fits_on_the_first_device_goes_there(model, offload_buffers):
    total = compute_module_sizes(model)[""]  # tied weights once
    memory = {0: total, 1: 10**6, "cpu": 10**6}
    found = infer_auto_device_map(model, memory, offload_buffers=offload_buffers)
    assert set(found.values()) == {0}


V2 = {"memory.max": "5000", "memory.current": "3000", "memory.stat": "anon 1\ninactive_file 600\n"}
V1 = {
    "memory.limit_in_bytes": "5000",
    "memory.usage_in_bytes": "3000",
    "memory.stat": "inactive_file 1\ntotal_inactive_file 600\n",
}


@pytest.mark.parametrize(("line", "root", "files"), [("0::", "", V2), ("7:cpu,memory:", "memory", V1)])
def test_the_limit_of_a_control_group_bounds_main_memory(tmp_path, line, root, files):
    proc, mount = tmp_path / "cgroup", tmp_path / "mount"
    assert cgroup_headroom(proc, mount) is None
    proc.write_text(f"12:pids:/job/step\n{line}/job/step\n")
    step = mount / root / "job" / "step"
    step.mkdir(parents=True)
    assert cgroup_headroom(proc, mount) is None
    for name, text in files.items():
        (step.parent / name).write_text(text)  # the job's own limit, above that of its step
    (step / next(iter(files))).write_text("max")
    assert cgroup_headroom(proc, mount) == 2600
    for name, text in files.items():
        (step / name).write_text(text.replace("5000", "4000"))
    assert cgroup_headroom(proc, mount) == 1600


def test_local_ranks_share_main_memory(monkeypatch):
    alone = get_max_memory()["cpu"]
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert get_max_memory()["cpu"] < alone / 3


def test_tied_weights_on_different_devices_are_reported(caplog):
    check_tied_parameters_on_same_device([["a.w", "b.w"]], {"a": 0, "b": 0})
    assert not caplog.text
    check_tied_parameters_on_same_device([["a.w", "b.w"]], {"a": 0, "b": "cpu"})
    assert "a.w on 0, b.w on cpu" in caplog.text


def test_an_explanation_counts_what_each_forward_moves(toy):
    plan = {"embed": 0, "gain": 0, "blocks": "cpu", "head": "disk"}
    found = explain(plan, toy)
    shares = {row.device: row for row in found.rows}
    total = sum(t.nbytes for t in [*toy.parameters(), *toy.buffers()])
    blocks = sum(t.nbytes for t in toy.blocks.parameters())
    assert found.total == total
    assert shares["cpu"].moved == blocks
    assert shares["disk"].moved == toy.head.weight.nbytes  # tied: stored at 0, yet it moves
    assert shares["disk"].nbytes == 0
    assert found.moved == blocks + toy.head.weight.nbytes
    assert sum(row.fraction for row in found.rows) == pytest.approx(1)
    assert "moved per forward" in str(found)
    assert explain({"": "cpu"}, toy).moved == 0


@pytest.mark.parametrize("value", [["cpu"], "0: 10GB", 3])
def test_maps_and_budgets_that_are_no_mappings_are_refused_in_a_short_sentence(toy, tmp_path, value):
    long = ["cpu"] * 2000
    for wrong in (value, long):
        with pytest.raises(SettingsError, match=r"max_memory is .*pass a mapping") as caught:
            infer_auto_device_map(toy, wrong)
        assert len(str(caught.value)) < 300
    for wrong in (["cpu"], long):
        with pytest.raises(SettingsError, match=r"device_map is .*pass a mapping") as caught:
            load_checkpoint_and_dispatch(toy, tmp_path, device_map=wrong)
        assert len(str(caught.value)) < 300


def with_buffers():
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    for layer in model:
        layer.register_buffer("table", torch.ones(50))
    return model


def test_buffers_that_keep_every_layer_from_the_accelerator_are_warned_of():
    """Layers take 64 + 200 bytes: with all buffers on the main device none finds room."""
    memory = {0: 550, "cpu": 10_000}
    with pytest.warns(UserWarning, match=r"buffers of offloaded layers need 600 bytes.*offload_buffers=True"):
        assert infer_auto_device_map(with_buffers(), memory) == {"": "cpu"}
    found = infer_auto_device_map(with_buffers(), memory, offload_buffers=True)
    assert found == {"0": 0, "1": "cpu", "2": "cpu"}


@pytest.mark.parametrize("supported", [True, False])
def test_cards_with_faulty_copies_between_them_are_warned_of(toy, monkeypatch, caplog, supported):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("accel_bigmodel.dispatch.check_cuda_p2p_ib_support", lambda: supported)
    _warn_of_peer_access([0, 1])
    assert ("0, 1, and the driver of these cards has faulty peer-to-peer copies" in caplog.text) != supported
