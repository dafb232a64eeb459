"""Build a wheel of the distribution `accelerate` that is accel, for environments that must resolve it.

    uv run tools/build_accelerate_alias.py --out dist

The wheel has the version of Accelerate whose interface accel has, requires exactly this version of
accel-compat; its one module makes `import accelerate` resolve to accel, and its commands (`accelerate launch`
and so on) are those of accel. It is for private indexes, `find-links` and overrides; it is never published:
the name belongs to Accelerate's authors.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import accel
from accel_compat.alias import REFERENCE, AliasDistribution, version_of_accel

MODULE = '''\
"""accel, under the name of the library whose interface it has."""

import sys
from importlib import import_module

import accel_compat

del sys.modules[__name__]
accel_compat.install()
sys.modules[__name__] = import_module(__name__)
'''

WHEEL = "Wheel-Version: 1.0\nGenerator: accel\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def main(argv: list[str] | None = None) -> int:
    """Build the wheel; print where it is."""
    parser = argparse.ArgumentParser(description="Build a wheel called accelerate that is accel.")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="the folder (default: dist)")
    arguments = parser.parse_args(argv)
    print(build(arguments.out))
    return 0


def build(folder: Path) -> Path:
    """Build the wheel in a folder; return its path."""
    metadata: Any = AliasDistribution().metadata
    metadata["Requires-Dist"] = f"accel-compat=={version_of_accel()}"
    metadata["Requires-Python"] = ">=3.11"
    name = f"{metadata['Name']}-{metadata['Version']}"
    info = f"{name}.dist-info"
    files = {
        f"{REFERENCE}/__init__.py": MODULE,
        f"{REFERENCE}/py.typed": "",
        **stubs(),
        f"{info}/METADATA": str(metadata),
        f"{info}/WHEEL": WHEEL,
        f"{info}/entry_points.txt": commands(),
    }
    record = "".join(f"{path},{digest(text)},{len(text.encode())}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)  # without a date: the same bytes each time
    return wheel


def stubs() -> dict[str, str]:
    """The stubs of `accelerate`, by path: what accel's modules export."""
    folder = Path(accel.__file__).parent
    texts: dict[str, str] = {f"{REFERENCE}/commands/__init__.pyi": ""}
    for path in sorted(folder.rglob("*.pyi")):
        relative = path.relative_to(folder)
        own = (
            path.read_text()
            .replace("from accel.", f"from {REFERENCE}.")
            .replace("from accel ", f"from {REFERENCE} ")
        )
        texts[f"{REFERENCE}/{relative.as_posix()}"] = own
    return texts


def commands() -> str:
    """The commands of accel as entry points, `accelerate` in place of `accel` in their names."""
    found = (distribution(name).entry_points for name in ("accel-cli", "accel-inspect"))
    ours = [point for points in found for point in points.select(group="console_scripts")]
    lines = sorted(f"{our.name.replace('accel', REFERENCE, 1)} = {our.value}\n" for our in ours)
    return "".join(["[console_scripts]\n", *lines])


def digest(text: str) -> str:
    """What RECORD says of a file."""
    found = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(found).rstrip(b"=").decode()


if __name__ == "__main__":
    sys.exit(main())
