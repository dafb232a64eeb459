from __future__ import annotations

import contextlib
from dataclasses import fields

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.arguments import FLAGS, launch, read_arguments
from accel_cli.launch.command import make_plan
from accel_cli.launch.hosts import HostDevices
from accel_state.errors import AccelError, SettingsError
from accel_state.settings import OPTIONS, from_environ, merge_layers, merge_sources, parse_environ, parse_file
from accel_state.settings.engines import MegatronSettings
from accel_state.settings.file import to_content
from accel_state.settings.model import BY_KEY, BY_VARIABLE


def plan(*line, environ=None, file=None, gpus=4, **machine):
    read = read_arguments([*line, "train.py"])
    merged = merge_sources(read.settings, parse_environ(environ or {}), parse_file(file or {}, "run.yaml"))
    return make_plan(
        merged, read.script, read.script_arguments, environ or {}, HostDevices(gpus=gpus, cores=8, **machine)
    )


@pytest.mark.parametrize(
    ("line", "file", "parts"),
    [
        (["--fsdp_version", "2"], {}, ["--fsdp_version is about FSDP", "add --use_fsdp"]),
        (["--zero_stage", "2", "--zero3_init_flag", "true"], {}, ["--zero_stage, argument --zero3"]),
        (["--megatron_lm_tp_degree", "2"], {}, ["add --use_megatron_lm"]),
        (["--parallelism_config_tp_size", "2"], {}, ["add --use_parallelism_config"]),
        (["--fp8_backend", "te", "--mixed_precision", "bf16"], {}, ["add --mixed_precision fp8"]),
        (["--use_fsdp", "--use_deepspeed"], {}, ["--use_deepspeed requests DeepSpeed", "--use_fsdp"]),
        (
            ["--use_deepspeed", "--deepspeed_config_file", "ds.json", "--zero_stage", "3"],
            {},
            ["'ds.json'", "argument --zero_stage"],
        ),
        (["--time", "5", "--queue", "q"], {}, ["--time, argument --queue are about", "add --launcher slurm"]),
        (["--min_machines", "2"], {}, ["there are only 1 machines", "--rdzv_backend c10d"]),
        ([], {"compute_environment": "AMAZON_SAGEMAKER"}, ["ec2_instance_type and iam_role_name"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_where_it_came_from(line, file, parts):
    with pytest.raises(SettingsError) as caught:
        plan(*line, file=file)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_everything_that_does_not_fit_is_reported_at_once():
    with pytest.raises(SettingsError) as caught:
        plan("--fsdp_version", "2", "--num_processes", "3", "--num_machines", "2", "--machine_rank", "5")
    said = str(caught.value).splitlines()
    assert said[0] == "several settings cannot be used:"
    assert len(said) == 5
    assert all(line.startswith("- ") for line in said[1:])


@pytest.mark.parametrize(
    ("line", "file", "parts"),
    [
        (["--use_megatron_lm"], {}, ["argument --use_megatron_lm", "accel-plugins[megatron]"]),
        ([], {"distributed_type": "MEGATRON_LM"}, ["distributed_type", "accel-plugins[megatron]"]),
        (["--use_deepspeed"], {}, ["argument --use_deepspeed", "accel-plugins[deepspeed]"]),
        ([], {"distributed_type": "DEEPSPEED"}, ["distributed_type", "accel-plugins[deepspeed]"]),
    ],
)
def test_a_library_that_is_not_installed_is_named_before_anything_starts(line, file, parts):
    with pytest.raises(SettingsError) as caught:
        plan(*line, file=file, engines=())
    (problem,) = caught.value.problems
    assert all(part in problem for part in parts), problem


def test_the_sizes_of_megatron_reach_the_workers():
    sizes = ["--megatron_lm_tp_degree", "2", "--megatron_lm_pp_degree", "2"]
    environ = plan("--use_megatron_lm", *sizes, "--num_processes", "4").environ
    assert from_environ(environ).megatron == MegatronSettings(tp_degree=2, pp_degree=2)
    file = {
        "distributed_type": "MEGATRON_LM",
        "megatron_lm_config": {"megatron_lm_tp_degree": 2, "megatron_lm_attention_backend": True},
    }
    made = from_environ(plan(file=file).environ).megatron
    assert made == MegatronSettings(tp_degree=2, attention_backend="auto")


@pytest.mark.parametrize("field", fields(MegatronSettings), ids=lambda field: field.name)
def test_a_flag_and_a_key_of_megatron_become_its_variable(field):
    words = {"recompute_granularity": "full", "recompute_method": "block", "attention_backend": "local"}
    numbers = {"int": "1", "float": "0.25", "bool": "true"}
    text = words.get(field.name) or numbers[field.type.partition(" ")[0]]
    by_flag = plan("--use_megatron_lm", f"--megatron_lm_{field.name}", text).environ
    section = {f"megatron_lm_{field.name}": yaml.safe_load(text)}
    by_key = plan(file={"distributed_type": "MEGATRON_LM", "megatron_lm_config": section}).environ
    variable = f"MEGATRON_LM_{field.name.upper()}"
    assert by_flag[variable] == by_key[variable]
    assert by_flag["ACCELERATE_USE_MEGATRON_LM"] == by_key["ACCELERATE_USE_MEGATRON_LM"] == "true"
    assert getattr(from_environ(by_flag).megatron, field.name) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("line", "machine", "parts"),
    [
        (
            ["--cpu"],
            {"fp8_backends": ()},
            ["argument --mixed_precision", "'AO' needs torchao", "pip install"],
        ),
        (["--cpu", "--fp8_backend", "te"], {}, ["TransformerEngine trains on", "not 'cpu'", "'AO'"]),
        (["--fp8_backend", "msamp"], {}, ["no longer developed", "AORecipeKwargs()"]),
        ([], {"capability": lambda: (8, 0)}, ["8.9 or newer", "has 8.0", "'bf16'"]),
    ],
)
def test_fp8_that_the_machine_cannot_compute_is_refused_before_anything_starts(line, machine, parts):
    with pytest.raises(SettingsError) as caught:
        plan("--mixed_precision", "fp8", *line, **machine)
    (problem,) = caught.value.problems
    assert all(part in problem for part in parts), problem


@pytest.mark.parametrize(
    ("line", "machine"),
    [
        (["--cpu"], {}),
        ([], {"capability": lambda: (9, 0)}),
        (["--use_deepspeed"], {}),
        (["--fp8_backend", "te", "--fp8_margin", "3"], {"capability": lambda: (8, 9)}),
        (["--cpu", "--fp8_margin", "3"], {}),  # the backend is found by the worker
    ],
)
def test_fp8_that_the_machine_can_compute_is_launched(line, machine):
    assert plan("--mixed_precision", "fp8", *line, **machine).environ["ACCELERATE_MIXED_PRECISION"] == "fp8"


def test_a_wrong_precision_is_refused_with_those_that_exist():
    with pytest.raises(SettingsError, match=r"expected one of 'no', 'fp8', 'fp16', 'bf16'$"):
        plan("--mixed_precision", "bf17")


def test_two_engines_are_reported_with_everything_else_that_does_not_fit():
    with pytest.raises(SettingsError) as caught:
        plan("--cpu", "--multi_gpu", "--use_fsdp", "--use_deepspeed", "--use_megatron_lm")
    engines, third, device = caught.value.problems
    assert "--use_fsdp requests FSDP: choose one" in third + engines
    assert "--use_megatron_lm requests Megatron-LM: choose one" in third + engines
    assert "--cpu requests the CPU, but argument --multi_gpu requests MULTI_GPU" in device


def test_a_file_keeps_settings_of_an_engine_that_is_not_used():
    made = plan(file={"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_version": 2}})
    assert from_environ(made.environ).fsdp is None


def test_workers_get_the_defaults_of_the_command():
    fsdp = from_environ(plan("--use_fsdp").environ).fsdp
    assert (fsdp.fsdp_version, fsdp.use_orig_params, fsdp.cpu_ram_efficient_loading) == (1, True, True)
    assert from_environ(plan("--use_fsdp", "--fsdp_version", "2").environ).fsdp.fsdp_version == 2


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.path)
def test_every_setting_is_in_the_parser_the_file_the_environment_the_questions_and_the_help(option):
    """Derived from one row each; this proves that no derivation leaves one out."""
    assert {*option.flags} <= {*FLAGS}
    assert option.key is None or BY_KEY[option.key] is option
    assert option.variable is None or BY_VARIABLE[option.variable] is option
    text = launch().format_help()
    for flag in (*option.flags, *(name for name, _ in option.flag_aliases)):
        assert f"{flag}" in text
    if option.flags:
        assert option.variable is None or f"[{option.variable}" in text
    if option.key and option.name:
        value = VALUES[option.path]
        merged = merge_layers(parse_file(nested(option.key, value), "run.yaml"))
        content = to_content(merged.settings)
        engine = option.section in {"fsdp", "deepspeed", "megatron"}
        assert engine or read_back(content, option.key) is not None


def nested(key, value):
    table, _, name = key.rpartition(".")
    return {table: {name: value}} if table else {name: value}


def read_back(content, key):
    table, _, name = key.rpartition(".")
    return (content.get(table, {}) if table else content).get(name)


def some_value(option):
    """A value that a file could have, other than the default."""
    if option.kind == "table":
        return {"a": 1}
    for text in [*option.choices[::-1], "true", "7", "0.5", "false,true,false", "word"]:
        with contextlib.suppress(ValueError):
            if option.parse(text) is not None:
                return text
    raise AssertionError(option)


VALUES = {option.path: some_value(option) for option in OPTIONS}
words = (
    st.sampled_from([*FLAGS, "2", "bf16", "no", "0,1", "-x", "--x=", "--", "-", "", "a=b", "auto", "1e9"])
    | st.text()
)
contents = st.dictionaries(
    st.sampled_from([*BY_KEY, *{key.partition(".")[0] for key in BY_KEY}, "fp16", "zzz"]) | st.text(),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["FSDP", "XLA", "2"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=3,
    ),
    max_size=6,
)  # fmt: skip


@given(
    st.lists(words, max_size=8),
    contents,
    st.dictionaries(st.sampled_from([*BY_VARIABLE]), st.text(), max_size=3),
)
def test_any_line_file_and_environment_make_a_plan_or_a_sentence(line, file, environ):
    with contextlib.suppress(AccelError):
        plan(*line, file=file, environ=environ)
