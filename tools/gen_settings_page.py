"""Write the reference page of settings from the table that declares them.

uv run tools/gen_settings_page.py            write
uv run tools/gen_settings_page.py --check    fail if that would change the page
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from accel_state.settings import OPTIONS, Option
from accel_state.settings.model import Settings, value_at

PAGE = Path(__file__).resolve().parents[1] / "packages/accel-suite/docs/reference/settings.md"
HEAD = """\
# Settings

Every setting has a path, which `accel env` and `accel launch --explain` show, and up to three ways to set
it: a flag of `accel launch`, an environment variable, and a key of the config file. A flag overrides the
variable, the variable overrides the file, and the file overrides the default.
[Configuring](../guides/configuring.md) explains the file.
"""
ROW = "| {} | {} | {} | {} |"


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
    """The text of the page: a section for each topic."""
    parts = [HEAD]
    topics = list(dict.fromkeys(option.topic for option in OPTIONS))
    for topic in topics:
        rows = [row(option) for option in OPTIONS if option.topic == topic]
        table = [ROW.format("setting", "meaning", "default", "set by"), ROW.format(*["---"] * 4), *rows]
        parts.append(f"## {topic[0].upper()}{topic[1:]}\n\n" + "\n".join(table) + "\n")
    return "\n".join(parts)


def row(option: Option) -> str:
    """Return the row of one setting."""
    ways = [
        *(f"`{flag}`" for flag in option.flags),
        *(f"`{flag}` (`{const}`)" for flag, const in option.flag_aliases),
        *([f"variable `{option.variable}`"] if option.variable else []),
        *([f"key `{option.key}`"] if option.key else []),
    ]
    choices = f" One of {', '.join(f'`{choice}`' for choice in option.choices)}." if option.choices else ""
    return ROW.format(f"`{option.path}`", f"{option.help}{choices}", default_of(option), "<br>".join(ways))


def default_of(option: Option) -> str:
    """Return the default; of a setting that has none but is set by `accel launch`, what that sets."""
    if option.launch_default:
        return f"`{option.launch_default}`"
    default = value_at(Settings(), option.path)
    return "" if default in (None, ()) else f"`{default}`"


if __name__ == "__main__":
    sys.exit(main())
