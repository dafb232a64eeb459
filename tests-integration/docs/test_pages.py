"""Modules and files that pages name exist, and the module map in README.md has every module."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

from accel_cli.main import COMMANDS, installed_commands, main

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
PICTURE = re.compile(r"^## Module map\n.*?^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MAX_LINES = 44


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


def literals():
    """Return every string of the sources; of a formatted one, its constant parts joined."""
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))


def test_the_messages_in_the_index_of_errors_are_those_of_the_sources() -> None:
    index = (ROOT / "packages/accel-suite/docs/tutorials/errors.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \|", index, re.MULTILINE)
    assert len(rows) > 20
    text = "\n".join(literals())
    assert not [message for message, error in rows if not error.startswith("torch's") and message not in text]


KNOWN = {**COMMANDS, **installed_commands()}
COMMAND_LINE = re.compile(r"`(accel [^`]+)`|^ *(?:\$ )?(accel [^`|\n]+)$", re.MULTILINE)


def command_lines():
    """Return every command line of `accel` in the prose and the blocks of the pages, up to its script."""
    for page in PAGES:
        for match in COMMAND_LINE.finditer(page.read_text()):
            line = re.split(r" {2,}| […#]|\)", match[1] or match[2])[0]
            words = [word for word in line.split()[1:] if not word.startswith("[")]
            scripts = [number for number, word in enumerate(words) if word.endswith(".py")]
            if words and (match[1] or words[0] in KNOWN):  # else a line of prose that begins with the name
                yield page, line, words[: scripts[0]] if scripts else words


def test_the_commands_and_flags_that_pages_name_exist() -> None:
    known = {
        name: {
            flag.replace("-", "_")
            for action in command.make_parser().actions
            for flag in action.option_strings
        }
        for name, command in KNOWN.items()
    }
    wrong, count = [], 0
    for page, line, words in command_lines():
        if words and words[0] in known:
            flags = {word.partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
            count += 1
            wrong += [f"{page.name}: {line}: {flag}" for flag in flags - known[words[0]] - {"__help"}]
        elif words and words[0].isalpha() and words[0] not in {"is", "in", "has"}:
            wrong.append(f"{page.name}: {line}")
    assert count > 60
    assert wrong == []


PYTHON_LINE = re.compile(
    r"^\s*(import \w|from [\w.]+ import|with .*:$|for .* in .*:$|def \w)|accelerator\.\w+\(", re.MULTILINE
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_is_marked_as_such_and_can_be_parsed(page: Path) -> None:
    """What cannot run on its own is marked `py`, which colours it."""
    blocks = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL)
    shells = re.compile(r"^\s*(\$|accel |pip |uv )", re.MULTILINE)
    unmarked = [body for kind, body in blocks if kind == "text" and PYTHON_LINE.search(body)]
    assert [body for body in unmarked if not shells.search(body)] == []
    for kind, body in blocks:
        if kind == "py":
            ast.parse(textwrap.dedent(body))


def test_the_copied_pages_lead_to_the_copied_scripts(tmp_path: Path) -> None:
    assert main(["examples", str(tmp_path / "copy"), "--docs"]) == 0
    docs = tmp_path / "copy" / "docs"
    targets = [
        (page, target)
        for page in docs.rglob("*.md")
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if "://" not in target and "/src/" not in target  # scripts that draw pictures are not copied
    ]
    assert len(targets) > 300
    assert not [(page, target) for page, target in targets if not (page.parent / target).exists()]


AVOIDED = re.compile(
    r"\b(made if absent|give (one|only one) of the two|leave one of the two out|look at how"
    r"|of no use with|gives no sign of life|ends them at once|as far as it differs)\b"
)


def test_messages_and_docstrings_avoid_phrases_that_were_rewritten() -> None:
    assert not [text[:200] for text in literals() if AVOIDED.search(text)]
