"""Build the documentation, and check its content and its rendering in a browser.

    uv run python tools/check_docs.py [--screenshots FOLDER]

Every public name has an entry and a docstring, the pictures of packages are those of their imports, and pages
have none of the phrases that tools/glossary.toml refuses in them. In a
browser, the search finds a method by its name, and no page is wider than a telephone, misses a picture, or
has text that cannot be read on its background, light or dark. Where there is no Chromium, that part is left
out and says so.
"""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
import sys
import threading
import time
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from playwright.sync_api import ViewportSize, sync_playwright

import build_docs
from api_pages import Entry, constant_doc, entries
from glossary import load_glossary

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request, Response

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TELEPHONE = ViewportSize(width=390, height=844)
DESKTOP = ViewportSize(width=1280, height=900)
VIEWS: tuple[tuple[Literal["light", "dark"], ViewportSize], ...] = (("light", DESKTOP), ("dark", TELEPHONE))
HTTP_ERROR = 400
SOUGHT = "gather_for_metrics"
MIN_CONTRAST = 4.5  # of text, in https://www.w3.org/TR/WCAG22/#contrast-minimum
MIN_LIGHT, MAX_DARK = 0.8, 0.2  # relative luminance of a page's background
SHOWN = (
    "index",
    "guides/big_models",
    "guides/fsdp",
    "guides/laptop-to-cluster",
    "reference/api/accel.accelerator",
    "reference/settings",
    "search",
)
INSPECT = """() => {
    const channels = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
    const light = (colour) => channels(colour)
        .map((value) => value / 255)
        .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
    const text = light(getComputedStyle(document.querySelector("article h1")).color);
    const ground = light(getComputedStyle(document.body).backgroundColor);
    return {
        wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
        blank: [...document.images].filter((image) => !image.naturalWidth).map((image) => image.src),
        ground: ground,
        contrast: (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05),
    };
}"""


