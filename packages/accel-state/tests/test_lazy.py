"""Names and entry points are found at their first use."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from unittest import mock

import pytest

from accel_state.lazy import entry_points_of


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """The package `accel_zoo`: its `feed` is defined in one module and called in another."""
    package = tmp_path / "accel_zoo"
    (package / "inner").mkdir(parents=True)
    attach = "from accel_state.lazy import attach\nattach(__name__)\n"
    (package / "__init__.py").write_text(attach)
    (package / "__init__.pyi").write_text(
        "from accel_zoo.keeper import feed as feed\nfrom accel_zoo import inner as inner\n"
    )
    (package / "inner/__init__.py").write_text(attach)
    (package / "inner/__init__.pyi").write_text("from accel_zoo.keeper import feed as feed\n")
    (package / "keeper.py").write_text("def feed():\n    return 'fed'\n")
    (package / "gate.py").write_text(
        'from accel_state.lazy import attach\nattach(__name__, "accel_zoo.signs")\n'
    )
    (package / "gate.pyi").write_text("")
    (package / "fence.py").write_text("")
    (package / "fence.pyi").write_text("from os.path import basename as basename\n")
    names = {
        "accel_zoo.gate": {
            "feed": "accel_zoo.keeper",
            "os": "os:",
            "join": "os.path",
            "eat": "accel_zoo.keeper:feed",
        }
    }
    (package / "signs.py").write_text(f"NAMES = {names}")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield import_module("accel_zoo")
    for name in [name for name in sys.modules if name.partition(".")[0] == "accel_zoo"]:
        del sys.modules[name]


def test_a_submodule_is_replaced_and_put_back(zoo):
    before = import_module("accel_zoo.inner")
    with mock.patch("accel_zoo.inner") as inner:
        assert zoo.inner is inner
    assert zoo.inner is before


def test_an_internal_name_resolves_and_is_not_listed(zoo):
    gate = import_module("accel_zoo.gate")
    assert "accel_zoo.signs" not in sys.modules
    assert gate.feed is gate.eat is import_module("accel_zoo.keeper").feed
    assert gate.os is os
    assert gate.join is os.path.join
    assert gate.basename is os.path.basename  # another module of the package exports it
    assert dir(gate) == gate.__all__ == []
    assert not hasattr(gate, "lion")


def test_a_distribution_on_a_new_folder_is_found(tmp_path, monkeypatch):
    def install(folder, name: str) -> None:
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[my.colors]\n{name} = my_package:COLOR\n")

    assert not entry_points_of("my.colors")
    for number, name in enumerate(("red", "blue"), start=1):
        install(tmp_path / name, name)
        monkeypatch.syspath_prepend(tmp_path / name)
        assert len(entry_points_of("my.colors")) == number
    assert entry_points_of("my.colors").names == {"red", "blue"}
