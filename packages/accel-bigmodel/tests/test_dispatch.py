"""Dispatched models: the same output, and nothing lost on the way."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import multiprocessing
import os
import pickle
import re
import threading

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn
from torch.overrides import TorchFunctionMode

from accel_bigmodel import (
    align_module_device,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    offload_state_dict,
    remove_hook_from_submodules,
    set_module_tensor_to_device,
)
from accel_bigmodel.hooks import align_hook_of
from accel_ops.weights.tensors import find_tied_parameters
from accel_ops.weights.write import save_state_dict
from accel_state.errors import SettingsError


def hooks_of(model):
    return [name for name, part in model.named_modules() if hasattr(part, "_hf_hook")]


def test_a044_one_device_needs_no_hooks(toy, tokens):
    expected = toy(tokens)
    model = dispatch_model(toy, {"": "cpu"})
    assert hooks_of(model) == []
    assert torch.equal(model(tokens), expected)
    mixed = dispatch_model(copy.deepcopy(toy), {"": "cpu"}, force_hooks=True)
    assert hooks_of(mixed)


def test_submodules_of_resident_entries_have_no_hooks_when_all_runs_on_one_device(toy, tmp_path):
    plan = {
        "embed": "cpu",
        "gain": "cpu",
        "blocks.0": "cpu",
        "blocks.1": "disk",
        "blocks.2": "cpu",
        "head": "cpu",
    }
    dispatch_model(toy, plan, offload_dir=tmp_path)
    entries = {"", "embed", "blocks.0", "blocks.2", "head"}
    assert hooks_of(toy) == [
        name for name, _ in toy.named_modules() if name in entries or name.startswith("blocks.1")
    ]


def test_a039_bare_parameters_and_buffers_have_a_place(toy, tokens, tmp_path):
    toy.register_buffer("offset", torch.ones(1))
    expected = toy(tokens)
    for place in ("cpu", "disk"):
        plan = {"embed": "cpu", "gain": place, "offset": place, "blocks": "disk", "head": "cpu"}
        model = dispatch_model(copy.deepcopy(toy), plan, offload_dir=tmp_path / place)
        assert torch.equal(model(tokens), expected)


def test_a041_dispatch_keeps_ties(toy, tokens, tmp_path):
    expected = toy(tokens)
    plan = {"embed": "cpu", "gain": "cpu", "blocks": "disk", "head": "cpu"}
    model = dispatch_model(toy, plan, offload_dir=tmp_path)
    assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]
    assert torch.equal(model(tokens), expected)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_whole_models_are_offloaded(toy, tokens, tmp_path, offload):
    expected = toy(tokens)
    if offload == "cpu":
        cpu_offload(toy, execution_device="cpu")
    else:
        disk_offload(toy, tmp_path, execution_device="cpu")
    offloaded = [name for name, parameter in toy.named_parameters() if parameter.is_meta]
    assert offloaded == [name for name, _ in toy.named_parameters() if name != "gain"]  # above blocks: stays
    for _ in range(2):
        assert torch.equal(toy(tokens), expected)


class Copying(TorchFunctionMode):
    """Let `to("cpu")` be a copy, as from an accelerator."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result.clone() if func is torch.Tensor.to and args[1:] == ("cpu",) else result


