"""Peeling wrappers, compilers and changed forward methods off a model."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import torch
from torch import nn

from accel_ops.modules import (
    extract_model_from_parallel,
    has_compiled_regions,
    has_wrapped_forward,
    is_compiled_module,
    model_has_dtensor,
    replace_forward,
    restore_forward,
    unwrap_once,
)


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, offset: float = 0.0) -> torch.Tensor:
        return self.weight * x + offset


def plus_one(forward: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(model, *args, **kwargs) + 1


def test_a_model_without_wrappers_is_returned_as_it_is():
    model = Doubled()
    assert extract_model_from_parallel(model) is model
    assert extract_model_from_parallel(model, keep_fp32_wrapper=False, keep_torch_compile=False) is model


def test_wrappers_are_peeled_however_deep():
    model = Doubled()
    assert extract_model_from_parallel(nn.DataParallel(nn.DataParallel(model))) is model


def test_a_new_wrapper_is_peeled_once_it_is_registered():
    class Engine(nn.Module):
        def __init__(self, held: nn.Module) -> None:
            super().__init__()
            self.held = held

    engine = Engine(Doubled())
    assert extract_model_from_parallel(engine) is engine
    unwrap_once.register(Engine, lambda model: model.held)
    assert extract_model_from_parallel(engine) is engine.held


def test_compilation_is_kept_or_taken_off_and_the_given_model_stays_whole():
    model = Doubled()
    parallel = nn.DataParallel(model)
    compiled = torch.compile(parallel, backend="eager")
    unwrapped = extract_model_from_parallel(compiled)
    assert is_compiled_module(unwrapped)
    assert unwrapped._orig_mod is model
    assert compiled._orig_mod is parallel
    assert unwrapped(torch.tensor(3.0)) == 6.0
    assert extract_model_from_parallel(compiled, keep_torch_compile=False) is model


def test_a_compiled_model_without_wrappers_is_the_same_object():
    model = Doubled()
    compiled = torch.compile(model, backend="eager")
    assert extract_model_from_parallel(compiled) is compiled
    assert extract_model_from_parallel(nn.DataParallel(compiled)) is compiled
    assert extract_model_from_parallel(nn.DataParallel(compiled), keep_torch_compile=False) is model


def test_recursive_extraction_replaces_wrapped_children():
    inner, deeper = Doubled(), Doubled()
    model = nn.Sequential(nn.DataParallel(inner), nn.Sequential(nn.DataParallel(nn.DataParallel(deeper))))
    assert extract_model_from_parallel(model)[0] is not inner
    unwrapped = extract_model_from_parallel(nn.DataParallel(model), recursive=True)
    assert unwrapped is model
    assert model[0] is inner
    assert model[1][0] is deeper


def test_compiled_parts_are_found_at_any_depth():
    compiled = torch.compile(Doubled(), backend="eager")
    assert has_compiled_regions(compiled)
    assert has_compiled_regions(nn.Sequential(nn.Sequential(compiled)))
    assert not has_compiled_regions(nn.Sequential(Doubled()))
    assert not is_compiled_module(nn.Sequential(compiled))


def test_plain_parameters_are_not_dtensors():
    assert not model_has_dtensor(Doubled())


def test_a_wrapped_forward_is_called_and_restored():
    model = Doubled()
    replace_forward(model, plus_one)
    assert model(torch.tensor(3.0)) == 7.0
    assert has_wrapped_forward(model)
    assert extract_model_from_parallel(model) is model
    assert model(torch.tensor(3.0)) == 7.0
    assert extract_model_from_parallel(model, keep_fp32_wrapper=False) is model
    assert model(torch.tensor(3.0)) == 6.0
    assert "forward" not in vars(model)
    assert not has_wrapped_forward(model)
    restore_forward(model)


def test_a_forward_that_was_an_attribute_before_is_an_attribute_again():
    model = Doubled()
    hooked = lambda x: x - 1  # noqa: E731
    model.forward = hooked
    replace_forward(model, plus_one)
    assert model(torch.tensor(3.0)) == 3.0
    restore_forward(model)
    assert model.forward is hooked


def test_a_deep_copy_with_a_wrapped_forward_uses_its_own_weights():
    model = Doubled()
    replace_forward(model, plus_one)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.fill_(10.0)
    assert twin(torch.tensor(3.0)) == 31.0
    assert model(torch.tensor(3.0)) == 7.0
    restore_forward(twin)
    assert twin(torch.tensor(3.0)) == 30.0
    assert model(torch.tensor(3.0)) == 7.0


def test_a_pickled_model_computes_as_its_class_and_can_be_wrapped_again():
    model = Doubled()
    replace_forward(model, plus_one)
    twin = pickle.loads(pickle.dumps(model))
    assert twin(torch.tensor(3.0)) == 6.0
    assert not has_wrapped_forward(twin)
    replace_forward(twin, plus_one)
    assert twin(torch.tensor(3.0)) == 7.0
    restore_forward(twin)
    assert twin(torch.tensor(3.0)) == 6.0


def test_a_compiled_model_is_wrapped_inside():
    model = Doubled()
    compiled = torch.compile(model, backend="eager")
    replace_forward(compiled, plus_one)
    assert compiled(torch.tensor(3.0)) == 7.0
    restore_forward(compiled)
    assert compiled(torch.tensor(3.0)) == 6.0
    assert model(torch.tensor(3.0)) == 6.0


def test_the_signature_of_a_wrapped_forward_stays_visible():
    model = Doubled()
    before = inspect.signature(model.forward)
    replace_forward(model, plus_one)
    assert inspect.signature(model.forward) == before
