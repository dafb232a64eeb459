"""The command lines of check, doctor and estimate-memory, and files that are no models."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_cli.main import main
from accel_inspect.arguments import CHECK, DOCTOR, ESTIMATE
from accel_state.errors import SettingsError


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_follows_a_script_is_left_alone():
    options = CHECK.make_parser().read(
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
    assert (options.world, options.devices_per_machine, options.script) == (8, 4, "train.py")
    assert options.script_arguments == ["--devices-per-machine", "--lr-max=1", "x-y"]


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
    options = CHECK.make_parser().read(words)
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


def test_an_estimate_shows_that_it_works_beside_its_output(monkeypatch, tmp_path, capsys):
    pytest.importorskip("transformers")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    config = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 32, "vocab_size": 64}))
    errors = Terminal()
    monkeypatch.setattr("sys.stderr", errors)
    monkeypatch.chdir(tmp_path.parent)  # a short path fits on the line
    assert main(["estimate-memory", tmp_path.name, "--json"]) == 0
    assert "importing torch …" in errors.getvalue()
    assert f"estimating '{tmp_path.name}" in errors.getvalue()
    assert "weights" in json.loads(capsys.readouterr().out)


KEYS = ("model_type", "architectures", "hidden_size", "auto_map", "pretrained_cfg", "num_labels")
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["bert", "TP", "", "2"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)


@given(content=values.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_any_file_ends_in_a_result_or_in_a_sentence_and_code_2(content, tmp_path, capsys):
    (tmp_path / "run.json").write_bytes(content)
    code = main(["estimate-memory", str(tmp_path / "run.json")])
    told = capsys.readouterr()
    assert code == (2 if told.err else 0)
    if code:
        assert told.err.startswith("accel estimate-memory: error: ")


@pytest.mark.parametrize("command", [CHECK, DOCTOR, ESTIMATE], ids=["check", "doctor", "estimate"])
@given(data=st.data())
@settings(max_examples=60)
def test_any_words_are_read_or_refused_with_a_sentence(command, data):
    parser = command.make_parser()
    known = [
        flag for action in parser.actions for flag in action.option_strings if flag not in {"-h", "--help"}
    ]
    words = data.draw(
        st.lists(st.sampled_from([*known, "1", "x", "--", "-", "--x=", ""]) | st.text(), max_size=5)
    )
    # Anything else is an error of ours: the command would end in a traceback.
    asked = any(word.startswith("-") and "h" in word for word in words)
    with contextlib.suppress(SettingsError, *([SystemExit] if asked else [])):  # a text may ask for help
        parser.read(words)


def test_help_and_the_overview_name_the_commands(capsys):
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for name in ("check", "doctor", "estimate-memory"):
        assert f"  {name} " in overview
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert f"usage: accel {name}" in capsys.readouterr().out