@pytest.mark.parametrize("given", [False, True])
def test_tied_weights_are_copied_to_the_cpu_once(toy, tokens, given):
    expected = toy(tokens)
    state = toy.state_dict() if given else None
    with Copying():
        cpu_offload(toy, "cpu", state_dict=state)
    embed, head = (align_hook_of(module).weights_map["weight"] for module in (toy.embed, toy.head))
    assert embed.data_ptr() == head.data_ptr()
    assert torch.equal(toy(tokens), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param(0, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_a_copy_of_an_offloaded_model_runs_by_itself(toy, tokens, tmp_path, offload, device):
    expected = toy(tokens)
    if device == 0:
        device = torch.device(torch.accelerator.current_accelerator().type, 0)
    with torch.no_grad():
        if offload == "cpu":
            cpu_offload(toy, device)
        else:
            disk_offload(toy, tmp_path, device)
        assert torch.allclose(toy(tokens), expected, atol=1e-5)
        twin = copy.deepcopy(toy)
        assert [name for name, p in twin.named_parameters() if p.is_meta] == [
            name for name, p in toy.named_parameters() if p.is_meta
        ]
        del toy
        gc.collect()
        for _ in range(2):
            assert torch.allclose(twin(tokens), expected, atol=1e-5)
        remove_hook_from_submodules(twin)
        assert torch.allclose(twin.to("cpu")(tokens), expected, atol=1e-5)


def test_a_folder_with_the_weights_of_another_model_is_refused(toy, tokens, tmp_path):
    disk_offload(nn.Sequential(nn.Linear(2, 2)), tmp_path)
    expected = toy(tokens)
    with pytest.raises(SettingsError, match="has no weights for gain, "):
        disk_offload(toy, tmp_path)
    assert torch.equal(toy(tokens), expected)


def test_a_folder_needs_no_buffers_that_stay_in_the_model(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).eval()
    rows = torch.randn(4, 2)
    expected = model(rows)
    offload_state_dict(tmp_path, dict(model.named_parameters()))
    assert torch.equal(disk_offload(model, tmp_path)(rows), expected)


def test_a_dispatched_model_refuses_to_be_moved(toy, tmp_path):
    dispatch_model(
        toy, {"embed": "cpu", "gain": "cpu", "blocks": "disk", "head": "cpu"}, offload_dir=tmp_path
    )
    with pytest.raises(RuntimeError, match="cannot be moved: some of its modules are offloaded"):
        toy.to("cpu")


def test_an_error_in_a_forward_leaves_the_model_usable(toy, tokens, tmp_path):
    expected = toy(tokens)
    dispatch_model(toy, {"": "disk"}, offload_dir=tmp_path)
    with pytest.raises(IndexError):
        toy(torch.tensor([99]))
    assert torch.equal(toy(tokens), expected)


def test_gradients_flow_through_weights_that_come_and_go(toy, tokens, tmp_path):
    dispatch_model(
        toy, {"embed": "cpu", "gain": "cpu", "blocks": "disk", "head": "cpu"}, offload_dir=tmp_path
    )
    with pytest.raises(RuntimeError, match=r"is offloaded, and its gradient .* would be lost"):
        toy(tokens).sum().backward()
    toy.requires_grad_(False)
    toy.gain.requires_grad_(True)
    toy(tokens).sum().backward()
    assert toy.gain.grad is not None


def test_skipped_arguments_are_not_moved(toy):
    class Taking(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x, cache=None):
            return self.layer(x), cache

    cache = {"key": torch.ones(1)}
    model = dispatch_model(Taking(), {"": "cpu"}, force_hooks=True, skip_keys="cache")
    assert model(torch.ones(1, 2), cache=cache)[1]["key"] is cache["key"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform cannot fork")
@pytest.mark.filterwarnings("ignore:.*use of fork")
@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_child_runs_a_model_that_its_parent_has_run(toy, tokens, tmp_path, offload, busy):
    expected = toy(tokens)
    if offload == "cpu":
        cpu_offload(toy, execution_device="cpu")
    else:
        disk_offload(toy, tmp_path, execution_device="cpu")
    toy(tokens)
    inside, leave = threading.Event(), threading.Event()

    def wait_in_forward(*_):
        if threading.current_thread() is thread:
            inside.set()
            leave.wait()

    toy.blocks[1].register_forward_hook(wait_in_forward)
    thread = threading.Thread(target=toy, args=(tokens,))
    if busy:
        thread.start()
        inside.wait()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=lambda: results.put(toy(tokens).tolist()))
    child.start()
    try:
        assert results.get(timeout=120) == expected.tolist()  # a child that hangs would end the test never
        child.join()
    finally:
        child.kill()
        leave.set()
        if busy:
            thread.join()
    assert torch.equal(toy(tokens), expected)


@dataclasses.dataclass
class Counts:
    """What layers count in."""

    calls: int = 0
    parts: list[torch.Tensor] = dataclasses.field(default_factory=list)


class Counting(nn.Module):
    """Reads what the layers before it have written, and writes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, cache):
        if isinstance(cache, Counts):
            cache.calls += 1
            cache.parts.append(x)
            return self.layer(x) * cache.calls + sum(cache.parts)
        if isinstance(cache, dict):
            cache["calls"] = cache.get("calls", 0) + 1
            return self.layer(x) * cache["calls"]
        cache.append(x)
        return self.layer(x) + sum(cache)


class Shared(nn.Module):
    """Layers that share a cache."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Counting() for _ in range(3)])

    def forward(self, x, cache):
        for layer in self.layers:
            x = layer(x, cache=cache)
        return x, cache


@pytest.mark.parametrize("make", [dict, list, Counts])
@pytest.mark.parametrize("offload", ["cpu", "disk", "map"])
def test_layers_share_the_containers_that_they_write_into(make, offload, tmp_path):
    model, x = Shared(), torch.randn(1, 4)
    expected, _ = model(x, make())
    if offload == "cpu":
        cpu_offload(model, "cpu")
    elif offload == "disk":
        disk_offload(model, tmp_path, "cpu")
    else:
        plan = {"layers.0": "cpu", "layers.1": "disk", "layers.2": "disk"}
        dispatch_model(model, plan, offload_dir=tmp_path)
    cache = make()
    output, written = model(x, cache)
    torch.testing.assert_close(output, expected)
    assert written is cache


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


OFFLOADS = {
    "map": lambda model, folder: dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=folder),
    "disk": lambda model, folder: disk_offload(model, folder, "cpu"),
    "cpu": lambda model, folder: cpu_offload(model, "cpu"),
}


def assign(model, key, value):
    setattr(model[1], key, value)


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize(
    "write",
    [
        assign,
        lambda model, key, value: set_module_tensor_to_device(model, f"1.{key}", "cpu", value=value),
        lambda model, key, value: model.load_state_dict({f"1.{key}": value}, strict=False, assign=True),
    ],
    ids=["assigned", "set", "loaded by assigning"],
)
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.filterwarnings("ignore:for 1.weight")
def test_a_parameter_that_the_program_assigns_stays(tmp_path, offload, write, within):
    x, weight = torch.randn(2, 4), nn.Parameter(torch.randn(4, 4))
    plain = two_layers()
    plain[1].weight = weight
    expected = plain(x)
    model = OFFLOADS[offload](two_layers(), tmp_path)
    model(x)
    with align_module_device(model[1]) if within else contextlib.nullcontext():
        write(model, "weight", nn.Parameter(weight.detach().clone()))
    for _ in range(2):
        torch.testing.assert_close(model(x), expected)
    remove_hook_from_submodules(model)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_bias_that_is_removed_does_not_come_back(tmp_path, offload):
    x, plain = torch.randn(2, 4), two_layers()
    plain[1].bias = None
    model = OFFLOADS[offload](two_layers(), tmp_path)
    model(x)
    model[1].register_parameter("bias", None)
    for _ in range(2):
        torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.filterwarnings("ignore:for 1.weight")
def test_copying_into_an_offloaded_parameter_is_an_error(tmp_path, offload):
    model = OFFLOADS[offload](two_layers(), tmp_path)
    with pytest.raises(RuntimeError, match="'weight' of Linear is offloaded, and copying into it"):
        model.load_state_dict({"1.weight": torch.ones(4, 4)}, strict=False)
    with align_module_device(model[1]), torch.no_grad():
        model[1].weight.copy_(torch.eye(4))
    torch.testing.assert_close(model[1](torch.ones(1, 4)) - model[1](torch.zeros(1, 4)), torch.ones(1, 4))


USES = {
    "conv1d": (nn.Conv1d(3, 4, 3), (1, 3, 9), lambda m, x: F.conv1d(x, m.weight, m.bias)),
    "conv2d": (nn.Conv2d(3, 4, 3), (1, 3, 9, 9), lambda m, x: F.conv2d(x, m.weight)),
    "conv_transpose1d": (
        nn.ConvTranspose1d(3, 4, 3),
        (1, 3, 9),
        lambda m, x: F.conv_transpose1d(x, m.weight),
    ),
    "linear": (nn.Linear(4, 4), (2, 4), lambda m, x: F.linear(x, m.weight)),
    "matmul": (nn.Linear(4, 4), (2, 4), lambda m, x: x @ m.weight.T),
    "addmm": (nn.Linear(4, 4), (2, 4), lambda m, x: torch.addmm(x.new_zeros(2, 4), x, m.weight)),
    "embedding": (nn.Embedding(4, 4), (2,), lambda m, x: F.embedding(x.long(), m.weight)),
    "concatenation": (nn.Linear(4, 4), (2, 4), lambda m, x: torch.cat([x, m.weight])),
}


class User(nn.Module):
    """Reads the weight of a submodule, without calling that."""

    def __init__(self, used, use):
        super().__init__()
        self.used, self.last, self.use = used, nn.Identity(), use

    def forward(self, x):
        return self.use(self.used, x)


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_a_weight_that_is_not_loaded_is_not_computed_with(tmp_path, name, device):
    used, shape, use = USES[name]
    model = User(copy.deepcopy(used), use)
    x = torch.rand(shape)
    expected = model(x)
    if device == "cpu":
        model.used = cpu_offload(model.used, "cpu")
    else:
        dispatch_model(model, {"used": "disk", "last": "cpu"}, offload_dir=tmp_path)
    try:
        output = model(x)
    except RuntimeError as error:
        assert re.search("'weight' of .* is offloaded, and .* outside of the forward", str(error))  # noqa: PT017
    else:
        torch.testing.assert_close(output, expected)
    assert model.used.weight.shape == used.weight.shape
    assert torch.zeros(used.weight.shape).view_as(model.used.weight).shape == used.weight.shape


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_weight_that_is_computed_before_the_forward_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), torch.nn.utils.weight_norm(nn.Linear(4, 4)))
    cpu_offload(model, "cpu")
    with pytest.raises(RuntimeError, match="'weight_v' of Linear is offloaded, and _weight_norm uses it"):
        model(torch.ones(1, 4))


