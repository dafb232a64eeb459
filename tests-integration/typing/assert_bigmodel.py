"""The types of the functions for big models; read by type checkers, never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Tensor, nn

from accel_bigmodel.device_map import (
    check_device_map,
    generate_device_map,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
)
from accel_bigmodel.dispatch import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
from accel_bigmodel.empty import init_empty_weights, init_on_device
from accel_bigmodel.explanation import Explanation, explain
from accel_bigmodel.hooks import (
    ModelHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    align_module_device,
    attach_layerwise_casting_hooks,
    has_offloaded_params,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel_bigmodel.load import load_checkpoint_and_dispatch, load_checkpoint_in_model
from accel_bigmodel.offload import (
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
)
from accel_bigmodel.pipeline import prepare_pippy
from accel_bigmodel.placement import check_device_same, set_module_tensor_to_device
from accel_bigmodel.sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
)


def planning(model: nn.Linear) -> None:
    """A plan is a dictionary from names of modules to devices."""
    with init_empty_weights(include_buffers=True) as nothing, init_on_device("cuda:0"):
        assert_type(nothing, None)
    budgets = get_max_memory({0: "10GB", "cpu": 2**30})
    assert_type(budgets, dict[int | str, int])
    assert_type(get_balanced_memory(model, low_zero=True), dict[int | str, int])
    assert_type(infer_auto_device_map(model, budgets, dtype="int8"), dict[str, int | str])
    assert_type(generate_device_map(model, num_processes=2), dict[str, int | str])
    assert_type(check_device_map(model, {"": 0}), None)
    assert_type(explain({"": "cpu"}, model), Explanation)
    assert_type(explain({"": "cpu"}, model).total, int)
    assert_type(compute_module_sizes(model, dtype=torch.float16), dict[str, int])
    assert_type(compute_module_total_buffer_size(model), int)
    assert_type(get_max_layer_size([("", model)], {"": 4}, None), tuple[int, list[str]])
    assert_type(calculate_maximum_sizes(model), tuple[int, tuple[int, list[str]]])
    get_max_memory("10GB")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


def dispatching(model: nn.Linear, folder: Path, hook: ModelHook) -> None:
    """A model keeps its class when it is dispatched, offloaded or loaded."""
    assert_type(dispatch_model(model, {"": 0}), nn.Linear)
    assert_type(load_checkpoint_and_dispatch(model, folder, device_map="auto"), nn.Linear)
    assert_type(cpu_offload(model), nn.Linear)
    assert_type(disk_offload(model, folder), nn.Linear)
    assert_type(cpu_offload_with_hook(model, 0), tuple[nn.Linear, UserCpuOffloadHook])
    assert_type(cpu_offload_with_hook(model)[1].offload(), None)
    assert_type(add_hook_to_module(model, hook, append=True), nn.Linear)
    assert_type(remove_hook_from_module(model, recurse=True), nn.Linear)
    assert_type(remove_hook_from_submodules(model), None)
    assert_type(attach_layerwise_casting_hooks(model, torch.float16, torch.float32), None)
    assert_type(prepare_pippy(model, example_args=(1,), num_chunks=2), nn.Linear)
    assert_type(has_offloaded_params(model), bool)
    with align_module_device(model, torch.device("cpu")) as nothing:
        assert_type(nothing, None)
    dispatch_model(model, ["cpu"])  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


def weights(model: nn.Module, folder: Path, state: dict[str, Tensor]) -> None:
    """Weights are loaded into a model, or stored for it."""
    assert_type(load_checkpoint_in_model(model, folder, dtype="float16", strict=True), None)
    assert_type(set_module_tensor_to_device(model, "weight", 0, value=torch.ones(1)), None)
    assert_type(check_device_same(torch.device("cpu"), torch.device("cpu")), bool)
    assert_type(offload_state_dict(folder, state), None)
    assert_type(load_offloaded_weight(folder / "weight.dat", {"dtype": "float32"}), Tensor)
    index: dict[str, dict[str, Any]] = {}
    assert_type(load_offloaded_weights(model, index, folder), None)
    assert_type(extract_submodules_state_dict(state, ["0"]), dict[str, Tensor])
