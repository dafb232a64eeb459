"""The registry, the choice, the bundle and the strategy record."""

from __future__ import annotations

import ast
import json
import sys
from copy import deepcopy
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accel_plugins
from accel_plugins import registry
from accel_plugins.precision import build_precision
from accel_plugins.registry import choose
from accel_plugins.strategy import Bundle, Feature, Strategy, StrategySpec
from accel_plugins.torchft import strategy as torchft
from accel_plugins.unsharded import move_to_device
from accel_state import lazy as tables
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.runtime import Runtime
from accel_state.settings import Settings
from accel_state.settings.engines import DeepSpeedSettings, FsdpSettings, ParallelismSettings
from accel_state.settings.run import ReplicaSettings, TrainingSettings

CPU = torch.device("cpu")


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, registry.ENTRY_POINT_GROUP)


def never(settings: Any, topology: Any, device: Any) -> bool:
    return False


def always(settings: Any, topology: Any, device: Any) -> bool:
    return True


MINE = StrategySpec(name="mine", applies=always, build=cast("Any", json.dumps), shards_gradients=True)
OTHER = StrategySpec(name="other", applies=never, build="json:loads")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_package", cast("Any", sys.modules[__name__]))


def test_a_strategy_of_an_installed_distribution_is_asked_first():
    specs = registry.STRATEGIES.available(
        [entry("other", "my_package:OTHER"), entry("mine", "my_package:MINE")]
    )
    assert [*specs] == ["mine", "other", *registry.BUILT_IN]
    assert specs["mine"] is MINE
    topology = SimpleNamespace(world_size=2)
    assert choose(Settings(), cast("Any", topology), CPU, specs) == "mine"
    del specs["mine"]
    assert choose(Settings(), cast("Any", topology), CPU, specs) == "ddp"


def test_two_distributions_cannot_take_one_name():
    registry.STRATEGIES.available([entry("mine", "my_package:MINE"), entry("mine", "my_package:MINE")])
    with pytest.raises(SettingsError, match=r"'ddp' = 'other:SPEC'.*takes a name"):
        registry.STRATEGIES.available([entry("ddp", "other:SPEC")])
    with pytest.raises(SettingsError, match=r"'mine' = 'other:SPEC'.*takes a name"):
        registry.STRATEGIES.available([entry("mine", "my_package:MINE"), entry("mine", "other:SPEC")])


@pytest.mark.parametrize("value", ["json:dumps", "my_package:OTHER"])
def test_an_entry_point_that_is_no_strategy_of_its_name_is_refused(value: str):
    with pytest.raises(SettingsError, match=r"'mine' = .* must be a StrategySpec of the name 'mine'"):
        registry.STRATEGIES.available([entry("mine", value)])


def test_an_unknown_strategy_is_refused_with_the_nearest_name():
    with pytest.raises(SettingsError, match=r"no strategy 'dpp'.*did you mean 'ddp'"):
        registry.load("dpp")
    with pytest.raises(SettingsError, match=r"no strategy 'warp'.*'single'"):
        registry.load("warp")


def test_the_factory_of_an_entry_point_is_there(monkeypatch: pytest.MonkeyPatch):
    points = [entry("mine", "my_package:MINE"), entry("other", "my_package:OTHER")]
    monkeypatch.setattr(tables, "entry_points_of", lambda group: points)
    assert cast("Any", registry.load("mine")) is json.dumps
    assert cast("Any", registry.load("other")) is json.loads
    assert registry.STRATEGIES.find("mine").shards_gradients


@pytest.mark.parametrize(("world_size", "name"), [(1, "single"), (2, "ddp"), (8, "ddp")])
def test_the_number_of_processes_chooses(world_size: int, name: str):
    topology = SimpleNamespace(world_size=world_size)
    assert choose(Settings(), cast("Any", topology), CPU) == name


@given(st.permutations([*range(6)]))
def test_a_bundle_gives_everything_back_in_the_callers_order(permutation: list[int]):
    contents = ["m0", "m1", "o0", "d0", "s0", "x"]
    places = [
        ("models", 0),
        ("models", 1),
        ("optimizers", 0),
        ("dataloaders", 0),
        ("schedulers", 0),
        ("others", 0),
    ]
    bundle = Bundle(
        models=cast("Any", contents[:2]),
        optimizers=cast("Any", contents[2:3]),
        dataloaders=contents[3:4],
        schedulers=contents[4:5],
        others=contents[5:],
        order=[places[i] for i in permutation],
    )
    assert bundle.in_order() == [contents[i] for i in permutation]


def test_placement_is_allowed_unless_the_caller_said_no():
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    for placements, expected in (((), ["meta", "meta"]), ((True, False), ["meta", "cpu"])):
        moved = move_to_device(Bundle(models=deepcopy(models), placements=placements), torch.device("meta"))
        assert [next(model.parameters()).device.type for model in moved] == expected


