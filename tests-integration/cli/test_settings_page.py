"""Every setting is in the reference page of the documentation, with every way to give it."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_state.settings import OPTIONS

PAGE = Path(__file__).resolve().parents[2] / "packages/accel-suite/docs/reference/settings.md"
ENTRIES = {line.split("`")[1]: line for line in PAGE.read_text().splitlines() if line.startswith("| `")}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.path)
def test_the_page_of_settings_has_every_way_to_give_one(option):
    entry = ENTRIES[option.path]
    ways = [*option.flags, *(flag for flag, _ in option.flag_aliases), option.variable, option.key]
    assert [way for way in ways if way and f"`{way}`" not in entry] == []
    assert option.help in entry
    assert entry.count("|") == 5


def test_the_page_of_settings_has_nothing_else():
    assert [*ENTRIES] == [option.path for option in sorted_by_topic()]


def sorted_by_topic():
    topics = list(dict.fromkeys(option.topic for option in OPTIONS))
    return sorted(OPTIONS, key=lambda option: topics.index(option.topic))