@pytest.mark.parametrize("offload", OFFLOADS)
def test_training_offloaded_weights_is_an_error(tmp_path, offload):
    model = OFFLOADS[offload](two_layers(), tmp_path)
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"' of Linear is offloaded, and its gradient .* would be lost"):
        model(x).sum().backward()
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    model.requires_grad_(False)
    x.grad = None
    model(x).sum().backward()
    plain, y = two_layers(), x.detach().requires_grad_()
    plain(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(gradient, y.grad)
    remove_hook_from_submodules(model.requires_grad_(True))
    model(y).sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("offload", [*OFFLOADS, "checkpoint"])
def test_gradients_flow_after_a_forward_in_inference_mode(tmp_path, offload):
    if offload == "checkpoint":
        save_state_dict(two_layers().state_dict(), tmp_path)
        model = load_checkpoint_and_dispatch(two_layers().to("meta"), tmp_path, device_map={"": "disk"})
        model.requires_grad_(False)
    else:
        model = OFFLOADS[offload](two_layers().requires_grad_(False), tmp_path)
    x = torch.randn(2, 4, requires_grad=True)
    with torch.inference_mode():
        model(x)
    model(x).sum().backward()
    plain, y = two_layers(), x.detach().requires_grad_()
    plain(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_model_without_its_hooks_has_its_values_and_moves(tmp_path, offload):
    offload_state_dict(tmp_path, two_layers().state_dict())
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    expected = two_layers()(x)
    if offload == "map":
        dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    elif offload == "disk":
        disk_offload(model, tmp_path, "cpu")
    else:
        cpu_offload(model, "cpu", state_dict=two_layers().state_dict())
    model(x)
    remove_hook_from_submodules(model)
    torch.testing.assert_close(model.to("cpu")(x), expected)
    torch.testing.assert_close(model.to(torch.float64)(x.double()), expected.double())


def test_the_hooks_of_a_compiled_model_are_not_compiled(tmp_path):
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    model = dispatch_model(two_layers(), {"0": "cpu", "1": "disk"}, offload_dir=tmp_path)
    x = torch.randn(2, 4)
    expected = two_layers()(x)
    fast = torch.compile(model, backend=backend)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), expected)
    nodes = [node.target for graph in compiled for node in graph.graph.nodes if node.op == "call_function"]
    assert set(nodes) <= {F.linear, torch._C._nn.linear}


