"""The pages of the commands have what is printed, and load nothing."""

from __future__ import annotations

import re

from accel_cli.output import Table, write_html


def test_a_page_has_what_is_printed_escaped_and_loads_nothing(tmp_path):
    table = Table(title="ranks", head=("rank", "result"), rows=(("0", "passed"), ("1", "<b>")))
    write_html(str(tmp_path / "check.html"), "accel check a&b.py", [table, "problem: rank 1 calls <b>"])
    page = (tmp_path / "check.html").read_text()
    assert "<h1>accel check a&amp;b.py</h1>" in page
    assert "<caption>ranks</caption>" in page
    assert "<tr><td>1</td><td>&lt;b&gt;</td></tr>" in page
    assert "<p>problem: rank 1 calls &lt;b&gt;</p>" in page
    assert not re.search(r"<(?:script|link|img)", page)
