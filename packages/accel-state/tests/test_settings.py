from __future__ import annotations

from dataclasses import fields, replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state import settings as exported
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.settings.environ import from_environ, given_by_environ, to_environ, worker_environ
from accel_state.settings.file import default_config_file, given_by_file
from accel_state.settings.merge import Given, Layer, combine
from accel_state.settings.model import (
    DynamoSettings,
    LaunchSettings,
    Precision,
    PrecisionSettings,
    ProcessSettings,
    Settings,
    TrainingSettings,
)
from accel_state.settings.options import BY_KEY, BY_VARIABLE, OPTIONS

texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)
all_settings = st.builds(
    Settings,
    process=st.builds(
        ProcessSettings, torch_device=st.none() | texts, log_level=st.none() | texts, use_cpu=..., debug=...,
        cpu_affinity=..., enable_rich=...,
    ),
    precision=st.builds(PrecisionSettings, mixed_precision=st.sampled_from(get_args(Precision))),
    dynamo=st.builds(
        DynamoSettings,
        backend=st.sampled_from(BY_VARIABLE["ACCELERATE_DYNAMO_BACKEND"].choices),
        mode=st.sampled_from(BY_VARIABLE["ACCELERATE_DYNAMO_MODE"].choices),
        use_fullgraph=..., use_dynamic=..., use_regional_compilation=...,
    ),
    training=st.builds(TrainingSettings, gradient_accumulation_steps=st.integers(1)),
)  # fmt: skip


def paths(record, prefix=""):
    return {f"{prefix}{field.name}" for field in fields(record)}


@given(all_settings)
def test_what_is_written_as_variables_is_read_back(settings):
    assert from_environ(to_environ(settings)) == settings


@given(all_settings, all_settings)
def test_a_worker_reads_its_launchers_settings_not_what_the_environment_said_before(settings, stale):
    assert from_environ(worker_environ(settings, {"PATH": "/bin", **to_environ(stale)})) == settings


@given(all_settings)
def test_a_worker_keeps_every_other_variable(settings):
    assert worker_environ(settings, {"PATH": "/bin", "ACCELERATE_OWN": "x"}).items() >= {
        ("PATH", "/bin"),
        ("ACCELERATE_OWN", "x"),
    }


def test_every_field_has_exactly_one_row_and_every_row_a_field():
    sections = {field.name: getattr(Settings(), field.name) for field in fields(Settings)}
    known = sorted(path for name, section in sections.items() for path in paths(section, f"{name}."))
    assert sorted(option.path for option in OPTIONS) == known


def test_every_row_can_be_set_somewhere_and_no_name_is_used_twice():
    for names in (
        [o.variable for o in OPTIONS],
        [o.key for o in OPTIONS],
        [f for o in OPTIONS for f in o.flags],
    ):
        used = [name for name in names if name is not None]
        assert len(used) == len(set(used))
    assert all(option.variable or option.key or option.flags for option in OPTIONS)


def test_every_worker_setting_can_be_handed_over():
    assert {option.path for option in OPTIONS if not option.variable} == paths(LaunchSettings(), "launch.")


def test_an_empty_environment_gives_the_defaults():
    assert from_environ({}) == Settings()
    assert from_environ({"ACCELERATE_MIXED_PRECISION": "", "ACCELERATE_USE_CPU": ""}) == Settings()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("ACCELERATE_USE_CPU", "maybe", "'true' or 'false'"),
        ("ACCELERATE_MIXED_PRECISION", "bf61", "'bf16'"),
        ("ACCELERATE_DYNAMO_BACKEND", "inductr", "'INDUCTOR'"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "0", "at least 1"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1.5", "whole number"),
    ],
)
def test_a_bad_value_names_its_variable_and_what_was_expected(name, text, expected):
    with pytest.raises(SettingsError) as caught:
        from_environ({name: text})
    for part in (name, repr(text), expected):
        assert part in str(caught.value)


def test_choices_are_read_in_any_case():
    settings = from_environ({"ACCELERATE_MIXED_PRECISION": "BF16", "ACCELERATE_DYNAMO_BACKEND": "inductor"})
    assert (settings.precision.mixed_precision, settings.dynamo.backend) == ("bf16", "INDUCTOR")


def test_a_variable_that_asks_for_an_engine_is_refused_rather_than_ignored():
    assert from_environ({"ACCELERATE_USE_FSDP": "false"}) == Settings()
    with pytest.raises(UnsupportedError, match=r"ACCELERATE_USE_FSDP='true'.*FSDP"):
        from_environ({"ACCELERATE_USE_FSDP": "true"})


@given(st.permutations([Layer.ARGUMENT, Layer.ENVIRONMENT, Layer.FILE]), st.sets(st.sampled_from(Layer)))
def test_argument_beats_environment_beats_file_beats_default_in_whatever_order_they_come(order, speaking):
    path = "training.gradient_accumulation_steps"
    speaking = speaking - {Layer.DEFAULT}
    sources = [
        {path: Given(value=int(y) + 2, layer=y, origin=y.name)} if y in speaking else {} for y in order
    ]
    merged = combine(*sources)
    winner = min(speaking, default=Layer.DEFAULT)
    assert merged.who(path).layer == winner
    assert merged.settings.training.gradient_accumulation_steps == (int(winner) + 2 if speaking else 1)


