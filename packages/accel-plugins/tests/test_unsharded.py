"""What both replicated strategies refuse, and what one process keeps."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import nn

from accel_plugins.ddp import DdpStrategy
from accel_plugins.kwargs import StepGuard
from accel_plugins.precision import build_precision
from accel_plugins.step_guard import guard_steps
from accel_plugins.strategy import Bundle, Strategy
from accel_plugins.unsharded import load_in_place
from accel_state.errors import SettingsError
from accel_state.runtime import Runtime

CPU = torch.device("cpu")


def make(kind: type[Strategy] = Strategy, device: torch.device = CPU) -> Strategy:
    return kind(cast("Any", None), Runtime(device=device), build_precision("no", CPU), {})


@pytest.mark.parametrize("kind", [Strategy, DdpStrategy])
def test_a_meta_model_is_refused_by_the_name_of_its_parameter(kind: Any):
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(1, 1))
    with pytest.raises(SettingsError, match=r"Sequential: the parameter '0.weight' is on the meta device"):
        make(kind).check(Bundle(models=[empty]))


@pytest.mark.parametrize("evaluation", [False, True])
def test_a_model_that_a_device_map_spreads_is_not_moved(evaluation: bool):
    other = torch.device("meta")
    models = [nn.Sequential(nn.Linear(1, 1)) for _ in range(2)]
    vars(models[0][0])["hf_device_map"] = {"a": 0, "b": 1}
    moved: Any = make(device=other).wrap(Bundle(models=models), evaluation=evaluation).models
    assert [model[0].weight.device for model in moved] == [CPU, other]


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_model_is_refused_until_it_has_seen_a_batch():
    lazy = nn.LazyLinear(1)
    with pytest.raises(SettingsError, match=r"LazyLinear: the parameter 'weight'.*one batch"):
        make().check(Bundle(models=[lazy]))
    lazy(torch.ones(1, 2))
    make().check(Bundle(models=[lazy]))


def test_compiled_models_are_saved_under_their_own_names():
    strategy, model = make(), nn.Linear(2, 1)
    compiled = cast("nn.Module", torch.compile(model, backend="eager"))
    saved = strategy.states.full_state_dict(compiled)
    assert [*saved] == ["weight", "bias"]
    twin = nn.Linear(2, 1)
    strategy.states.load_full_state_dict(twin, saved)
    assert torch.equal(twin.weight, model.weight)


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


def trained(make_optimizer: Any, steps: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(dtype)
    optimizer = make_optimizer(model.parameters())
    for _ in range(steps):

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3, dtype=dtype)).float().square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    return optimizer


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_loads_in_place_what_torch_loads(name: str, dtype: torch.dtype, steps: int):
    make_optimizer = OPTIMIZERS[name]
    saved = trained(make_optimizer, 2, dtype).state_dict()
    original = copy.deepcopy(saved)
    mine, torchs = (trained(make_optimizer, steps, dtype) for _ in range(2))
    before = {id(p): dict(state) for p, state in mine.state.items()}
    load_in_place(mine, saved)
    torchs.load_state_dict(copy.deepcopy(original))
    torch.testing.assert_close(mine.state_dict(), torchs.state_dict(), rtol=0, atol=0)
    # Tensors of parameters are where they were, and nothing shares memory with what was loaded.
    for parameter, state in mine.state.items():
        for key, value in state.items():
            old = before.get(id(parameter), {}).get(key)
            if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor) and old.dtype == value.dtype:
                assert value.data_ptr() == old.data_ptr(), key
    for tensor in tensors_of([dict(state) for state in mine.state.values()]):
        tensor.zero_()
    torch.testing.assert_close(saved, original, rtol=0, atol=0)


def test_an_optimizer_of_other_groups_is_refused_before_anything_changes():
    saved = trained(OPTIMIZERS["adamw"], 2).state_dict()
    other = torch.optim.AdamW(nn.Linear(3, 2, bias=False).parameters())
    with pytest.raises(ValueError, match="parameter group"):
        load_in_place(other, saved)
    assert not other.state


def test_the_state_of_a_loss_scaler_is_refused_with_a_warning_where_steps_are_guarded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = make()
    guard_steps(strategy, StepGuard(max_norm=1.0))
    strategy.precision.load_state_dict(strategy.precision.state_dict())
    assert not caplog.records
    strategy.precision.load_state_dict({"scale": 2.0})
    assert "state of a loss scaler" in caplog.text