@pytest.mark.parametrize("offload", ["map", "disk"])
def test_a_folder_with_other_values_is_refused(tmp_path, offload):
    folder, x = tmp_path / "folder", torch.ones(1, 4)
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected = other(x)
    first = OFFLOADS[offload](two_layers(), folder)
    with pytest.raises(SettingsError, match=r"has other values for 0?1?.*weight.* than this model"):
        OFFLOADS[offload](other, folder)
    torch.testing.assert_close(other(x), expected)
    for model in (first, OFFLOADS[offload](two_layers(), folder)):
        torch.testing.assert_close(model(x), two_layers()(x))
    with init_empty_weights():
        empty = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if offload == "map":
        empty[0] = two_layers()[0]
    torch.testing.assert_close(OFFLOADS[offload](empty, folder)(x), two_layers()(x))


def test_a_folder_that_the_program_has_written_decides(tmp_path):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    offload_state_dict(tmp_path, two_layers().state_dict())
    x = torch.ones(1, 4)
    disk_offload(model, tmp_path, "cpu")
    torch.testing.assert_close(model(x), two_layers()(x))


def test_the_cache_is_emptied_only_when_the_previous_model_leaves_the_device(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(1))
    _, hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    second, _ = cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=hook)
    for _ in range(5):
        second(torch.ones(1, 2))
    assert not emptied


