"""Modules and files that pages name exist, and the picture of the house in README.md has every module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(ROOT.glob("packages/*/docs/**/*.md")),
]
SOURCES = {path.name: path for path in ROOT.glob("packages/*/src/*") if path.is_dir()}
MODULE = re.compile(r"\baccel_[a-z]+(?!\.(?:svg|json)\b)(?:\.\w+)+")
PATH = re.compile(r"(?<![\w/.-])(?:packages|tools|tests-integration|accel_[a-z]+)/[\w./-]*\w")
PLACEHOLDER = re.compile(r"\bNAME\b|/index$")  # also entries of tables of contents, without their suffix
PICTURE = re.compile(r"^## The house\n.*?^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MAX_LINES = 40


def absent_part(dotted: str) -> str | None:
    """Return the part of a dotted name that does not exist, such as a module or its attribute."""
    package, *parts = dotted.split(".")
    if package not in SOURCES:
        return package
    folder = SOURCES[package]
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    module = folder / f"{parts[0]}.py" if parts else folder
    if module.is_file():
        parts.pop(0)
    files = [module] if module.is_file() else [*folder.glob("__init__.py*")]
    if parts and not any(re.search(rf"\b{parts[0]}\b", file.read_text()) for file in files):
        return parts[0]
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_modules_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    folders = [ROOT, page.parent, *(source.parent for source in SOURCES.values())]
    absent = {name for name in MODULE.findall(text) if absent_part(name)}
    absent |= {path for path in PATH.findall(text) if not any((folder / path).exists() for folder in folders)}
    assert not {name for name in absent if not PLACEHOLDER.search(name)}


def test_a_module_and_an_attribute_that_are_gone_are_noticed() -> None:
    assert absent_part("accel_train.accelerator.build.Parts") is None
    assert absent_part("accel_train.accelerator.vanished") == "vanished"
    assert absent_part("accel_train.vanished.Parts") == "vanished"
    assert absent_part("accel_train.accelerator.build.Gone") == "Gone"


def pictured() -> dict[str, set[str]]:
    """Return the modules and folders that the picture names, by package."""
    match = PICTURE.search((ROOT / "README.md").read_text())
    assert match, "README.md has no picture"
    assert match[1].count("\n") <= MAX_LINES
    names: dict[str, set[str]] = {}
    package = ""
    for line in match[1].splitlines():
        first, modules, _ = re.split(r" {2,}", line)
        package = first or package
        names.setdefault(package, set()).update(modules.split(", "))
    return names


def test_the_picture_names_every_module_and_no_other() -> None:
    names = pictured()
    assert set(names) == set(SOURCES)
    for package, named in names.items():
        if package == "accel":  # its modules are generated import paths, and the picture names none
            continue
        source = SOURCES[package]
        modules = {path.stem for path in source.glob("*.py") if not path.stem.startswith("_")}
        folders = {f"{path.name}/" for path in source.iterdir() if path.is_dir() and path.name[0] not in "_."}
        assert named == modules | folders, package
