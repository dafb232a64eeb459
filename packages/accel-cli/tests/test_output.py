from __future__ import annotations

import io

import pytest

from accel_cli.output import Table, as_text, is_rich, show

TABLE = Table(head=("check", "result"), rows=(("gather", "passed"), ("a [b] c", "failed")), title="all")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "environ", "rich"),
    [
        (io.StringIO(), {}, False),
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "dumb"}, False),
    ],
)
def test_output_is_rich_on_a_terminal_that_wants_it(stream, environ, rich):
    assert is_rich(stream, environ) is rich


def test_a_file_gets_plain_columns():
    stream = io.StringIO()
    show("before", TABLE, stream=stream)
    assert stream.getvalue() == "before\nall\ncheck    result\ngather   passed\na [b] c  failed\n"


def test_a_terminal_gets_the_same_cells_with_colours(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    show("a [b] line", TABLE, stream=stream)
    text = stream.getvalue()
    assert "\x1b[" in text
    assert [cell for row in (TABLE.head, *TABLE.rows) for cell in row if cell not in text] == []
    assert "a [b] line" in text


def test_a_long_line_is_left_to_the_terminal_so_that_it_can_be_copied(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    show("accel launch " + "x " * 60, stream=stream)
    assert stream.getvalue().count("\n") == 1


def test_a_table_without_rows_has_its_head():
    assert as_text(Table(head=("a", "b"), rows=())) == "a  b"
