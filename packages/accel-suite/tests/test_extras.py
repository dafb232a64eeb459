"""Messages that say what to install."""

from __future__ import annotations

import re
from importlib.metadata import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = (
    "bigmodel", "cli", "convert", "inspect", "ops", "plugins", "quant", "state", "trackers", "train",
)  # fmt: skip


@pytest.mark.parametrize("package", PACKAGES)
def test_every_extra_that_a_message_names_exists(package):
    spec = find_spec(f"accel_{package}")
    assert spec is not None
    assert spec.origin is not None
    texts = (path.read_text() for path in Path(spec.origin).parent.rglob("*.py"))
    named = {match for text in texts for match in re.findall(r"(accel-[a-z]+)\[([a-z_]+)\]", text)}
    assert [
        pair for pair in sorted(named) if pair[1] not in (metadata(pair[0]).get_all("Provides-Extra") or ())
    ] == []
