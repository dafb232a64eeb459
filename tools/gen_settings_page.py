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

Written by tools/gen_settings_page.py from `accel_state.settings.model`. A flag wins over the environment,
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
    """The text of the page: a section for each topic."""
    parts = [HEAD]
    topics = list(dict.fromkeys(option.topic for option in OPTIONS))
    for topic in topics:
        parts.append(f"## {topic[0].upper()}{topic[1:]}\n")
        parts += [entry(option) for option in OPTIONS if option.topic == topic]
    return "\n".join(parts)


def entry(option: Option) -> str:
    """The lines about one option."""
    default = value_at(Settings(), option.path)
    ways = [
        *(f"flag `{flag}`" for flag in option.flags),
        *(f"flag `{flag}` (for `{const}`)" for flag, const in option.flag_aliases),
        *([f"variable `{option.variable}`"] if option.variable else []),
        *([f"file key `{option.key}`"] if option.key else []),
    ]
    choices = f" One of {', '.join(f'`{choice}`' for choice in option.choices)}." if option.choices else ""
    default_text = "none" if default in (None, ()) else f"`{default}`"
    handed = f" `accel launch` hands over `{option.launch_default}`." if option.launch_default else ""
    asked = "" if option.skip_reason is None else f" Not asked by `accel config`: {lower(option.skip_reason)}"
    text = f"- `{option.path}`: {option.help}{choices} Default: {default_text}.{handed}{asked}"
    return f"{text}\n  {'; '.join(ways)}.\n"


def lower(sentence: str) -> str:
    """A sentence with a small letter at its beginning."""
    return sentence[0].lower() + sentence[1:]


if __name__ == "__main__":
    sys.exit(main())
