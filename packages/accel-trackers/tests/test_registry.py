"""Which trackers there are, and what is wrong with those that are asked for."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from accel_state import libraries
from accel_state.errors import MissingDependencyError, SettingsError, UnsupportedError
from accel_state.labels import LoggerType
from accel_state.libraries import LIBRARIES, is_installed
from accel_trackers import (
    LOGGER_TYPE_TO_CLASS,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)
from accel_trackers.general import GeneralTracker
from accel_trackers.registry import VENDORS, tracker_class

ABSENT = [name for name in VENDORS if not is_installed(name)]
PRESENT = [name for name in VENDORS if name not in ABSENT]


@pytest.fixture
def registered(memory_class):
    yield register_tracker_class(memory_class)
    del LOGGER_TYPE_TO_CLASS["memory"]


def test_there_is_a_class_for_every_label():
    assert {*LOGGER_TYPE_TO_CLASS} == {*LoggerType.list()} - {"all"}
    assert {*VENDORS} == {*LOGGER_TYPE_TO_CLASS}


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(SettingsError, match=r"'tensorbord': did you mean 'tensorboard'\? It takes 'all', "):
        filter_trackers("tensorbord")


@pytest.fixture
def no_library(monkeypatch):
    """Nothing of any of the libraries can be imported."""
    for name in VENDORS:
        for module in LIBRARIES[name].modules:
            monkeypatch.setitem(sys.modules, module, None)
    libraries._is_installed.cache_clear()
    yield
    libraries._is_installed.cache_clear()


@pytest.mark.parametrize("name", VENDORS)
def test_a_missing_library_gets_its_extra(no_library, name):
    extra = name.replace("_", "-")
    sentence = rf"needs \w+, which is not installed: run `pip install 'accel-trackers\[{extra}\]'`$"
    with pytest.raises(MissingDependencyError, match=f"^log_with='{name}' {sentence}"):
        filter_trackers(name, "logs")
    kind = tracker_class(name)
    with pytest.raises(MissingDependencyError, match=f"^The tracker '{name}' {sentence}"):
        kind("project", *(["logs"] if kind.requires_logging_directory else []))


def test_without_libraries_all_stands_for_registered_classes(no_library, registered):
    assert filter_trackers("all") == ["memory"]


@pytest.mark.skipif("tensorboard" not in PRESENT, reason="tensorboard is not installed")
def test_a_missing_directory_is_asked_for():
    with pytest.raises(SettingsError, match="'tensorboard', which writes files: set the folder with"):
        filter_trackers(LoggerType.TENSORBOARD)


def test_names_labels_and_objects_are_taken_once_each(registered, memory):
    assert filter_trackers(["memory", memory, "memory"]) == ["memory", memory]
    assert filter_trackers(memory) == [memory]
    if PRESENT:
        label = LoggerType(PRESENT[0])
        assert filter_trackers([label, PRESENT[0]], "logs") == [PRESENT[0]]


def test_all_stands_for_what_is_available(registered):
    available = [*map(str, get_available_trackers())]
    assert available == [*PRESENT, "memory"]
    assert filter_trackers("all", "logs") == available


def test_a_registered_class_is_known_by_its_name(registered):
    assert tracker_class("memory") is registered


@pytest.mark.parametrize("name", ["", "all", None, 3])
def test_a_class_needs_a_name(memory_class, name):
    other = type("Other", (memory_class,), {"name": name})
    with pytest.raises(SettingsError, match=rf"Other.name is {name!r}"):
        register_tracker_class(other)


def test_a_class_needs_its_attributes():
    nameless = type("Nameless", (GeneralTracker,), {"requires_logging_directory": False})
    with pytest.raises(ValueError, match=r"Nameless.name is None"):
        register_tracker_class(nameless)
    with pytest.raises(ValueError, match=r"Undecided has no requires_logging_directory"):
        register_tracker_class(type("Undecided", (GeneralTracker,), {"name": "undecided"}))


@pytest.mark.parametrize("name", ["wandb", "memory"])
def test_a_class_may_replace_another_with_a_warning(registered, memory_class, name):
    before = LOGGER_TYPE_TO_CLASS[name]
    other = type("Other", (memory_class,), {"name": name})
    try:
        with pytest.warns(UserWarning, match=rf"'{name}' is now .*Other.*, instead of"):
            register_tracker_class(other)
        assert tracker_class(name) is other
        register_tracker_class(other)  # again, without a warning
    finally:
        LOGGER_TYPE_TO_CLASS[name] = before


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Install a distribution with the module `kites` and entry points of trackers in it."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, **points):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = "".join(f"{point} = kites:{target}\n" for point, target in points.items())
        (folder / "entry_points.txt").write_text(f"[accel.trackers]\n{lines}")

    (tmp_path / "kites.py").write_text(
        "from accel_trackers.general import GeneralTracker\n"
        "class Kite(GeneralTracker):\n    name, requires_logging_directory = 'kite', False\n"
        "class Nameless(GeneralTracker):\n    requires_logging_directory = False\n"
        "class Wandb(Kite):\n    name = 'wandb'\n"
        "class Other:\n    name = 'kite'\n"
    )
    yield install
    sys.modules.pop("kites", None)


def test_a_class_of_an_installed_distribution_is_known_by_its_name(install):
    install("kites", kite="Kite")
    assert tracker_class("kite").__name__ == "Kite"
    assert "kite" in get_available_trackers()


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ({"kite": "Nameless"}, r"'kite' = 'kites:Nameless' .* must be a type of the name 'kite'"),
        ({"wandb": "Wandb"}, r"'wandb' = 'kites:Wandb' .* takes a name that \"accel's own\" has already"),
        ({"kite": "Absent"}, r"'kite' = 'kites:Absent' .* cannot be imported"),
    ],
)
def test_an_entry_point_that_is_no_such_class_or_takes_a_name_is_refused(install, points, words):
    install("kites", **points)
    with pytest.raises(SettingsError, match=words):
        tracker_class(*points)


def test_two_distributions_that_claim_a_name_are_refused(install):
    install("kites", kite="Kite")
    install("dragons", kite="Other")
    with pytest.raises(SettingsError, match="uninstall one of the two"):
        tracker_class("kite")


def test_a_program_may_register_a_class_under_the_name_of_an_entry_point(install, memory_class):
    install("kites", kite="Kite")
    registered = register_tracker_class(type("Other", (memory_class,), {"name": "kite"}))
    try:
        assert tracker_class("kite") is registered
    finally:
        del LOGGER_TYPE_TO_CLASS["kite"]


def test_an_object_may_get_its_attributes_when_it_is_made():
    class Late(GeneralTracker):
        name = "late"
        requires_logging_directory = False

        def __init__(self, run_name):
            self.tracker = [run_name]
            super().__init__()

    register_tracker_class(Late)
    try:
        assert filter_trackers("late") == ["late"]
        assert tracker_class("late")("project").tracker == ["project"]
    finally:
        del LOGGER_TYPE_TO_CLASS["late"]


def test_only_trackers_are_registered():
    with pytest.raises(SettingsError, match="pass a subclass of GeneralTracker"):
        register_tracker_class(dict)


def test_an_incomplete_tracker_says_what_it_lacks():
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(
        UnsupportedError, match=r"Half is missing .*: 'requires_logging_directory', 'tracker'"
    ):
        Half()
    with pytest.raises(NotImplementedError):
        filter_trackers(Half(_blank=True))


def test_a_medium_that_a_tracker_lacks_is_an_error(memory):
    for call in (
        lambda: memory.log_images({"x": np.zeros((4, 4))}),
        lambda: memory.log_table("x"),
        lambda: memory.log_histograms({"x": 1}),
        lambda: memory.log_text({"x": "y"}),
        lambda: memory.log_artifact("x"),
    ):
        with pytest.raises(UnsupportedError, match="The tracker 'memory' has no"):
            call()
