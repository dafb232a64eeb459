"""Replacing an exported name replaces what is called; taking it back leaves nothing behind."""

from __future__ import annotations

import os
import re
import sys
import types
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from unittest import mock

import pytest

from accel_state import lazy
from accel_state.errors import UnsupportedError
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
    names = {
        "accel_zoo.gate": {
            "feed": "accel_zoo.keeper",
            "os": "os:",
            "join": "os.path",
            "eat": "accel_zoo.keeper:feed",
            "meal": "accel_zoo.keeper:feed()",
            "whale": "no_such_library",
            "dodo": "absent: Use `feed`.",
        }
    }
    (package / "signs.py").write_text(f"NAMES = {names}")
    (package / "visit.py").write_text("from accel_zoo import feed\ndef visit():\n    return feed()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield import_module("accel_zoo")
    for name in [name for name in sys.modules if name.partition(".")[0] == "accel_zoo"]:
        del sys.modules[name]


def places():
    """What each module says."""
    visit, inner = import_module("accel_zoo.visit"), import_module("accel_zoo.inner")
    modules = (import_module("accel_zoo"), inner, import_module("accel_zoo.keeper"))
    return {visit.visit(), *(module.feed() for module in modules)}


def lion():
    return "lion fed"


def tiger():
    return "tiger fed"


@contextmanager
def assign_and_delete():
    import_module("accel_zoo").feed = lion
    yield
    del import_module("accel_zoo").feed


@contextmanager
def patch_by_path():
    with mock.patch("accel_zoo.feed", lion):
        yield


@contextmanager
def patch_an_object():
    with mock.patch.object(import_module("accel_zoo"), "feed", lion):
        yield


@contextmanager
def monkeypatch_an_object():
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(import_module("accel_zoo"), "feed", lion)
        yield


@contextmanager
def monkeypatch_by_path():
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("accel_zoo.feed", lion)
        yield


WAYS = [assign_and_delete, patch_by_path, patch_an_object, monkeypatch_an_object, monkeypatch_by_path]


@pytest.mark.parametrize("used", ["before", "inside"])
@pytest.mark.parametrize("way", WAYS)
def test_a_replacement_is_called_everywhere_and_ends_everywhere(zoo, way, used):
    if used == "before":
        assert places() == {"fed"}
    with way():
        assert places() == {"lion fed"}
    assert places() == {"fed"}


@pytest.mark.parametrize("outer", WAYS)
@pytest.mark.parametrize("inner", WAYS[1:])
def test_replacements_within_each_other_end_in_turn(zoo, outer, inner):
    with outer():
        with mock.patch("accel_zoo.inner.feed", tiger):
            assert places() == {"tiger fed"}
            with inner():
                assert places() == {"lion fed"}
            assert places() == {"tiger fed"}
        assert places() == {"lion fed"}
    assert places() == {"fed"}


def test_a_lasting_replacement_outlives_a_patch_elsewhere(zoo):
    zoo.feed = lion
    with mock.patch("accel_zoo.inner.feed", tiger):
        assert places() == {"tiger fed"}
    assert places() == {"lion fed"}


def test_a_submodule_is_replaced_and_put_back(zoo):
    before = import_module("accel_zoo.inner")
    with mock.patch("accel_zoo.inner") as inner:
        assert zoo.inner is inner
    assert zoo.inner is before


def test_a_visible_name_resolves_and_is_not_listed(zoo):
    gate = import_module("accel_zoo.gate")
    assert "accel_zoo.signs" not in sys.modules
    assert gate.feed is gate.eat is import_module("accel_zoo.keeper").feed
    assert gate.meal == "fed"
    assert gate.os is os
    assert gate.join is os.path.join
    assert dir(gate) == gate.__all__ == []
    assert not hasattr(gate, "lion")
    assert not hasattr(gate, "whale")


@pytest.mark.parametrize("used", ["before", "inside"])
def test_replacing_a_visible_name_replaces_what_is_called(zoo, used):
    if used == "before":
        assert import_module("accel_zoo.gate").feed() == "fed"
    with mock.patch("accel_zoo.gate.feed", lion):
        assert places() == {"lion fed"}
    assert places() == {"fed"}
    with mock.patch("accel_zoo.gate.os") as replaced:
        assert import_module("accel_zoo.gate").os is replaced
    assert import_module("accel_zoo.gate").os is os


def test_an_absent_name_raises_a_sentence_when_it_is_used(zoo):
    dodo = import_module("accel_zoo.gate").dodo
    message = re.escape("accel_zoo.gate.dodo is not implemented in accel. Use `feed`.")
    assert re.search(message, repr(dodo))
    assert not hasattr(dodo, "__wrapped__")
    for use in (
        dodo,
        lambda: bool(dodo),
        lambda: list(dodo),
        lambda: dodo.wings,
        lambda: types.new_class("Chick", (dodo,)),
    ):
        with pytest.raises(UnsupportedError, match=message):
            use()


def test_the_metadata_of_distributions_is_read_again_where_something_was_installed(tmp_path, monkeypatch):
    def install(name: str) -> None:
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[my.colors]\n{name} = my_package:COLOR\n")

    def names() -> list[str]:
        return sorted(point.name for point in entry_points_of("my.colors"))

    reads: list[None] = []
    monkeypatch.setattr(lazy, "entry_points", lambda: (reads.append(None), entry_points())[1])
    monkeypatch.syspath_prepend(tmp_path)
    assert (names(), names()) == ([], [])
    install("red")
    os.utime(tmp_path, (1, 1))  # where the clock of files is coarse
    assert (names(), names()) == (["red"], ["red"])
    assert len(reads) == 2
