"""Install the example distribution into a folder, as an installer does: its modules and its metadata."""

from __future__ import annotations

import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

EXAMPLE = Path(__file__).parent / "example"


def install(folder: Path) -> Path:
    """Write the metadata that a wheel of the example would have, and link its modules; return the folder."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), "")
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (folder / "accel_example").symlink_to(EXAMPLE / "accel_example")
    return folder


@contextmanager
def installed(folder: Path) -> Generator[None]:
    """A block in which this process finds the distribution in a folder that `install` has written."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [*sys.modules]:
            if name.partition(".")[0] == "accel_example":
                del sys.modules[name]