def test_the_origin_of_a_value_is_told_in_words():
    merged = combine(
        given_by_file({"mixed_precision": "fp16", "debug": True}, "run.yaml"),
        given_by_environ({"ACCELERATE_MIXED_PRECISION": "bf16"}),
    )
    assert merged.settings.precision.mixed_precision == "bf16"
    assert merged.who("precision.mixed_precision").origin == "variable ACCELERATE_MIXED_PRECISION"
    assert merged.who("process.debug").origin == "key debug of run.yaml"
    assert merged.who("process.use_cpu").origin == "default"


DOCUMENTED_FILE = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "MULTI_GPU",
    "downcast_bf16": "no",
    "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_fullgraph": True},
    "enable_cpu_affinity": False,
    "fsdp_config": {},
    "gpu_ids": "all",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 4,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}


def test_a_documented_config_file_is_read_as_it_is():
    settings = combine(given_by_file(DOCUMENTED_FILE, "default_config.yaml")).settings
    assert settings == Settings(
        precision=PrecisionSettings(mixed_precision="bf16"),
        dynamo=DynamoSettings(backend="INDUCTOR", use_fullgraph=True),
        launch=LaunchSettings(
            num_processes=4, distributed_type="MULTI_GPU", gpu_ids="all", same_network=True
        ),
    )


def test_a_bare_no_in_yaml_is_a_word_where_a_word_is_expected():
    merged = combine(given_by_file({"mixed_precision": False, "distributed_type": False}, "run.yaml"))
    assert merged.settings.precision.mixed_precision == "no"
    assert merged.settings.launch.distributed_type == "NO"


@pytest.mark.parametrize("nothing", [None, ""])
def test_an_empty_key_is_not_given(nothing):
    assert (
        given_by_file({"num_processes": nothing, "dynamo_config": None, "gpu_ids": nothing}, "run.yaml") == {}
    )


def test_minus_one_process_leaves_the_number_to_be_found_out():
    assert given_by_file({"num_processes": -1}, "run.yaml") == {}


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ({"num_proceses": 2}, ["num_proceses", "run.yaml", "did you mean 'num_processes'"]),
        (
            {"dynamo_config": {"dynamo_bakend": "x"}},
            ["dynamo_config.dynamo_bakend", "dynamo_config.dynamo_backend"],
        ),
        ({"zzz": 1}, ["zzz", "run.yaml", "mixed_precision"]),
        ({"num_processes": "two"}, ["num_processes", "run.yaml", "'two'", "whole number"]),
        ({"dynamo_config": "INDUCTOR"}, ["dynamo_config", "run.yaml", "'INDUCTOR'", "table"]),
        ({"main_process_port": 70000}, ["main_process_port", "'70000'", "from 0 to 65535"]),
    ],
)
def test_a_bad_key_or_value_names_its_file_key_and_the_way_out(content, parts):
    with pytest.raises(SettingsError) as caught:
        given_by_file(content, "run.yaml")
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize(
    "content",
    [
        {"fsdp_config": {"fsdp_version": 2}},
        {"deepspeed_config": {"zero_stage": 3}},
        {"distributed_type": "FSDP"},
        {"distributed_type": "DEEPSPEED"},
        {"compute_environment": "AMAZON_SAGEMAKER"},
        {"main_training_function": "train"},
        {"downcast_bf16": "yes"},
        {"tpu_env": ["A=1"]},
    ],
)
def test_what_is_not_available_yet_is_refused_by_name_rather_than_ignored(content):
    with pytest.raises(UnsupportedError, match=f"key {next(iter(content))} of run.yaml .* not available yet"):
        given_by_file(content, "run.yaml")


def test_no_available_key_is_also_one_that_comes_later():
    assert given_by_file(dict.fromkeys([key for key in BY_KEY if "." not in key]), "run.yaml") == {}


def test_the_default_config_file_is_found_in_the_documented_places(tmp_path):
    environ = {"HF_HOME": "", "XDG_CACHE_HOME": "", "HOME": str(tmp_path / "home")}
    assert default_config_file(environ) is None
    found = []
    for name, folder in [
        ("HOME", tmp_path / "home/.cache/huggingface/accelerate"),
        ("XDG_CACHE_HOME", tmp_path / "xdg/huggingface/accelerate"),
        ("HF_HOME", tmp_path / "hf/accelerate"),
    ]:
        folder.mkdir(parents=True)
        environ[name] = str(tmp_path / {"HOME": "home", "XDG_CACHE_HOME": "xdg", "HF_HOME": "hf"}[name])
        for file_name in ("default_config.json", "default_config.yaml"):
            (folder / file_name).touch()
            found.append(default_config_file(environ) == folder / file_name)
    assert found == [True] * 6


def test_every_exported_name_resolves():
    assert [name for name in exported.__all__ if getattr(exported, name) is None] == []
    assert sorted(exported.__all__) == dir(exported)


def test_settings_cannot_be_changed_in_place():
    settings = Settings()
    with pytest.raises(AttributeError):
        settings.precision.mixed_precision = "bf16"
    assert replace(settings, training=TrainingSettings(gradient_accumulation_steps=2)) != settings
