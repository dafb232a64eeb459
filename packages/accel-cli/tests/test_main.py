from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import accel_cli
from accel_cli import config_file as file
from accel_cli.arguments import FLAGS
from accel_cli.launch import command
from accel_cli.main import COMMANDS, main
from accel_state import platforms
from accel_state.errors import SettingsError


def test_the_overview_names_every_command(capsys):
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in overview] == []
    assert main([]) == 0
    assert capsys.readouterr().out == overview

    assert accel_cli.COMMANDS is COMMANDS


def test_the_version_is_reported(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"accel {version('accel-cli')}\n"


def test_every_command_of_the_table_exists_and_has_help(capsys):
    for name in COMMANDS:
        try:
            code = main([name, "--help"])
        except SystemExit as leaving:
            code = leaving.code
        assert code == 0
        assert f"usage: accel {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (["lanch"], ["'lanch'", "did you mean 'launch'?"]),
        (["zzz"], ["'zzz'", "launch"]),
        (["config"], ["accel config: error:", "needs a terminal", "accel config default"]),
        (["config", "--mixed_precision", "bf16"], ["--mixed_precision", "accel config default"]),
        (["launch", "--num_proceses", "2", "x.py"], ["accel launch: error:", "--num_processes"]),
        (["launch", "--fsdp_version", "2", "x.py"], ["argument --fsdp_version is about FSDP", "--use_fsdp"]),
        (["launch", "--config_file", "/nowhere.yaml", "x.py"], ["'/nowhere.yaml'", "No such file"]),
    ],
)
def test_what_cannot_be_done_ends_with_one_sentence_and_code_2(line, parts, capsys):
    assert main(line) == 2
    message = capsys.readouterr().err
    assert [part for part in parts if part not in message] == []
    assert message.count("\n") == 1


pieces = st.sampled_from(
    ["num_processes", "fsdp_config", "distributed_type", ": ", "- ", "\n", "  ", "FSDP", "2", "{", "}", "[",
     "&a ", "*a", "!!python/object:os.system ", "2001-99-99", "? ", "|", "yes", "0x", "1e999", "~", "\t", "%",
     "<<: "]
)  # fmt: skip
files = (
    st.lists(pieces, max_size=12).map("".join).map(str.encode)
    | st.binary(max_size=40)
    | st.text().map(str.encode)
)
flags = st.lists(
    st.sampled_from([*FLAGS, "2", "bf16", "x.py"]) | st.text(st.characters(exclude_characters="\\0")),
    max_size=5,
)


@given(files, flags, st.sampled_from([".yaml", ".json", ""]))
@example(b"", ["--tpu", ""], ".yaml")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_and_any_flags_end_in_an_explanation_or_a_sentence_and_code_2(
    tmp_path, capsys, file, line, suffix
):
    path = tmp_path / f"run{suffix}"
    path.write_bytes(file)
    code = main(["launch", "--config_file", str(path), "--explain", *line, "x.py"])
    told = capsys.readouterr()
    assert code == (2 if told.err else 0)
    assert told.err == "" or told.err.startswith("accel launch: error: ")


@pytest.mark.parametrize("line", [["--help"], ["launch", "--help"], ["env", "--help"], ["config", "--help"]])
def test_help_does_not_import_torch(line):
    code = (
        f"import sys; from accel_cli.main import main\ntry: main({line!r})\nexcept SystemExit: pass\n"
        "sys.exit(len({'torch', 'numpy', 'yaml'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


class BecameError(Exception):
    pass


@pytest.fixture
def became(monkeypatch, tmp_path):
    """Record what the command would become."""
    seen = []

    def execve(program, line, environ):
        seen.append((line, environ))
        raise BecameError

    monkeypatch.setattr(command.os, "execve", execve)
    monkeypatch.setattr(command, "read", lambda: {"HF_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""})
    monkeypatch.setattr(platforms, "SYSTEM", "linux")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return seen


def test_an_interrupt_ends_any_command_without_a_traceback(monkeypatch):
    def interrupt(words):
        raise KeyboardInterrupt

    monkeypatch.setattr("accel_cli.launch.command.run", interrupt)
    assert main(["launch", "train.py"]) == 130


def test_launching_one_process_imports_no_torch_and_becomes_the_script(became):
    with pytest.raises(BecameError):
        main(["launch", "--mixed_precision", "bf16", "train.py", "--lr", "1"])
    line, environ = became[0]
    assert line == [sys.executable, "train.py", "--lr", "1"]
    assert environ["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_the_default_config_file_is_used_and_a_named_one_takes_its_place(became, tmp_path):
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate/default_config.yaml").write_text("mixed_precision: fp16\ndebug: yes\n")
    (tmp_path / "run.json").write_text('{"mixed_precision": "bf16"}')
    for line in (["launch", "train.py"], ["launch", "--config_file", str(tmp_path / "run.json"), "train.py"]):
        with pytest.raises(BecameError):
            main(line)
    names = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DEBUG_MODE")
    assert [tuple(map(environ.get, names)) for _, environ in became] == [("fp16", "true"), ("bf16", None)]


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a.yaml", "a: [", ["a.yaml", "yaml"]),
        ("a.json", "{", ["a.json", "json"]),
        ("a.yaml", "- 1", ["a.yaml", "list", "table"]),
        ("a.yaml", "num_proceses: 1", ["num_proceses", "a.yaml", "num_processes"]),
    ],
)
def test_a_config_file_that_cannot_be_used_is_named(name, text, parts, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(SettingsError) as caught:
        file.read_config(str(tmp_path / name), {})
    assert [part for part in parts if part not in str(caught.value)] == []


def test_what_is_wrong_with_variables_and_the_file_is_reported_at_once(tmp_path, capsys, monkeypatch):
    (tmp_path / "run.yaml").write_text("num_proceses: 2\n")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "perhaps")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf61")
    assert main(["launch", "--config_file", str(tmp_path / "run.yaml"), "train.py"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n- ") == 3
    assert all(word in told for word in ("ACCELERATE_USE_CPU", "'bf61'", "key num_proceses"))


def test_an_empty_config_file_says_nothing(tmp_path):
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert file.read_config(str(tmp_path / "a.yaml"), {}).sourced == {}


def test_a_config_file_of_an_older_format_is_used_and_says_so(became, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("fp16: true\n")
    with pytest.raises(BecameError):
        main(["launch", "--config_file", str(tmp_path / "run.yaml"), "train.py"])
    assert became[0][1]["ACCELERATE_MIXED_PRECISION"] == "fp16"
    told = capsys.readouterr().err
    assert "'fp16: True' is 'mixed_precision: fp16' now" in told
    assert f"accel config update --config_file {tmp_path / 'run.yaml'}" in told
