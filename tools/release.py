"""Prepare a release: set the version of all packages, date the changelog, and say what to push.

uv run tools/release.py 0.2.0             # changes files; commits nothing
uv run tools/release.py --check v0.2.0    # whether a tag is the version of the tree (the release workflow)
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tomllib
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNRELEASED = "not released yet"


def current_version(root: Path) -> str:
    """Return the version of the workspace."""
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]


def set_version(root: Path, version: str, today: str) -> None:
    """Set the version in every pyproject.toml, CITATION.cff and `accel`; date its section of the changelog.

    Raises:
        SystemExit: The changelog has no section of this version that is not released yet.
    """
    old = current_version(root)
    changelog = root / "CHANGELOG.md"
    heading = f"## {version}, {UNRELEASED}"
    text = changelog.read_text()
    if heading not in text:
        raise SystemExit(f"CHANGELOG.md has no line {heading!r}: describe the release there first.")
    changelog.write_text(text.replace(heading, f"## {version}, {today}"))
    module = root / "packages/accel-suite/src/accel/__init__.py"
    for path in [root / "pyproject.toml", module, *sorted(root.glob("packages/*/pyproject.toml"))]:
        text = path.read_text()
        own = rf'^(version|__accel_version__) = "{re.escape(old)}"$'
        text = re.sub(own, rf'\g<1> = "{version}"', text, flags=re.MULTILINE)
        text = re.sub(rf'("accel-[\w\[\]-]+)=={re.escape(old)}"', rf'\g<1>=={version}"', text)
        path.write_text(text)
    citation = root / "CITATION.cff"
    citation.write_text(citation.read_text().replace(f"\nversion: {old}\n", f"\nversion: {version}\n"))


def main() -> int:
    """Prepare or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", help="such as 0.2.0; with --check, a tag such as v0.2.0")
    parser.add_argument(
        "--check", action="store_true", help="only compare a tag with the version of the tree"
    )
    arguments = parser.parse_args()
    version: str = arguments.version
    if arguments.check:
        heading = f"## {current_version(ROOT)}, {UNRELEASED}"
        if version != f"v{current_version(ROOT)}" or heading in (ROOT / "CHANGELOG.md").read_text():
            print(f"{version}: the tree has {current_version(ROOT)}; run tools/release.py, commit, then tag.")
            return 1
        return 0
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        parser.error(f"{version!r} is not a version such as 0.2.0 or 0.2.0rc1")
    set_version(ROOT, version, datetime.now(UTC).date().isoformat())
    subprocess.run(["uv", "lock", "--quiet"], cwd=ROOT, check=True)
    print(f"Now: git commit -am 'Release {version}' && git tag v{version} && git push origin main v{version}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
