"""Each example has a page with its source and its output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parents[2] / "packages/accel-suite"
EXAMPLES = sorted((SUITE / "examples").rglob("*.py"))
INCLUDED = re.compile(r"```\{literalinclude\} (\S+\.py)\n")
PAGES = {
    (page.parent / path).resolve(): page.read_text()
    for page in (SUITE / "docs/examples").glob("*.md")
    for path in INCLUDED.findall(page.read_text())
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_a_page_with_its_output(example: Path) -> None:
    assert re.search(r" prints:\n\n```text\n *\S.*\n```\n", PAGES[example], re.DOTALL), PAGES[example]


def test_no_page_shows_an_example_that_is_gone() -> None:
    assert sorted(PAGES) == EXAMPLES