def test_a_feature_that_is_not_offered_is_refused_by_name():
    class Thin(Strategy):
        name = "thin"
        features = frozenset({Feature.NO_SYNC})

    strategy = Thin(Settings(), Runtime(), build_precision("no", CPU), {})
    strategy.require(Feature.NO_SYNC, "no_sync()")
    with pytest.raises(
        UnsupportedError, match=r"`clip_grad_value_\(\)` needs CLIP_GRAD_VALUE.*'thin'.*NO_SYNC"
    ):
        strategy.require(Feature.CLIP_GRAD_VALUE, "clip_grad_value_()")


def choose_with(strategy: str | None, world_size: int = 2, **sections: Any) -> str:
    settings = Settings(training=TrainingSettings(strategy=strategy), **sections)
    specs = registry.STRATEGIES.available([entry("mine", "my_package:OTHER_MINE")])
    return choose(settings, cast("Any", SimpleNamespace(world_size=world_size)), CPU, specs)


OTHER_MINE = StrategySpec(name="mine", applies=never, build="json:loads")


def test_a_selected_strategy_is_used_whether_it_applies_or_not():
    assert choose_with(None) == "ddp"
    assert choose_with("mine") == "mine"
    assert choose_with("fsdp2", fsdp=FsdpSettings(fsdp_version=2)) == "fsdp2"
    assert choose_with("fsdp2", parallelism=ParallelismSettings(dp_shard_size=2)) == "fsdp2"
    assert choose_with("ddp", parallelism=ParallelismSettings(dp_replicate_size=2)) == "ddp"


@pytest.mark.parametrize("name", ["ddp", "mine"])
def test_a_strategy_cannot_be_selected_against_settings_that_it_does_not_read(name: str):
    with pytest.raises(SettingsError, match=rf"strategy='{name}' was selected.*'fsdp'.*ask for 'fsdp2'"):
        choose_with(name, fsdp=FsdpSettings(fsdp_version=2))
    with pytest.raises(SettingsError, match=rf"strategy='{name}' was selected.*'parallelism'.*ask for 'tp'"):
        choose_with(name, parallelism=ParallelismSettings(tp_size=2))


def test_replica_groups_shard_within_a_group_if_asked_to():
    groups = ReplicaSettings(groups=2)
    assert choose_with(None, replicas=groups) == "torchft"
    assert choose_with(None, replicas=groups, fsdp=FsdpSettings(fsdp_version=2)) == "torchft_fsdp2"
    with pytest.raises(SettingsError, match=r"strategy='ddp' was selected.*'replicas'.*ask for 'torchft'"):
        choose_with("ddp", replicas=groups)  # it would train every group for itself
    runtime = cast("Any", SimpleNamespace(device=torch.device("cpu")))
    for name in ("tp", "cp", "sp", "ep"):
        sizes = ParallelismSettings(**{f"{name}_size": 2})
        with pytest.raises(UnsupportedError, match=f"not with {name}_size"):
            torchft._check(Settings(parallelism=sizes, replicas=groups), runtime)
    with pytest.raises(UnsupportedError, match="not with deepspeed"):
        torchft._check(Settings(deepspeed=DeepSpeedSettings(), replicas=groups), runtime)


def test_a_strategy_cannot_be_selected_against_fields_of_its_plugin():
    with pytest.raises(SettingsError, match=r"fsdp_version is 1, and 'fsdp2' needs 2"):
        choose_with("fsdp2", fsdp=FsdpSettings(fsdp_version=1))


def test_a_strategy_cannot_be_selected_for_more_processes_than_it_trains():
    assert choose_with("single", world_size=1) == "single"
    with pytest.raises(SettingsError, match=r"'single' was selected in a job of 2.*at most 1: select 'ddp'"):
        choose_with("single")


def test_an_entry_point_that_cannot_be_imported_is_named():
    with pytest.raises(SettingsError, match=r"'mine' = 'no_such_package:SPEC'.*cannot be imported"):
        registry.STRATEGIES.available([entry("mine", "no_such_package:SPEC")])


def test_names_are_listed_without_importing_anything():
    assert registry.STRATEGIES.names([entry("mine", "no_such_package:SPEC")])[:2] == ["mine", "torchft_fsdp2"]


ENGINES = ("deepspeed", "megatron", "pipeline", "torchft")
ROOT = Path(accel_plugins.__file__).parent
SHARED = [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] not in ENGINES]


@pytest.mark.parametrize("path", SHARED, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_outside_the_folder_of_an_engine_imports_it(path: Path):
    statements = [
        part
        for statement in ast.parse(path.read_text()).body
        if not (isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING")
        for part in ast.walk(statement)
        if isinstance(part, ast.Import | ast.ImportFrom)
    ]
    engines = tuple(f"accel_plugins.{engine}" for engine in ENGINES)
    assert not [part for part in statements if str(getattr(part, "module", None)).startswith(engines)]