def test_a_meta_model_is_not_offloaded_to_an_empty_folder(tmp_path):
    with pytest.raises(SettingsError, match=r"0.weight.* are on the meta device, so that disk_offload"):
        disk_offload(two_layers().to("meta"), tmp_path, "cpu")


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("has_run", [False, True])
def test_an_offloaded_model_is_pickled(tmp_path, offload, has_run):
    model = OFFLOADS[offload](two_layers(), tmp_path)
    x = torch.randn(2, 4)
    if has_run:
        model(x)
    restored = pickle.loads(pickle.dumps(model))
    for _ in range(2):
        torch.testing.assert_close(restored(x), two_layers()(x))
    assert restored[1].weight.is_meta
    with pytest.raises(RuntimeError, match="'weight' of Linear is offloaded"):
        torch.nn.functional.linear(x, restored[1].weight)
    remove_hook_from_submodules(restored)
    torch.testing.assert_close(restored(x), two_layers()(x))
    torch.testing.assert_close(model(x), two_layers()(x))


class Noting(nn.Linear):
    """Notes the parameter that its forward uses."""

    def forward(self, input):  # noqa: A002 - the name of torch
        vars(self)["noted"] = self.weight
        return super().forward(input)


def test_a_view_of_a_file_is_one_parameter_in_every_forward_and_in_no_copy(tmp_path):
    plain, x = nn.Sequential(Noting(64, 64)), torch.randn(2, 64)
    save_state_dict(plain.state_dict(), tmp_path)
    model = load_checkpoint_and_dispatch(copy.deepcopy(plain).to("meta"), tmp_path, device_map={"": "disk"})
    seen = []
    for _ in range(2):
        torch.testing.assert_close(model(x), plain(x))
        seen.append(vars(model[0]).pop("noted"))
    assert seen[0] is seen[1]
    assert len(pickle.dumps(model)) < plain[0].weight.nbytes
    model.requires_grad_(False)
    assert not model(x).requires_grad
    remove_hook_from_submodules(model.requires_grad_(True))
    model(x).sum().backward()
