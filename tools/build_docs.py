"""Build the documentation; warnings and broken references are errors.

    uv run python tools/build_docs.py [--online] [--fresh] [--out build/docs/html]

`--online` also links to the documentation of Python, NumPy and PyTorch, whose indexes it downloads.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "packages" / "accel-suite" / "docs"
OUT = ROOT / "build" / "docs" / "html"


def main(argv: list[str] | None = None) -> int:
    """Build the site and say what came of it; return Sphinx's exit status."""
    parser = argparse.ArgumentParser(description="Build the documentation.")
    parser.add_argument("--online", action="store_true", help="link to the documentation of other libraries")
    parser.add_argument(
        "--fresh", action="store_true", help="read every page, also those that did not change"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="the folder of the site")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out.resolve()
    options = ["--builder", "html", "--nitpicky", "--fail-on-warning", "--keep-going", "--quiet"]
    options += ["--fresh-env", "--write-all"] * arguments.fresh + ["-D", "online=1"] * arguments.online
    command = [sys.executable, "-m", "sphinx", *options, "-d", str(out.with_name("doctrees"))]
    started = time.monotonic()
    done = subprocess.run([*command, str(SOURCE), str(out)], cwd=ROOT, check=False)
    if done.returncode == 0:
        pages = sum(1 for _ in out.rglob("*.html"))
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 2**20
        print(f"{pages} pages, {size:.1f} MiB, {time.monotonic() - started:.1f} s: {out / 'index.html'}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
