"""The glossary rule: refuse the words of tools/glossary.toml in identifiers and prose, and name the field's.

Identifiers are those that a file defines: modules, functions, classes, arguments and variables. Prose is
every string with a blank in it (docstrings, messages, help texts), every comment, the pages of the docs
without their code, and the name of a test, which is a sentence. Of tests, only prose is read.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

WORDS = Path(__file__).with_suffix(".toml")
SURFACE = Path(__file__).with_name("surface.json")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"``[^`]*``|`[^`]*`")


@dataclass(frozen=True, slots=True)
class Finding:
    """A refused word: what kind of text it is in, the line, the text that was found, what to say instead."""

    kind: str
    line: int
    found: str
    instead: str


@dataclass(frozen=True, slots=True)
class Glossary:
    """The refused parts of names and phrases of prose and pages with replacements, and the exempt names."""

    names: dict[str, str]
    prose: dict[str, str]
    surface: frozenset[str]
    pages: dict[str, str] = field(default_factory=dict[str, str])

    def find_in_page(self, text: str) -> Iterator[Finding]:
        """Find the phrases that make a page hard to read."""
        prose = _without_code(text)
        for phrase, instead in self.pages.items():
            for match in re.finditer(phrase, prose, re.MULTILINE):
                line = 1 + prose.count("\n", 0, match.start())
                yield Finding("pages", line, " ".join(match[0].split()), instead)

    def find(self, path: str, text: str) -> Iterator[Finding]:
        """Find the refused words of a Python file or a page."""
        if path.endswith(".md"):
            yield from self._find_phrases([(1, _without_code(text))])
            return
        tree = ast.parse(text)
        names = list(identifiers(tree))
        is_test = "/tests/" in path or path.startswith("tests-integration/")
        tests = [(line, name.replace("_", " ")) for line, name in names if name.startswith("test_")]
        if not is_test or "/harness/" in path:
            yield from self._find_names([(1, Path(path).stem), *names])
        yield from self._find_phrases([*strings(tree), *comments(text), *tests])

    def _find_names(self, names: Iterable[tuple[int, str]]) -> Iterator[Finding]:
        for line, name in names:
            if name in self.surface or name.startswith("test_"):
                continue
            joined = f"_{'_'.join(_PART.findall(name)).lower()}_".replace("_in_place_", "_")
            for word, instead in self.names.items():
                if f"_{word}_" in joined:
                    yield Finding("names", line, name, instead)

    def _find_phrases(self, texts: Iterable[tuple[int, str]]) -> Iterator[Finding]:
        phrases = _compile(tuple(self.prose))
        for start, text in texts:
            for match in phrases.finditer(text):
                line = start + text.count("\n", 0, match.start())
                phrase = list(self.prose)[int((match.lastgroup or "_0")[1:])]
                yield Finding("prose", line, " ".join(match[0].split()), self.prose[phrase])


def load_glossary() -> Glossary:
    """Load the refused words and the names of the documented surface."""
    tables = tomllib.loads(WORDS.read_text())
    surface = frozenset(_names_in(json.loads(SURFACE.read_text())))
    return Glossary(names=tables["names"], prose=tables["prose"], surface=surface, pages=tables["pages"])


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The names that a module defines, with their lines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case (
                ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                yield node.lineno, name
            case _:
                pass


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The strings of a module that have a blank in them, without the code in them."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if " " in text:
                yield node.lineno, _without_code(text)
            case _:
                pass


def comments(text: str) -> Iterator[tuple[int, str]]:
    """The comments of a file; lines that follow each other are one text, for phrases that wrap."""
    start, block = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != start + len(block) and block:
            yield start, _without_code("\n".join(block))
            block = []
        start = start if block else token.start[0]
        block.append(token.string.lstrip("# "))
    if block:
        yield start, _without_code("\n".join(block))


def _without_code(text: str) -> str:
    """The text with code blanked out and its line breaks kept."""
    for pattern in (_FENCE, _CODE):
        text = pattern.sub(lambda match: "\n" * match[0].count("\n"), text)
    return text


@cache
def _compile(phrases: tuple[str, ...]) -> re.Pattern[str]:
    """One pattern for all phrases; a blank in a phrase matches a line break as well."""
    plain = [re.sub(r"[(](?![?])", "(?:", phrase).replace(" ", r"\s+") for phrase in phrases]
    groups = (f"(?P<_{index}>{phrase})" for index, phrase in enumerate(plain))
    return re.compile(rf"\b(?:{'|'.join(groups)})\b", re.IGNORECASE)


def _names_in(value: object) -> Iterator[str]:
    """Every key and every string of a JSON value."""
    match value:
        case dict():
            for key, inner in value.items():
                yield str(key)
                yield from _names_in(inner)
        case list():
            for inner in value:
                yield from _names_in(inner)
        case str():
            yield value
        case _:
            pass
