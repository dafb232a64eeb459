"""Tables and spinners on terminals and in pipes; secrets are redacted."""

from __future__ import annotations

import io
import json

import pytest

from accel_cli.commands import env
from accel_cli.output import REDACTED, Table, as_text, is_rich, redact, show, working

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


def test_a_terminal_shows_what_takes_time_until_it_is_done(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    errors, output = Terminal(), Terminal()
    monkeypatch.setattr("sys.stderr", errors)
    monkeypatch.setattr("sys.stdout", output)
    with working("merging [weights]"):
        show("a result")
        assert "merging [weights] …" in errors.getvalue()
    assert errors.getvalue().endswith("\x1b[2K")  # the line is empty again
    assert "merging" not in output.getvalue()


def test_what_is_wider_than_the_terminal_takes_one_line(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    errors = Terminal()
    monkeypatch.setattr("sys.stderr", errors)
    with working("reading " + "long/" * 20):
        pass
    assert "\x1b[1A\x1b[2K\x1b[1A" not in errors.getvalue()  # never two lines up
    assert "reading long/" in errors.getvalue()


def test_a_file_and_a_pipe_show_nothing_of_it(capsys):
    with working("merging"):
        pass
    assert capsys.readouterr() == ("", "")


HUB = "hf_" + "a1B2" * 8
AMAZON = "AKIA" + "ABCD1234" * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "plain"),
        ("wandb.api-key", "plain"),
        ("AWS_SECRET_ACCESS_KEY", "plain"),
        ("launch.aws_access_key_id", "plain"),
        ("note", HUB),
        ("note", f"export X={AMAZON}; run"),
        ("tpu_env", ["A=1", "HF_TOKEN=plain"]),
        ("nested", {"inner": {"password": "plain"}}),
        ("proxy", "https://ada:plain@host:1/path"),
        ("command", "curl --token: plain"),
        ("text", "{'WANDB_API_KEY': 'plain'}"),
        ("text", '{"password": "plain"}'),
    ],
)
def test_a_secret_is_not_shown_whether_its_name_or_its_form_tells(name, value):
    shown = json.dumps(redact(name, value))
    assert REDACTED in shown
    assert [secret for secret in ("plain", HUB, AMAZON) if secret in shown] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("MASTER_ADDR", "10.0.0.1"),
        ("HF_HOME", "/data/hf"),
        ("fsdp.transformer_layer_cls_to_wrap", "KeyedLayer"),
        ("number", 3),
        ("empty_token", ""),
        ("NCCL_DEBUG", "INFO"),
    ],
)
def test_what_is_no_secret_is_shown_as_it_is(name, value):
    assert redact(name, value) == value


def test_the_report_shows_the_variables_that_matter_without_their_secrets(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("debug: true\n")
    environ = {
        "HF_TOKEN": "plain", "ACCELERATE_LOG_LEVEL": HUB, "NCCL_DEBUG": "INFO", "HF_HOME": str(tmp_path),
        "WANDB_API_KEY": "plain", "PATH": "", "HOME": "/home/ada",
    }  # fmt: skip
    facts = env.report(environ, str(config), {})
    assert facts["variables"] == {
        "ACCELERATE_LOG_LEVEL": REDACTED, "HF_HOME": str(tmp_path), "HF_TOKEN": REDACTED,
        "NCCL_DEBUG": "INFO",
    }  # fmt: skip
    for text in (json.dumps(facts), env.as_text(facts)):
        assert [secret for secret in ("plain", HUB) if secret in text] == []
