from __future__ import annotations

import contextlib
import io
from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.arguments import Parser, count
from accel_cli.main import COMMANDS
from accel_state.errors import SettingsError


@pytest.fixture
def parser():
    made = Parser("greet", "Greet.")
    made.add_argument("--first_name")
    made.add_argument("--how_often", type=count)
    made.add_argument("--in_haste", action="store_true")
    return made


@pytest.mark.parametrize(
    "words",
    [
        ["--first-name", "a-b"],
        ["--first_name=a-b"],
        ["--first-name=a-b"],
        ["--in-haste", "--first_name", "a-b"],
    ],
)
def test_a_flag_may_be_written_with_dashes_and_its_value_stays_as_it_is(parser, words):
    assert parser.read(words).first_name == "a-b"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--frist-name", "x"], ["--frist-name", "did you mean --first_name?"]),
        (["--how_often", "no"], ["--how_often", "'no'", "whole number"]),
        (["--how_often", "0"], ["at least 1"]),
        (["--first_name"], ["--first_name"]),
        (["--firs", "x"], ["--firs"]),
        (["--firs", "x", "--in_hast"], ["- argument --firs is", "- argument --in_hast is", "--in_haste?"]),
    ],
)
def test_a_mistake_is_answered_with_the_flag_and_the_way_out(parser, words, parts):
    with pytest.raises(SettingsError) as caught:
        parser.read(words)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_what_follows_a_script_is_left_alone():
    options = (
        COMMANDS["check"]
        .make_parser()
        .read(
            [
                "--world",
                "8",
                "--devices-per-machine",
                "4",
                "train.py",
                "--devices-per-machine",
                "--lr-max=1",
                "x-y",
            ]
        )
    )
    assert (options.world, options.devices_per_machine, options.script) == (8, 4, "train.py")
    assert options.script_arguments == ["--devices-per-machine", "--lr-max=1", "x-y"]


def test_every_parser_has_the_name_of_its_command_and_help_for_every_flag():
    for name, command in COMMANDS.items():
        if command.parser is not None:
            parser = command.make_parser()
            assert parser.prog == f"accel {name}"
            assert [
                action.dest for action in parser.actions if action.option_strings and not action.help
            ] == []


PARSED = sorted(name for name, command in COMMANDS.items() if command.parser is not None)


@st.composite
def lines(draw):
    """A command that has a parser, and words of which some are its flags."""
    name = draw(st.sampled_from(PARSED))
    flags = [flag for action in COMMANDS[name].make_parser().actions for flag in action.option_strings]
    spelled = st.sampled_from(flags).map(lambda flag: flag.replace("_", "-"))
    words = st.one_of(
        st.sampled_from(flags),
        spelled,
        st.text(max_size=8),
        st.sampled_from(("1", "-1", "--", "=", "--=", "bf16")),
    )
    return name, draw(st.lists(words, max_size=6))


def outcome(name, words):
    """What becomes of a command line: options, a sentence, or an exit code."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            return COMMANDS[name].make_parser().read(words)
        except SettingsError as error:
            return str(error)
        except SystemExit as leaving:
            return leaving.code


@given(lines())
def test_random_words_are_read_or_refused_with_a_sentence_or_ask_for_help(line):
    found = outcome(*line)
    assert isinstance(found, Namespace) or found == 0 or (isinstance(found, str) and len(found) > 10)


def test_a_check_reads_the_settings_of_a_launch():
    words = [
        "--use-fsdp",
        "--fsdp_version=2",
        "--num_processes",
        "4",
        "--no_cpu",
        "train.py",
        "--fsdp_version",
        "1",
    ]
    options = COMMANDS["check"].make_parser().read(words)
    assert {path: (given.value, given.origin) for path, given in options.settings.items()} == {
        "fsdp": (True, "argument --use-fsdp"),
        "fsdp.fsdp_version": (2, "argument --fsdp_version"),
        "launch.num_processes": (4, "argument --num_processes"),
        "process.use_cpu": (False, "argument --no_cpu"),
    }
    assert (options.world, options.script, options.script_arguments) == (
        None,
        "train.py",
        ["--fsdp_version", "1"],
    )
