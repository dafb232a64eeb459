"""What both replicated strategies refuse, and what one process keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import nn

from accel_plugins import ddp, unsharded
from accel_plugins.precision import build_precision
from accel_plugins.strategy import Bundle
from accel_state.errors import SettingsError
from accel_state.runtime import Runtime

if TYPE_CHECKING:
    from accel_plugins.strategy import Strategy

CPU = torch.device("cpu")


def make(module: Any = unsharded) -> Strategy:
    return module.build(cast("Any", None), Runtime(), build_precision("no", CPU), {})


@pytest.mark.parametrize("module", [unsharded, ddp])
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


def test_compiled_models_are_saved_under_their_own_names():
    strategy, model = make(), nn.Linear(2, 1)
    compiled = cast("nn.Module", torch.compile(model, backend="eager"))
    saved = strategy.persister.full_state_dict(compiled)
    assert [*saved] == ["weight", "bias"]
    twin = nn.Linear(2, 1)
    strategy.persister.load_full_state_dict(twin, saved)
    assert torch.equal(twin.weight, model.weight)
