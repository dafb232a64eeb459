"""Profiling on one process; models spread over devices; optimizers that step in the backward pass."""

from __future__ import annotations

import json
import sys
from copy import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from accel_plugins.fp8.recipe import AORecipeKwargs, TERecipeKwargs
from accel_plugins.kwargs import (
    AutocastKwargs,
    DataLoaderConfiguration,
    ProfileKwargs,
    ProjectConfiguration,
)
from accel_state import libraries
from accel_state.errors import MissingDependencyError, SettingsError, UnsupportedError
from accel_train import Accelerator


def names_in(trace):
    return {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}


def test_a_trace_is_written_and_can_be_read(tmp_path):
    handler = ProfileKwargs(activities=["cpu"], record_shapes=True, output_trace_dir=str(tmp_path / "new"))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    assert accelerator.profile_handler is handler
    with accelerator.profile() as profiler, torch.profiler.record_function("my region"):
        torch.ones(3, 3) @ torch.ones(3, 3)
    assert {"my region", "aten::matmul"} <= names_in(tmp_path / "new" / "profile_0.json")
    assert any(event.key == "aten::matmul" for event in profiler.key_averages())


def test_an_accelerator_shows_its_run():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    assert repr(accelerator).startswith("Accelerator(device='cpu', process_index=0, num_processes=1, ")
    assert "<td>gradient accumulation steps</td><td>3</td>" in accelerator._repr_html_()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle")
def test_every_cycle_of_a_schedule_has_a_trace_of_its_own(tmp_path):
    seen = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 2},
        on_trace_ready=seen.append,
        output_trace_dir=str(tmp_path),
    )
    with Accelerator(cpu=True).profile(handler) as profiler:
        for step in range(7):
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(2) + 1
            profiler.step()
    assert seen == [profiler, profiler]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile_0.json", "profile_0_1.json"]
    assert "step 2" in names_in(tmp_path / "profile_0.json")
    assert "step 5" in names_in(tmp_path / "profile_0_1.json")


def test_a_schedule_that_never_records_is_said(tmp_path, caplog):
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 5, "warmup": 1, "active": 1},
        output_trace_dir=str(tmp_path),
    )
    with Accelerator(cpu=True).profile(handler) as profiler:
        profiler.step()
    assert "wrote no trace" in caplog.text
    assert "before step 6" in caplog.text


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Accelerator(cpu=True).profile():
        torch.ones(1)
    assert not [*tmp_path.iterdir()]


def test_a_device_map_over_several_devices_is_found_in_any_part():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert not accelerator.verify_device_map(model)
    model[0].hf_device_map = {"": 0}
    assert not accelerator.verify_device_map(model)
    model[0].hf_device_map = {"a": 0, "b": 1}
    assert accelerator.verify_device_map(model)


def test_lomo_is_asked_for_by_name():
    with pytest.raises(MissingDependencyError, match="lomo"):
        Accelerator(cpu=True).lomo_backward(torch.ones(()), 0.1)


@pytest.fixture
def lomo(monkeypatch):
    """A library with the interface of lomo-optim."""
    module = ModuleType("lomo_optim")

    class Lomo(torch.optim.SGD):
        def fused_backward(self, loss, lr):
            loss.backward()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data -= lr * parameter.grad

    Lomo.__module__ = "lomo_optim.lomo"
    module.Lomo = Lomo
    monkeypatch.setitem(sys.modules, "lomo_optim", module)
    monkeypatch.setattr(libraries, "_is_installed", lambda library: True)
    return module


def test_lomo_steps_in_the_backward_pass(lomo):
    accelerator = Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.ones(1))
    accelerator.prepare(lomo.Lomo([weight], lr=0.0))
    accelerator.lomo_backward(3 * weight.sum(), 0.1)
    assert weight.item() == pytest.approx(0.7)
    weight.grad = None
    accelerator.backward(3 * weight.sum(), learning_rate=0.2)
    assert weight.item() == pytest.approx(0.1)
    with pytest.raises(SettingsError, match="learning_rate=None"):
        accelerator.lomo_backward(weight.sum(), None)


def test_backward_scales_losses_for_lomo_as_for_other_optimizers(lomo):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    weight = torch.nn.Parameter(torch.ones(1))
    accelerator.prepare(lomo.Lomo([weight], lr=0.0))
    accelerator.backward(2 * weight.sum(), learning_rate=0.2)
    assert weight.item() == pytest.approx(1 - 0.2 * 2 / 4)


def test_lomo_cannot_count_items(lomo):
    accelerator = Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.ones(1))
    accelerator.prepare(lomo.Lomo([weight], lr=0.0))
    with pytest.raises(UnsupportedError, match="num_items=4, learning_rate"):
        accelerator.backward(weight.sum(), num_items=4, learning_rate=0.2)
    assert weight.item() == 1


def test_other_optimizers_are_no_lomo(lomo):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    with pytest.raises(SettingsError, match="SGD"):
        accelerator.lomo_backward(torch.ones(()), 0.1)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("device_map", "named"),
    [
        ({"a": "cpu", "b": "disk"}, "cpu and disk"),
        ({"a": 0, "b": "cpu"}, "cpu"),
        ({"a": 0, "b": torch.device("cpu")}, "cpu"),
        ({"": "disk"}, "disk"),
    ],
)
def test_a_quantised_model_with_offloaded_parts_is_not_trained(bits, device_map, named):
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(2, 2))
    vars(model[0]).update({f"is_loaded_in_{bits}bit": True, "hf_device_map": device_map})
    with pytest.raises(ValueError, match=f"quantised to {bits} bits and has parts on {named}, because"):
        accelerator.prepare(model)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model


