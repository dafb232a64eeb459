"""What both replicated strategies refuse, and what one process keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import nn

from accel_plugins.bundle import Bundle
from accel_plugins.precision import build_precision
from accel_plugins.strategies import ddp, single
from accel_state.errors import SettingsError
from accel_state.runtime import Runtime

if TYPE_CHECKING:
    from pathlib import Path

    from accel_plugins.strategy import Strategy

CPU = torch.device("cpu")


def make(module: Any = single) -> Strategy:
    return module.build(cast("Any", None), Runtime(), build_precision("no", CPU), {})


@pytest.mark.parametrize("module", [single, ddp])
def test_a_meta_model_is_refused_by_the_name_of_its_parameter(module: Any):
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(1, 1))
    with pytest.raises(SettingsError, match=r"Sequential: the parameter '0.weight' is on the meta device"):
        make(module).wrapper.check(Bundle(models=[empty]))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_model_is_refused_until_it_has_seen_a_batch():
    lazy = nn.LazyLinear(1)
    with pytest.raises(SettingsError, match=r"LazyLinear: the parameter 'weight'.*one batch"):
        make().wrapper.check(Bundle(models=[lazy]))
    lazy(torch.ones(1, 2))
    make().wrapper.check(Bundle(models=[lazy]))


def test_compiled_models_are_saved_under_their_own_names(tmp_path: Path):
    strategy, model = make(), nn.Linear(2, 1)
    compiled = cast("nn.Module", torch.compile(model, backend="eager"))
    strategy.persister.save_model(compiled, tmp_path, 0)
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert [*saved] == ["weight", "bias"]
    twin = nn.Linear(2, 1)
    strategy.persister.load_model(twin, tmp_path, 0)
    assert torch.equal(twin.weight, model.weight)


def test_several_models_get_files_of_their_own(tmp_path: Path):
    persister = make().persister
    for index in range(3):
        model = nn.Linear(1, 1)
        persister.save_model(model, tmp_path, index)
        persister.save_optimizer(torch.optim.SGD(model.parameters()), model, tmp_path, index)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "optimizer.bin",
        "optimizer_1.bin",
        "optimizer_2.bin",
        "pytorch_model.bin",
        "pytorch_model_1.bin",
        "pytorch_model_2.bin",
    ]
