"""Files and words that nobody meant: every command answers them with a sentence and exit code 2."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_cli.arguments import Parser
from accel_cli.commands import env
from accel_cli.main import COMMANDS, main
from accel_state.errors import SettingsError

# With the file as `{file}`, and another that is not there as `{new}`.
LINES = {
    "config": ["config", "update", "--config_file", "{file}"],
    "env": ["env", "--config_file", "{file}"],
    "to-fsdp2": ["to-fsdp2", "--config_file", "{file}", "--output_file", "{new}", "--overwrite"],
    "tpu-config": ["tpu-config", "--config_file", "{file}", "--debug"],
    "merge-weights": ["merge-weights", "{file}", "{new}"],
    "launch": ["launch", "--config_file", "{file}", "--explain", "x.py"],
}
KEYS = (
    "num_processes", "fsdp_config", "distributed_type", "compute_environment", "fsdp_version", "tpu_name",
    "tpu_zone", "commands", "command_file", "fp16", "tp_config", "mpirun_config", "dynamo_backend",
    "fsdp_sharding_strategy", "fsdp_state_dict_type", "deepspeed_config",
)  # fmt: skip
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["FSDP", "yes", "XLA", "TPU", "TP", "FULL_SHARD", "bert", "", "2"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)
tables = st.dictionaries(st.sampled_from(KEYS), values, max_size=5)


def as_json(value):
    """What PyYAML, which reads JSON too, and json read as the same."""
    return json.dumps(value).encode()


@pytest.fixture
def quick(monkeypatch):
    """The report without the facts that need torch."""
    monkeypatch.setattr(env, "IMPORTED_FACTS", {})


@pytest.mark.parametrize("name", LINES)
@given(
    content=tables.map(as_json) | values.map(as_json) | st.binary(max_size=40),
    suffix=st.sampled_from(("yaml", "json", "")),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_any_file_ends_in_a_result_or_in_a_sentence_and_code_2(
    name, content, suffix, quick, tmp_path, capsys
):
    file = tmp_path / f"run.{suffix}"
    file.write_bytes(content)
    code = main([word.format(file=file, new=tmp_path / "new.yaml") for word in LINES[name]])
    told = capsys.readouterr()
    assert code == (2 if told.err else 0)
    if code:
        assert told.err.startswith(f"accel {name}: error: ")


@pytest.mark.parametrize("name", COMMANDS)
@given(data=st.data())
@settings(max_examples=60)
def test_any_words_are_read_or_refused_with_a_sentence(name, data):
    parser = COMMANDS[name].make_parser()
    assert isinstance(parser, Parser)
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
