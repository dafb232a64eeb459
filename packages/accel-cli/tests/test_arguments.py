"""The grammar of the command line."""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_cli import arguments
from accel_cli.arguments import FLAGS, Parser, count, launch, read_arguments
from accel_cli.main import COMMANDS
from accel_state.errors import AccelError, SettingsError
from accel_state.settings import OPTIONS, Layer


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


def test_every_parser_has_the_name_of_its_command_and_help_for_every_flag():
    for name, command in COMMANDS.items():
        if command.parser is not None:
            parser = command.make_parser()
            assert parser.prog == f"accel {name}"
            assert [
                action.dest for action in parser.actions if action.option_strings and not action.help
            ] == []


PARSED = sorted(COMMANDS)


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


def values(*line):
    return {path: one.value for path, one in read_arguments(line).settings.items()}


def test_flags_are_read_up_to_the_script_and_the_rest_is_the_scripts():
    read = read_arguments(
        ["--cpu", "--num_processes", "2", "train.py", "--cpu", "--help", "--num_processes", "x"]
    )
    assert {path: one.value for path, one in read.settings.items()} == {
        "process.use_cpu": True,
        "launch.num_processes": 2,
    }
    assert read.script == "train.py"
    assert read.script_arguments == ["--cpu", "--help", "--num_processes", "x"]


@given(st.lists(st.text()))
def test_whatever_follows_the_script_is_handed_over_untouched(rest):
    assert read_arguments(["--num_machines=1", "train.py", *rest]).script_arguments == rest


@pytest.mark.parametrize(
    "line",
    [
        ["--num_processes", "2"],
        ["--num-processes", "2"],
        ["--num_processes=2"],
        ["--num-processes=2"],
        ["--num_processes", "1", "--num-processes", "2"],
    ],
)
def test_a_flag_is_spelled_with_dashes_or_underscores_its_value_follows_or_is_joined(line):
    assert values(*line, "train.py") == {"launch.num_processes": 2}


@pytest.mark.parametrize("line", [["-t", "3"], ["-t3"], ["--tee", "3"], ["--tee=3"]])
def test_a_short_flag_takes_its_value_joined_or_not(line):
    assert values(*line, "train.py") == {"launch.tee": "3"}


def test_two_dashes_end_the_flags():
    read = read_arguments(["--cpu", "--", "--odd-name.py", "--cpu"])
    assert (read.script, read.script_arguments) == ("--odd-name.py", ["--cpu"])


def test_a_switch_of_a_file_can_be_turned_off():
    assert values("--no_cpu", "--no-debug", "train.py") == {"process.use_cpu": False, "process.debug": False}


def test_every_value_remembers_the_argument_that_gave_it():
    given_value = read_arguments(["--mixed-precision", "bf16", "train.py"]).settings[
        "precision.mixed_precision"
    ]
    assert (given_value.layer, given_value.origin) == (Layer.ARGUMENT, "argument --mixed-precision")


def test_the_config_file_is_no_setting():
    read = read_arguments(["--config_file", "run.yaml", "train.py"])
    assert (read.config_file, dict(read.settings)) == ("run.yaml", {})


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (["--num_proceses", "2", "train.py"], ["--num_proceses", "did you mean --num_processes?"]),
        (["--num-proceses", "2", "train.py"], ["--num-proceses", "did you mean --num_processes?"]),
        (["--epochs", "2", "train.py"], ["--epochs", "after its name"]),
        (["-x", "train.py"], ["-x"]),
        (["--num_processes", "two", "train.py"], ["argument --num_processes", "'two'", "whole number"]),
        (["--mixed_precision", "bf61", "train.py"], ["--mixed_precision", "'bf61'", "'bf16'"]),
        (["--cpu=yes", "train.py"], ["--cpu", "ignored explicit argument", "'yes'"]),
        (["--num_processes"], ["--num_processes", "expected one argument"]),
        (["--cpu"], ["no script", "usage: accel launch"]),
        ([], ["no script"]),
    ],
)
def test_a_line_that_cannot_be_read_says_what_is_wrong(line, parts):
    with pytest.raises(SettingsError) as caught:
        read_arguments(line)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_all_mistakes_of_a_line_are_reported_at_once():
    with pytest.raises(SettingsError) as caught:
        read_arguments(["--num_proceses", "2", "--num_machines", "x", "--quite", "--debug", "train.py"])
    assert {problem.split()[1] for problem in caught.value.problems} == {
        "--num_proceses", "--num_machines", "--quite",
    }  # fmt: skip


def test_after_a_flag_that_resembles_none_nothing_is_guessed():
    with pytest.raises(SettingsError) as caught:
        read_arguments(["--num_machines", "x", "--epochs", "3", "--num_processes", "y", "train.py"])
    assert {problem.split()[1] for problem in caught.value.problems} == {"--num_machines", "--epochs"}


def test_flags_that_may_be_repeated_add_up():
    assert values("--vm", "a", "--env", "A=1", "--vm=b", "train.py") == {
        "tpu.vm": ("a", "b"),
        "tpu.env": ("A=1",),
    }


@pytest.mark.parametrize(
    ("flag", "path", "value"),
    [
        ("--multi_gpu", "launch.distributed_type", "MULTI_GPU"),
        ("--tpu", "launch.distributed_type", "XLA"),
        ("--use_fsdp", "fsdp", True),
        ("--no_use_fsdp", "fsdp", False),
        ("--no_tpu_cluster", "tpu.use_cluster", False),
    ],
)
def test_a_flag_without_a_value_stands_for_one(flag, path, value):
    assert values(flag, "train.py") == {path: value}


def test_an_explanation_is_asked_for_before_the_script():
    assert read_arguments(["--explain", "train.py"]).explain
    assert not read_arguments(["train.py", "--explain"]).explain


@given(st.lists(st.sampled_from([*FLAGS, "2", "bf16", "train.py", "-x", "--x=", "--", "-", ""])))
def test_any_line_is_read_or_refused_with_a_sentence(line):
    with contextlib.suppress(AccelError):
        read = read_arguments(line)
        assert read.script is not None
        assert [read.script, *read.script_arguments] == line[len(line) - len(read.script_arguments) - 1 :]


@pytest.mark.parametrize("line", [["--help"], ["-h"], ["--cpu", "--help", "train.py"]])
def test_help_is_asked_for_before_the_script(line):
    with pytest.raises(SystemExit) as leaving:
        read_arguments(line)
    assert leaving.value.code in (None, 0)


def test_help_tells_every_flag_its_variable_and_its_key():
    text = " ".join(launch().format_help().split())
    for option in OPTIONS:
        if option.flags:
            assert all(flag in text for flag in option.flags)
            assert all(place in text for place in (option.variable, option.key) if place)
    assert arguments.USAGE in text