def test_a_quantised_model_on_one_device_is_trained_there():
    accelerator = Accelerator(cpu=True)
    for device_map in ({"": "cpu"}, {"": 0}, {"a": "cpu", "b": torch.device("cpu")}, {}):
        model = nn.Linear(2, 2)
        vars(model).update(is_loaded_in_8bit=True, hf_device_map=device_map)
        assert accelerator.prepare(model) is model


def test_an_unknown_attribute_is_absent_and_any_can_be_added():
    accelerator: Any = Accelerator(cpu=True)
    with pytest.raises(AttributeError, match="'Accelerator' object has no attribute 'nonsense'"):
        _ = accelerator.nonsense
    accelerator.nonsense = 3
    assert copy(accelerator).nonsense == 3


def test_attributes_that_scripts_assign_are_followed_by_what_is_prepared_later():
    accelerator: Any = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.native_amp = False
    model = accelerator.prepare_model(nn.Linear(2, 2))
    assert model.forward.__func__ is nn.Linear.forward
    with accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
    accelerator.native_amp = True
    assert accelerator.prepare_model(nn.Linear(2, 2)).forward is not nn.Linear.forward
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    with accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
    accelerator.step_scheduler_with_optimizer = False
    accelerator.dataloader_config = DataLoaderConfiguration(split_batches=True)
    accelerator.rng_types, accelerator.device_placement = ["torch"], False
    optimizer = torch.optim.SGD(model.parameters())
    prepared = accelerator.prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    assert prepared.step_with_optimizer is False
    assert prepared.split_batches is True
    accelerator._models, accelerator._schedulers = [], []
    assert accelerator._models == [] == accelerator._schedulers
    accelerator.set_trigger()
    assert accelerator.flag_tensor == 1
    accelerator.flag_tensor = torch.tensor(0)
    assert accelerator.check_trigger() is False
    accelerator.trackers = []
    accelerator.log({"loss": 1.0})
    accelerator.project_configuration = ProjectConfiguration(project_dir="elsewhere")
    assert accelerator.project_dir == "elsewhere"
    with pytest.raises(SettingsError, match="mixed_precision='fp16' alone"):
        accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(SettingsError, match="mixed_precision='fp8'"):
        accelerator.fp8_enabled = True


def test_autocast_can_be_switched_on_where_the_precision_is_full():
    accelerator: Any = Accelerator(cpu=True)
    assert accelerator.native_amp is False
    accelerator.native_amp = True
    with accelerator.autocast():
        assert torch.is_autocast_enabled("cpu")
    assert accelerator.mixed_precision == "no"


def test_a_scaler_that_is_assigned_scales_the_losses():
    accelerator: Any = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weight = torch.ones(1, requires_grad=True)
    accelerator.backward(weight.sum())
    assert weight.grad == 8.0
    accelerator.scaler = None
    weight.grad = None
    accelerator.backward(weight.sum())
    assert weight.grad == 1.0


def test_models_that_are_prepared_after_a_change_follow_the_recipe_that_was_assigned():
    pytest.importorskip("torchao")
    handlers = [AORecipeKwargs(module_filter_func=lambda layer, name: name == "0")]
    accelerator: Any = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=handlers)

    def converted() -> list[str]:
        model = accelerator.prepare(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
        return [type(layer).__name__ for layer in model]

    assert converted() == ["Float8Linear", "Linear"]
    accelerator.ao_recipe_handler = AORecipeKwargs(module_filter_func=lambda layer, name: name == "1")
    assert converted() == ["Linear", "Float8Linear"]
    assert accelerator.fp8_recipe_handler is accelerator.ao_recipe_handler
    accelerator.fp8_recipe_handler = handler = AORecipeKwargs()
    assert accelerator.ao_recipe_handler is handler
    assert accelerator.fp8_backend.value == "AO"


def test_a_recipe_that_is_assigned_without_fp8_is_kept():
    accelerator: Any = Accelerator(cpu=True)
    accelerator.te_recipe_handler = handler = TERecipeKwargs()
    accelerator.ao_recipe_handler = None
    assert accelerator.te_recipe_handler is accelerator.fp8_recipe_handler is handler
    assert accelerator.fp8_enabled is False


@pytest.mark.parametrize(("precision", "native"), [("no", False), ("bf16", True)])
def test_native_amp_says_whether_torch_casts(precision, native):
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    assert accelerator.native_amp is native
    assert not accelerator.fp8_enabled
    optimizer = accelerator.prepare(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    assert optimizer.accelerator_state.mixed_precision == precision


def test_an_accelerator_whose_constructor_failed_shows_no_facts():
    assert repr(Accelerator.__new__(Accelerator)) == "Accelerator()"


def test_trackers_write_to_the_project_that_a_script_assigns(tmp_path):
    pytest.importorskip("tensorboard")
    accelerator = Accelerator(cpu=True)
    accelerator.project_configuration = ProjectConfiguration(project_dir=tmp_path / "first")
    accelerator.log_with = "tensorboard"
    accelerator.project_configuration = ProjectConfiguration(project_dir=tmp_path / "second")
    accelerator.init_trackers("run")
    accelerator.end_training()
    assert [path.name for path in tmp_path.iterdir()] == ["second"]
