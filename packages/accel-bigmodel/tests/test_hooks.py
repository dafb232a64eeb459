"""Hooks: what they see, what they change, and that nothing stays behind."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    AlignDevicesHook,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    attach_layerwise_casting_hooks,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    has_offloaded_params,
    remove_hook_from_module,
    remove_hook_from_submodules,
    set_module_tensor_to_device,
)
from accel_bigmodel.hooks import align_hooks_of
from accel_state.errors import CheckpointError


class Add(ModelHook):
    def __init__(self, before=0.0, after=0.0):
        self.before, self.after, self.events = before, after, []

    def init_hook(self, module):
        self.events.append("init")
        return module

    def pre_forward(self, module, *args, **kwargs):
        return (args[0] + self.before, *args[1:]), kwargs

    def post_forward(self, module, output):
        return output + self.after

    def detach_hook(self, module):
        self.events.append("detach")
        return module


def test_a_hook_changes_arguments_and_output():
    layer, x = nn.Linear(2, 2), torch.randn(3, 2)
    expected = layer(x + 1) + 2
    assert add_hook_to_module(layer, Add(1, 2)) is layer
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer(input=x + 1) if False else layer(x), expected)


def test_hooks_are_replaced_or_chained():
    layer, x = nn.Identity(), torch.zeros(1)
    first, second = Add(1), Add(10)
    add_hook_to_module(layer, first)
    add_hook_to_module(layer, second)
    assert (layer(x).item(), first.events) == (10, ["init", "detach"])
    add_hook_to_module(layer, Add(100), append=True)
    assert layer(x).item() == 110
    assert isinstance(layer._hf_hook, SequentialHook)
    assert second.events == ["init"]  # chaining prepares nothing twice


def test_removing_gives_the_forward_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    x, patched = torch.randn(1, 2), nn.Identity()
    expected = model(x)
    for part in model.modules():
        add_hook_to_module(part, Add(3, 4))
    remove_hook_from_submodules(model)
    assert torch.equal(model(x), expected)
    assert not any({"_hf_hook", "_old_forward", "forward"} & vars(part).keys() for part in model.modules())
    patched.forward = lambda x: x + 5
    add_hook_to_module(patched, Add())
    remove_hook_from_module(patched, recurse=True)
    assert patched(torch.zeros(1)).item() == 5
    assert remove_hook_from_module(nn.Identity()) is not None


def test_a_copy_of_a_hooked_module_runs_the_copy():
    layer = add_hook_to_module(nn.Linear(1, 1, bias=False), Add())
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.fill_(7)
        layer.weight.fill_(1)
    assert other(torch.ones(1)).item() == 7


def test_no_grad_is_kept():
    class Quiet(ModelHook):
        no_grad = True

    layer = add_hook_to_module(nn.Linear(1, 1), Quiet())
    assert not layer(torch.ones(1)).requires_grad
    add_hook_to_module(layer, Add(1), append=True)
    assert not layer(torch.ones(1)).requires_grad


def test_offloaded_weights_are_there_for_the_forward_only():
    layer, x = nn.Linear(2, 2), torch.randn(1, 2)
    expected, weight = layer(x), layer.weight
    seen = []
    layer.register_forward_pre_hook(lambda m, a: seen.append(m.weight.device.type))
    original = layer.forward
    layer.forward = lambda x: (seen.append(layer.weight.device.type), original(x))[1]
    add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu", offload=True))
    assert layer.weight.is_meta
    assert torch.equal(layer(x), expected)
    assert seen == ["meta", "cpu"]
    assert layer.weight.is_meta
    assert has_offloaded_params(layer)
    remove_hook_from_module(layer)
    assert torch.equal(layer.weight, weight)
    assert not has_offloaded_params(layer)


def test_a042_buffers_stay_unless_they_are_offloaded_too():
    for offload_buffers in (False, True):
        norm = nn.BatchNorm1d(2).eval()
        norm.register_buffer("cache", torch.ones(1), persistent=False)
        x = torch.randn(3, 2)
        expected = norm(x)
        hook = AlignDevicesHook(execution_device="cpu", offload=True, offload_buffers=offload_buffers)
        add_hook_to_module(norm, hook)
        assert norm.weight.is_meta
        assert norm.running_mean.is_meta == offload_buffers
        assert not norm.cache.is_meta
        assert torch.equal(norm(x), expected)


def test_weights_in_use_are_those_of_the_map_without_a_copy():
    layer = nn.Linear(2, 2)
    held = {name: tensor.detach() for name, tensor in layer.state_dict().items()}
    pointers = []
    original = layer.forward
    layer.forward = lambda x: (pointers.append(layer.weight.data_ptr()), original(x))[1]
    add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu", offload=True, weights_map=held))
    layer(torch.ones(1, 2))
    assert pointers == [held["weight"].data_ptr()]


def test_outputs_go_where_inputs_were():
    layer = nn.Identity()
    add_hook_to_module(layer, AlignDevicesHook(execution_device="meta", io_same_device=True))
    assert layer(torch.ones(2, device="meta")).is_meta
    kept = add_hook_to_module(Pair(), AlignDevicesHook(execution_device="meta", skip_keys="b"))
    a, b = kept(a=torch.ones(1), b=torch.ones(1))
    assert (a.device.type, b.device.type) == ("meta", "cpu")


class Pair(nn.Module):
    def forward(self, a, b):
        return a, b


def test_hooks_are_attached_where_tensors_are(toy):
    attach_align_device_hook(toy, execution_device="cpu", offload=True)
    assert {name for name, part in toy.named_modules() if hasattr(part, "_hf_hook")} == {
        "",
        "embed",
        "head",
        *(f"blocks.{i}{leaf}" for i in range(3) for leaf in ("", ".first", ".norm", ".second")),
    }


def test_a_preloaded_class_loads_what_it_does_not_call():
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(2, 2)

        def forward(self, x):
            return nn.functional.linear(x, self.dense.weight, self.dense.bias)

    model, x = nn.Sequential(Fused()), torch.randn(1, 2)
    expected = model(x)
    cpu_offload(model, execution_device="cpu", preload_module_classes=["Fused"])
    assert model[0].dense.weight.is_meta
    assert torch.equal(model(x), expected)


def test_blocks_take_one_setting_for_all(toy, tokens):
    expected = toy(tokens)
    attach_align_device_hook_on_blocks(
        toy, execution_device="cpu", offload=True, weights_map=dict(toy.state_dict())
    )
    assert torch.equal(toy(tokens), expected)
    assert all(parameter.is_meta for parameter in toy.parameters())
    other = nn.Sequential(nn.Linear(2, 2))
    attach_execution_device_hook(other, "cpu")
    assert other[0]._hf_hook.execution_device == "cpu"


def test_one_model_at_a_time_is_on_the_device():
    first, hook1 = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    second, hook2 = cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=hook1)
    offloaded = []
    hook1.offload = lambda: offloaded.append(1)
    second(first(torch.ones(1, 2)))
    assert offloaded == [1]
    hook2.offload()
    hook2.remove()
    assert not hasattr(second, "_hf_hook")


def test_a_module_is_aligned_for_a_while():
    layer = nn.Linear(2, 2)
    weight = layer.weight
    with align_module_device(layer, torch.device("meta")):
        assert layer.weight.is_meta
    assert layer.weight is weight
    add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu", offload=True))
    with align_module_device(layer):
        assert not layer.weight.is_meta
        layer.weight.data.fill_(3)
    assert layer.weight.is_meta
    with pytest.raises(RuntimeError, match="x"), align_module_device(layer, torch.device("cpu")):
        raise RuntimeError("x")
    assert layer.weight.is_meta
    assert (layer(torch.ones(1, 2)) - layer._hf_hook.weights_map["bias"]).tolist() == [[6, 6]]


def test_storage_stays_bit_for_bit_through_casts():
    layer = nn.Linear(8, 8)
    add_hook_to_module(layer, LayerwiseCastingHook(torch.float8_e4m3fn, torch.float32, non_blocking=False))
    before = layer.weight.detach().view(torch.uint8).clone()
    x = torch.randn(2, 8)
    expected = nn.functional.linear(x, layer.weight.float(), layer.bias.float())
    for _ in range(3):
        assert torch.equal(layer(x), expected)
    assert layer.weight.dtype == torch.float8_e4m3fn
    assert torch.equal(layer.weight.view(torch.uint8), before)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.parametrize("first", ["casts", "offload"])
def test_offloaded_weights_are_cast_when_they_have_come(tmp_path, offload, first):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    small = copy.deepcopy(model).to(torch.bfloat16).float()

    def cast():
        attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32)

    if first == "casts":
        cast()
    if offload == "cpu":
        cpu_offload(model, "cpu")
    else:
        disk_offload(model, tmp_path, "cpu")
    if first == "offload":
        cast()
    for _ in range(2):
        torch.testing.assert_close(model(x), small(x), rtol=0.05, atol=0.05)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert model(x).dtype is torch.float32
    if first == "casts":
        assert torch.equal(model(x), small(x))


def test_threads_that_cast_one_layer_do_not_take_its_weights_from_each_other():
    inside, go_on = threading.Event(), threading.Event()

    class Waiting(nn.Linear):
        def forward(self, x):
            if len(x) == 2:  # the thread that stays inside
                inside.set()
                go_on.wait()
            return super().forward(x)

    layer = Waiting(4, 4)
    add_hook_to_module(layer, LayerwiseCastingHook(torch.bfloat16, torch.float32, non_blocking=False))
    expected = nn.functional.linear(torch.ones(2, 4), layer.weight.float(), layer.bias.float())
    found = []
    thread = threading.Thread(target=lambda: found.append(layer(torch.ones(2, 4))))
    thread.start()
    inside.wait()
    layer(torch.ones(1, 4))
    go_on.set()
    thread.join()
    assert torch.equal(found[0], expected)
    assert layer.weight.dtype == torch.bfloat16
    with pytest.raises(RuntimeError):
        layer(torch.ones(1, 3))
    assert layer.weight.dtype == torch.bfloat16


def test_layers_are_skipped_by_pattern_and_class():
    model = nn.ModuleDict(
        {"a": nn.Linear(2, 2), "norm": nn.LayerNorm(2), "lm_head": nn.Linear(2, 2), "c": nn.Conv1d(1, 1, 1)}
    )
    attach_layerwise_casting_hooks(
        model, torch.bfloat16, torch.float32, skip_modules_pattern="head$", skip_modules_classes=(nn.Conv1d,)
    )
    assert {name: next(part.parameters()).dtype for name, part in model.items()} == {
        "a": torch.bfloat16,
        "norm": torch.float32,
        "lm_head": torch.float32,
        "c": torch.float32,
    }


def test_a_tensor_is_placed_with_type_value_and_class():
    layer = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match="'weight' is on the meta device: it needs a `value`"):
        set_module_tensor_to_device(layer, "weight", "cpu")
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.eye(2).half())
    assert (layer.weight.dtype, type(layer.weight)) == (torch.float32, nn.Parameter)
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.eye(2), dtype="bfloat16")
    assert layer.weight.dtype == torch.bfloat16
    value = torch.eye(2).bfloat16()
    set_module_tensor_to_device(layer, "weight", "cpu", value=value)
    assert layer.weight.data_ptr() == value.data_ptr()
    for device in ("cpu", -1):  # the shape is looked at before the device, as Accelerate does
        with pytest.raises(CheckpointError, match=r"\[3\]\) in \"weight\" \(which has shape .*\[2, 2\]\)\)"):
            set_module_tensor_to_device(layer, "weight", device, value=torch.ones(3))
    with pytest.raises(ValueError, match="no parameter or buffer named 'wieght'; it has weight, bias"):
        set_module_tensor_to_device(layer, "wieght", "cpu")
    with pytest.raises(ValueError, match="no submodule 'sub'"):
        set_module_tensor_to_device(layer, "sub.weight", "cpu")


def test_a_tied_value_is_copied_once_per_device():
    value = torch.ones(2, 2)
    shared: dict = {value.data_ptr(): {}}
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for name in ("0.weight", "1.weight"):
        set_module_tensor_to_device(model, name, "meta", value=value, tied_params_map=shared)
    assert list(shared[value.data_ptr()]) == [torch.device("meta")]
    assert model[0].weight.is_meta


def test_an_input_on_the_meta_device_is_named_with_the_way_out():
    model = cpu_offload(nn.Sequential(nn.Linear(2, 2)), execution_device="cpu")
    device = next(model.parameters()).device
    with pytest.raises(NotImplementedError, match=r"input of Sequential .*give that one's module a device"):
        model(torch.ones(1, 2, device=device))


@pytest.mark.parametrize("options", [{}, {"skip_modules_pattern": []}, {"skip_modules_classes": nn.Conv1d}])
def test_only_supported_layers_are_stored_small_with_or_without_some_to_skip(options):
    model = nn.Sequential(
        nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4))
    )
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, **options)
    small = {name for name, tensor in model.named_parameters() if tensor.dtype == torch.bfloat16}
    assert small == {"1.weight", "1.bias", "3.0.weight", "3.0.bias"}
    assert model(torch.tensor([1, 2])).dtype == torch.float32
    layer = nn.LayerNorm(4)
    attach_layerwise_casting_hooks(layer, torch.bfloat16, torch.float32, **options)
    assert layer.weight.dtype == torch.float32


def test_what_is_assigned_to_an_aligned_module_stays():
    layer = nn.Linear(2, 2)
    weight, bias = layer.weight, layer.bias
    with align_module_device(layer, torch.device("cpu")):
        layer.weight.data = torch.full((2, 2), 3.0)
        layer.bias = nn.Parameter(torch.ones(2))
    assert layer.weight is weight
    assert layer.bias is bias
    assert layer(torch.ones(1, 2)).tolist() == [[7, 7]]


def test_weights_that_do_not_all_come_leave_the_module_as_it_was():
    layer = add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook(execution_device="cpu", offload=True))
    hook = layer._hf_hook
    weights, hook.weights_map = hook.weights_map, {"weight": hook.weights_map["weight"]}
    with pytest.raises(KeyError, match="bias"):
        layer(torch.ones(1, 2))
    assert layer.weight.is_meta
    hook.weights_map = weights
    assert layer(torch.ones(1, 2)).shape == (1, 2)


def test_weights_in_use_are_not_aligned_elsewhere_and_stay_in_use(tmp_path):
    model = disk_offload(nn.Sequential(nn.Linear(2, 2)), tmp_path, execution_device="cpu")
    hook = next(hook for hook in align_hooks_of(model[0]) if hook.offload)
    hook.block.acquire()
    with pytest.raises(RuntimeError, match="in use"), align_module_device(model[0], torch.device("meta")):
        pass
    assert hook.execution_device == "cpu"
    hook.block.release()
    assert not hook.block.is_held
