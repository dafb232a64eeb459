"""Write the reference page of settings from the table that declares them.

uv run tools/gen_settings_page.py            write
uv run tools/gen_settings_page.py --check    fail if that would change the page
"""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from accel_state.settings.model import Settings
from accel_state.settings import OPTIONS, Option

PAGE = Path(__file__).resolve().parents[1] / "packages/accel-suite/docs/reference/settings.md"
HEAD = """\
# Settings

Written by tools/gen_settings_page.py from `accel_state.settings.options`. A flag wins over the environment,
the environment over the config file, the file over the default.
"""


def main(argv: list[str] | None = None) -> int:
    """Write or check the page; return 1 if `--check` finds it out of date."""
    parser = argparse.ArgumentParser(description="Write the reference page of settings.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page would change")
    wanted = page()
    if parser.parse_args(argv).check:
        if PAGE.exists() and PAGE.read_text() == wanted:
            return 0
        print(f"{PAGE} is out of date: run `uv run tools/gen_settings_page.py`")
        return 1
    PAGE.write_text(wanted)
    return 0


def page() -> str:
    """The text of the page: a section of the table for each section of `Settings`."""
    parts = [HEAD]
    for section, options in groupby(sorted(OPTIONS, key=section_of), key=section_of):
        parts.append(f"## {section}\n")
        parts += [entry(option) for option in options]
    return "\n".join(parts)


def section_of(option: Option) -> str:
    """The section of `Settings` that holds an option."""
    return option.path.partition(".")[0]


def entry(option: Option) -> str:
    """The lines about one option."""
    default = attrgetter(option.path)(Settings())
    ways = [
        *(f"flag `{flag}`" for flag in option.flags),
        *([f"variable `{option.variable}`"] if option.variable else []),
        *([f"file key `{option.key}`"] if option.key else []),
    ]
    choices = f" One of {', '.join(f'`{choice}`' for choice in option.choices)}." if option.choices else ""
    said = "none" if default is None else f"`{default}`"
    return f"- `{option.path}`: {option.help}{choices} Default: {said}.\n  {'; '.join(ways)}.\n"


if __name__ == "__main__":
    sys.exit(main())
