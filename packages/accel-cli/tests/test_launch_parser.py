"""`accel launch` and the other commands within another program's command line."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace

import pytest

from accel_cli import programs
from accel_cli.arguments import FLAGS, read_arguments
from accel_cli.programs import (
    _validate_launch_command,
    attribute_of,
    env_command,
    launch_command,
    launch_command_parser,
    merge_command,
    parse_namespace,
)
from accel_state.errors import SettingsError

WORDS = {"word": "1", "list": "a=1", "table": '{"a": 1}'}


def value_for(option):
    return option.choices[-1] if option.choices else WORDS[option.kind]


def lines():
    for flag, row in FLAGS.items():
        yield [flag] if row.const is not None else [flag, value_for(row.option)]


@pytest.mark.parametrize("line", [*lines()], ids=lambda line: line[0])
def test_a_flag_means_what_it_means_to_the_command(line):
    try:
        meant = read_arguments([*line, "train.py"]).sourced
    except SettingsError:
        pytest.skip("the value is none for this flag")
    args = launch_command_parser().parse_args([*line, "train.py"])
    found = parse_namespace(vars(args))
    assert {path: one.value for path, one in found.items()} == {
        path: one.value for path, one in meant.items()
    }
    assert attribute_of(next(flag for flag in (line[0], *_long(line[0])) if flag.startswith("--"))) in vars(
        args
    )


def _long(flag):
    row = FLAGS[flag]
    return row.option.flags


def test_flags_and_script_are_separated():
    parser = launch_command_parser()
    args = parser.parse_args(["--num-processes", "2", "--cpu", "train.py", "--num_processes", "3", "-x"])
    assert (args.num_processes, args.cpu, args.mixed_precision) == (2, True, None)
    assert (args.training_script, args.training_script_args) == ("train.py", ["--num_processes", "3", "-x"])
    with pytest.raises(SystemExit):
        parser.parse_args(["--num_processes", "some", "train.py"])


def test_the_command_runs_a_script_and_ends_with_its_exit_code(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint(os.environ['ACCELERATE_MIXED_PRECISION'])\nsys.exit(int(sys.argv[1]))"
    )
    args = launch_command_parser().parse_args(["--cpu", "--mixed_precision", "bf16", str(script), "0"])
    launch_command(args)
    assert capfd.readouterr().out == "bf16\n"
    args.training_script_args = ["3"]
    with pytest.raises(SystemExit) as ended:
        launch_command(args)
    assert ended.value.code == 3
    with pytest.raises(SettingsError, match="no script"):
        launch_command(Namespace(cpu=True, training_script=str(tmp_path / "none.py")))


def test_validation_decides_what_file_and_flags_say(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("mixed_precision: bf16\nuse_cpu: true\nnum_processes: 2\ndistributed_type: MULTI_CPU\n")
    parser = launch_command_parser()
    args = parser.parse_args(["--config_file", str(config), "train.py"])
    decided, found, by_file = _validate_launch_command(args)
    assert (decided.num_processes, decided.mixed_precision, by_file) == (2, "bf16", True)
    assert found.to_dict()["num_processes"] == 2
    assert args.num_processes is None


COMMANDS = {
    "config": "get_config_parser",
    "env": "env_command_parser",
    "estimate-memory": "estimate_command_parser",
    "merge-weights": "merge_command_parser",
    "test": "test_command_parser",
    "to-fsdp2": "to_fsdp2_command_parser",
    "tpu-config": "tpu_command_parser",
}


def test_every_command_can_be_that_of_another_program():
    parser = ArgumentParser("mine")
    subparsers = parser.add_subparsers(required=True)
    for make in (*(getattr(programs, name) for name in COMMANDS.values()), launch_command_parser):
        make(subparsers)
    args = parser.parse_args(["env", "--json"])
    assert (args.func, args.json) == (env_command, True)
    assert parser.parse_args(["launch", "--cpu", "train.py"]).func is launch_command
    for name in COMMANDS.values():
        assert getattr(programs, name)().prog.startswith("accel ")


def test_a_command_takes_the_namespace_of_another_parser(tmp_path):
    with pytest.raises(SettingsError, match="does not exist"):
        merge_command(Namespace(checkpoint_directory=str(tmp_path / "none"), output_path=str(tmp_path)))


def test_the_parser_imports_no_torch():
    program = "import sys, accel_cli.programs as p; p.launch_command_parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_help_shows_each_flag_in_one_spelling():
    text = launch_command_parser().format_help()
    assert "--num_processes" in text
    assert "--num-processes" not in text
    assert "--config-file" not in text
