from __future__ import annotations

import importlib
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

from accel_state import libraries
from accel_state.errors import MissingDependencyError, SettingsError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def nothing_remembered():
    yield
    libraries._is_installed.cache_clear()
    libraries.installed_version.cache_clear()


def install(folder: Path, module: str, version: str | None, monkeypatch, distribution: str | None = None):
    """Put a module that cannot be imported on the path, with its metadata."""
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text("raise SystemExit('imported')")
    if version:
        name = (distribution or module).replace("-", "_")
        metadata = folder / f"{name}-{version}.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution or module}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()


ALL = sorted(name for name in dir(libraries) if name.startswith("is_") and name.endswith("_available"))


@pytest.mark.parametrize("name", ALL)
def test_every_question_is_answered_with_a_bool_and_documented(name):
    question = getattr(libraries, name)
    assert isinstance(question(), bool)
    assert question.__name__ == name
    assert question.__doc__


def test_every_library_of_the_table_can_be_asked_about():
    assert {f"is_{name}_available" for name in libraries.LIBRARIES} <= set(ALL)


def test_asking_imports_none_of_the_libraries():
    code = (
        "import sys; from accel_state import libraries as a;"
        "[getattr(a, n)() for n in dir(a) if n.startswith('is_') and n.endswith('_available')];"
        "names = {m for library in a.LIBRARIES.values() for m in library.modules} | {'torch', 'numpy'};"
        "print(sorted(names & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(libraries.LIBRARIES))
def test_a_library_on_the_path_is_found_without_being_imported(name, tmp_path, monkeypatch):
    library = libraries.LIBRARIES[name]
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if k not in library.modules})
    install(tmp_path, library.modules[0], "99.0", monkeypatch, library.distribution)
    assert libraries.is_installed(name)
    libraries.require(name, "This test")


def test_a_folder_that_happens_to_have_the_name_is_not_the_library(tmp_path, monkeypatch):
    (tmp_path / "lomo_optim").mkdir()  # a library that the workspace does not install
    monkeypatch.syspath_prepend(tmp_path)
    assert not libraries.is_lomo_available()


def test_a_version_that_is_too_old_is_not_available(tmp_path, monkeypatch):
    install(tmp_path, "bitsandbytes", "0.38.0", monkeypatch)
    assert libraries.is_bnb_available()
    assert libraries.is_8bit_bnb_available()
    assert not libraries.is_4bit_bnb_available()
    assert not libraries.is_bnb_available(min_version="0.39")


def test_what_is_missing_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setattr(libraries, "_is_installed", lambda library: False)
    with pytest.raises(
        MissingDependencyError, match=r"Prefetching needs torchdata.*0\.8\.0.*torchdata>=0\.8\.0"
    ):
        libraries.require("torchdata_stateful_dataloader", "Prefetching")
    with pytest.raises(MissingDependencyError, match=r"`pip install 'accel-quant\[bnb\]'`"):
        libraries.require("bnb", "Loading in 8 bits", install="accel-quant[bnb]")


@pytest.mark.parametrize(
    ("operation", "expected"),
    [(">", False), (">=", True), ("==", True), ("!=", False), ("<=", True), ("<", False)],
)
def test_a_version_is_compared_as_the_operation_says(operation, expected):
    assert libraries.compare_versions(Version("2.10.0"), operation, "2.10") is expected
    assert libraries.compare_versions(Version("2.10.0"), operation, "2.9") is (operation in {">", ">=", "!="})


def test_a_library_is_compared_by_its_installed_version(tmp_path, monkeypatch):
    install(tmp_path, "some_library", "1.2.3", monkeypatch, "some-library")
    assert libraries.compare_versions("some-library", "==", "1.2.3")


def test_a_nightly_of_torch_counts_as_its_release(tmp_path, monkeypatch):
    install(tmp_path, "torch", "2.20.0.dev20300101+cpu", monkeypatch)
    libraries.installed_version.cache_clear()
    assert libraries.is_torch_version(">=", "2.20.0")
    assert not libraries.is_torch_version(">", "2.20.0")


def test_an_unusable_comparison_says_what_it_found():
    with pytest.raises(SettingsError, match="'=>'"):
        libraries.compare_versions("packaging", "=>", "1.0")
    with pytest.raises(SettingsError, match="'one'"):
        libraries.compare_versions("packaging", ">=", "one")
    with pytest.raises(MissingDependencyError, match="'surely-not-installed'"):
        libraries.compare_versions("surely-not-installed", ">=", "1.0")