class Anchors(HTMLParser):
    """The ids of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        """Keep the id of an element."""
        self.found.update(value for name, value in attrs if name == "id" and value)


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""


def main(argv: list[str] | None = None) -> int:
    """Check the site; return 1 if something is wrong with it."""
    parser = argparse.ArgumentParser(description="Build the documentation, and look at it.")
    parser.add_argument("--screenshots", type=Path, help="a folder for pictures of some pages")
    arguments = parser.parse_args(argv)
    drawn_before = {path: path.read_bytes() for path in build_docs.PICTURES.iterdir()}
    if status := build_docs.main([]):
        return status
    wrong = [
        f"{path.name} was not the picture of its package; it is drawn anew: commit it"
        for path, content in drawn_before.items()
        if path.read_bytes() != content
    ]
    wrong += [*names_without_entry(build_docs.OUT), *names_without_docstring(), *awkward_phrases()]
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"not looked at in a browser: none of {', '.join(BROWSERS)} is on the path")
    else:
        wrong += looked_at(build_docs.OUT, browser, arguments.screenshots)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong))


def names_without_entry(site: Path) -> list[str]:
    """Say which public names have no entry in the reference."""
    anchors = {
        page: Anchors(site / "reference" / "api" / f"{page}.html").found
        for page in {entry.page for entry in entries().values()}
    }
    missing = [entry for entry in entries().values() if entry.path not in anchors[entry.page]]
    print(f"{len(entries()) - len(missing)} of {len(entries())} public names have an entry")
    return [f"{entry.path} has no entry on the page of {entry.page}" for entry in missing]


def names_without_docstring() -> list[str]:
    """Say which public names, and public members of public classes, have no docstring."""
    checked = [(path, text) for entry in entries().values() for path, text in documented(entry)]
    missing = [path for path, text in checked if not text]
    print(f"{len(checked) - len(missing)} of {len(checked)} public names and members have a docstring")
    return [f"{path} has no docstring" for path in missing]


def awkward_phrases() -> list[str]:
    """Say where a page has a phrase that tools/glossary.toml refuses in pages."""
    pages = [build_docs.ROOT / "CONTRIBUTING.md", *build_docs.ROOT.glob("packages/*/README.md")]
    pages += [path for path in build_docs.SOURCE.rglob("*.md") if path.name != "changelog.md"]
    words = load_glossary()
    return [
        f"{path.relative_to(build_docs.ROOT)}:{found.line}: {found.found!r}: write {found.instead}"
        for path in pages
        for found in words.find_in_page(path.read_text())
    ]


def documented(entry: Entry) -> list[tuple[str, str | None]]:
    """Return a name and, of a class, its members that are defined here, with their docstrings."""
    value = entry.value
    if not inspect.isclass(value):
        return [(entry.path, inspect.getdoc(value) if inspect.isroutine(value) else constant_doc(entry))]
    members = [
        (name, member)
        for name, member in vars(value).items()
        if not name.startswith("_") and (inspect.isroutine(member) or isinstance(member, property))
    ]
    own = [(entry.path, inspect.getdoc(value))]
    return own + [(f"{entry.path}.{name}", inspect.getdoc(getattr(value, name))) for name, _ in members]


def looked_at(site: Path, browser: str, screenshots: Path | None) -> list[str]:
    """Open every page in a browser, and say what is wrong."""
    started = time.monotonic()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    names = sorted(
        path.relative_to(site).as_posix() for path in site.rglob("*.html") if "_static" not in path.parts
    )
    try:
        with sync_playwright() as playwright:
            sandbox = [] if os.getuid() else ["--no-sandbox"]  # which root cannot have
            chromium = playwright.chromium.launch(executable_path=browser, args=sandbox)
            page = chromium.new_page(viewport=TELEPHONE)
            failures: list[str] = []
            page.on("pageerror", lambda error: failures.append(f"{page.url}: {error}"))
            page.on("requestfailed", lambda request: failures.extend(failure_of(request, page)))
            page.on("response", lambda response: failures.extend(refusal_of(response, page)))
            wrong = searched(page, address)
            for name in names:
                wrong += page_wrong(page, address, name)
            if screenshots:
                photograph(page, address, screenshots)
            chromium.close()
    finally:
        server.shutdown()
    print(f"{len(names)} pages looked at in {browser}, light and dark ({time.monotonic() - started:.1f} s)")
    return wrong + failures


def failure_of(request: Request, page: Page) -> list[str]:
    """Say which request got no answer, but for those that the browser drops when it leaves a page."""
    dropped = request.failure == "net::ERR_ABORTED"
    return [] if dropped else [f"{page.url} misses {request.url}: {request.failure}"]


def refusal_of(response: Response, page: Page) -> list[str]:
    """Say which request was answered with an error."""
    return [f"{page.url} misses {response.url}: {response.status}"] if response.status >= HTTP_ERROR else []


def searched(page: Page, address: str) -> list[str]:
    """Look for a method as a reader would; the first answers must lead to it."""
    page.goto(f"{address}search.html?q={SOUGHT}")
    page.wait_for_selector("ul.search li a", timeout=60_000)
    found = page.eval_on_selector_all("ul.search li a", "links => links.map(link => link.href)")
    if any(str(link).endswith(f"#accel.Accelerator.{SOUGHT}") for link in found):
        return []
    return [f"the search for {SOUGHT} finds {found}"]


def page_wrong(page: Page, address: str, name: str) -> list[str]:
    """Say what is wrong with a page at the width of a telephone, in light and in dark."""
    page.emulate_media(color_scheme="light")
    page.goto(f"{address}{name}")
    if not page.query_selector("article h1"):
        return (
            [] if name in {"search.html", "genindex.html", "py-modindex.html"} else [f"{name} has no title"]
        )
    light = page.evaluate(INSPECT)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(INSPECT)
    wrong = [f"{name} is {light['wide']} pixels wider than a telephone"] if light["wide"] > 0 else []
    wrong += [f"{name} misses the picture {source}" for source in light["blank"]]
    if light["ground"] < MIN_LIGHT or dark["ground"] > MAX_DARK:
        wrong.append(
            f"{name} has a background of {light['ground']:.2f} in light, {dark['ground']:.2f} in dark"
        )
    if (least := min(light["contrast"], dark["contrast"])) < MIN_CONTRAST:
        wrong.append(f"{name} has text with a contrast of {least:.1f} to its background")
    return wrong


def photograph(page: Page, address: str, folder: Path) -> None:
    """Take pictures of some pages: wide and light, narrow and dark."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SHOWN:
        query = f"?q={SOUGHT}" if name == "search" else ""
        for scheme, size in VIEWS:
            page.set_viewport_size(size)
            page.emulate_media(color_scheme=scheme)
            page.goto(f"{address}{name}.html{query}")
            page.wait_for_timeout(500)
            page.screenshot(path=folder / f"{name.replace('/', '-')}-{scheme}.png")


if __name__ == "__main__":
    sys.exit(main())
