from __future__ import annotations

import contextlib
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state import settings as exported
from accel_state.errors import SettingsError
from accel_state.settings.engines import DeepSpeedSettings, Fp8Settings, FsdpSettings
from accel_state.settings.file import (
    default_config_file,
    default_config_folder,
    parse_file,
    to_content,
    translate,
)
from accel_state.settings.model import (
    BY_KEY,
    BY_PATH,
    ENGINES,
    IMPLICIT_SECTIONS,
    OPTIONAL_SECTIONS,
    OPTIONS,
    Layer,
    Settings,
    SourcedValue,
    from_environ,
    merge_layers,
    parse_environ,
    to_environ,
    value_at,
    worker_environ,
)
from accel_state.settings.run import (
    ENGINE_TYPES,
    DynamoSettings,
    LaunchSettings,
    PrecisionSettings,
    TrainingSettings,
)

WORDS = ("true", "false", "0", "1", "2", "0.5", "word", "a,b", "false,true,no")
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)


def readable(option):
    """Values that a row reads: of each choice, or of each of these words that it accepts."""
    found = []
    for word in ['{"a": 1}'] if option.kind == "table" else option.choices or WORDS:
        with contextlib.suppress(ValueError):
            found.append(option.parse(word))
    plain = st.sampled_from([value for value in found if value is not None])
    return plain | texts if option.parse is str else plain


READABLE = {option.path: readable(option) for option in OPTIONS if option.path not in OPTIONAL_SECTIONS}


@st.composite
def settings_of(draw, rows):
    """Settings as somebody may have given them in these rows, with one engine at most."""
    paths = [path for path in READABLE if path in rows and path != "launch.distributed_type"]
    given = {
        path: SourcedValue(
            value=(value,) if BY_PATH[path].kind == "list" else value,
            layer=Layer.ARGUMENT,
            origin="argument",
        )
        for path in draw(st.lists(st.sampled_from(paths), unique=True, max_size=12))
        for value in [draw(READABLE[path])]
    }
    for switch in draw(st.sets(st.sampled_from([draw(st.sampled_from(ENGINES)), "parallelism"]))):
        given[switch] = SourcedValue(value=True, layer=Layer.ARGUMENT, origin="argument")
    return merge_layers(given).settings


all_settings = settings_of([option.path for option in OPTIONS if option.variable])


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


RECORDS = {field.name: getattr(Settings(), field.name) for field in fields(Settings)} | {
    name: kind() for name, kind in {**OPTIONAL_SECTIONS, **IMPLICIT_SECTIONS}.items()
}


def test_every_field_has_exactly_one_row_and_every_row_a_field():
    known = [path for name, section in RECORDS.items() for path in paths(section, f"{name}.")]
    assert sorted(option.path for option in OPTIONS) == sorted([*known, *OPTIONAL_SECTIONS])


def test_every_row_can_be_set_somewhere_and_no_name_is_used_twice():
    for names in (
        [o.variable for o in OPTIONS],
        [key for o in OPTIONS for key in (o.key, *o.key_aliases)],
        [f for o in OPTIONS for f in (*o.flags, *(name for name, _ in o.flag_aliases))],
    ):
        used = [name for name in names if name is not None]
        assert len(used) == len(set(used))
    assert all(option.variable or option.key or option.flags for option in OPTIONS)


def test_every_worker_setting_can_be_handed_over():
    for_the_command = {"launch", "mpi", "cluster", "hosts", "tpu", "sagemaker"}
    assert {option.section for option in OPTIONS if not option.variable} == for_the_command
    assert not {option.section for option in OPTIONS if option.variable} & for_the_command


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.path)
def test_a_question_depends_on_settings_that_exist_and_come_before_it(option):
    before = [other.path for other in OPTIONS[: OPTIONS.index(option)]]
    asked = []

    def answers(path):
        asked.append(path)
        return value_at(Settings(), path)

    if option.ask_if is not None:
        option.ask_if(answers)
    assert set(asked) <= {*(other.path for other in OPTIONS)}
    assert [path for path in asked if path not in before] == LATE.get(option.path, [])


# Whether one of these is asked depends on an answer that is only given later, and is its default until then.
LATE = {}


def test_what_a_launcher_hands_over_can_be_read():
    assert {
        option.path: option.parse(option.launch_default) for option in OPTIONS if option.launch_default
    } == {
        "fsdp.fsdp_version": 1,
        "fsdp.min_num_params": 100_000_000,
        "fsdp.use_orig_params": True,
        "fsdp.cpu_ram_efficient_loading": True,
        "fsdp.sync_module_states": True,
    }


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


def test_an_engine_is_on_with_its_switch_only():
    answers = {
        "FSDP_VERSION": "2",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer, Block",
        "FSDP_OFFLOAD_PARAMS": "true",
    }
    assert from_environ(answers) == from_environ({**answers, "ACCELERATE_USE_FSDP": "false"}) == Settings()
    assert from_environ({**answers, "ACCELERATE_USE_FSDP": "true"}).fsdp == FsdpSettings(
        fsdp_version=2, transformer_cls_names_to_wrap=("BertLayer", "Block"), cpu_offload=True
    )


def test_two_engines_at_once_are_refused_by_name():
    with pytest.raises(SettingsError, match=r"ACCELERATE_USE_DEEPSPEED.*ACCELERATE_USE_FSDP.*choose one"):
        from_environ({"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_DEEPSPEED": "true"})


def test_of_two_engines_the_stronger_source_decides():
    file = parse_file({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, "run.yaml")
    assert merge_layers(file).settings.fsdp == FsdpSettings(fsdp_version=2)
    both = merge_layers(file, parse_environ({"ACCELERATE_USE_DEEPSPEED": "true"})).settings
    assert (both.fsdp, both.deepspeed) == (None, DeepSpeedSettings())
    plain = {
        "launch.distributed_type": SourcedValue(value="MULTI_GPU", layer=Layer.ARGUMENT, origin="--multi_gpu")
    }
    assert merge_layers(file, plain).settings.fsdp is None
    off = {"fsdp": SourcedValue(value=False, layer=Layer.ARGUMENT, origin="--no_use_fsdp")}
    assert merge_layers(file, off).settings.fsdp is None


@given(settings_of([option.path for option in OPTIONS if option.key]))
def test_what_is_written_as_a_file_is_read_back(settings):
    read = merge_layers(parse_file(yaml_like(to_content(settings)), "run.yaml")).settings
    kind = next((kind for kind, name in ENGINE_TYPES.items() if value_at(settings, name)), None)
    sizes = settings.parallelism and replace(settings.parallelism, dp_replicate_size=1)
    expected = replace(settings, launch=replace(settings.launch, distributed_type=kind))
    assert read in (expected, replace(expected, parallelism=sizes))


def test_a_file_has_the_keys_that_other_readers_know():
    steps = {"deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 4}}
    settings = merge_layers(parse_file({"distributed_type": "DEEPSPEED", **steps}, "run.yaml")).settings
    assert to_content(settings)["deepspeed_config"] == steps["deepspeed_config"]
    job = merge_layers(parse_file({"compute_environment": "AMAZON_SAGEMAKER"}, "job.yaml")).settings
    assert "num_processes" not in to_content(job)


def test_a_file_for_tpus_shards_where_its_fsdp_section_asks_for_xla():
    content = {"distributed_type": "XLA", "fsdp_config": {"xla": True, "xla_fsdp_v2": True}}
    settings = merge_layers(parse_file(content, "run.yaml")).settings
    assert (settings.launch.on_tpu, settings.fsdp) == (True, FsdpSettings(xla=True, xla_fsdp_v2=True))
    assert merge_layers(parse_file(yaml_like(to_content(settings)), "run.yaml")).settings == settings
    content["fsdp_config"]["xla"] = False
    assert merge_layers(parse_file(content, "run.yaml")).settings.fsdp is None


def yaml_like(content):
    """As YAML brings it back: lists, numbers, truth values and texts only."""
    return json.loads(json.dumps(content))


@given(st.permutations([Layer.ARGUMENT, Layer.ENVIRONMENT, Layer.FILE]), st.sets(st.sampled_from(Layer)))
def test_argument_beats_environment_beats_file_beats_default_in_whatever_order_they_come(order, speaking):
    path = "training.gradient_accumulation_steps"
    speaking = speaking - {Layer.DEFAULT}
    sources = [
        {path: SourcedValue(value=int(y) + 2, layer=y, origin=y.name)} if y in speaking else {} for y in order
    ]
    merged = merge_layers(*sources)
    winner = min(speaking, default=Layer.DEFAULT)
    assert merged.source_of(path).layer == winner
    assert merged.settings.training.gradient_accumulation_steps == (int(winner) + 2 if speaking else 1)


def test_the_origin_of_a_value_is_reported_in_words():
    merged = merge_layers(
        parse_file({"mixed_precision": "fp16", "debug": True}, "run.yaml"),
        parse_environ({"ACCELERATE_MIXED_PRECISION": "bf16"}),
    )
    assert merged.settings.precision.mixed_precision == "bf16"
    assert merged.source_of("precision.mixed_precision").origin == "variable ACCELERATE_MIXED_PRECISION"
    assert merged.source_of("process.debug").origin == "key debug of run.yaml"
    assert merged.source_of("process.use_cpu").origin == "default"


DOCUMENTED_FILE = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "MULTI_GPU",
    "downcast_bf16": "no",
    "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_fullgraph": True},
    "enable_cpu_affinity": False,
    "fsdp_config": {},
    "deepspeed_config": {},
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
    settings = merge_layers(parse_file(DOCUMENTED_FILE, "default_config.yaml")).settings
    assert settings == Settings(
        precision=PrecisionSettings(mixed_precision="bf16"),
        dynamo=DynamoSettings(backend="INDUCTOR", use_fullgraph=True),
        launch=LaunchSettings(
            num_processes=4, distributed_type="MULTI_GPU", gpu_ids="all", same_network=True
        ),
    )


def test_the_recipe_of_fp8_is_read_in_the_spellings_of_files():
    recipe = {
        "amax_compute_algorithm": "max", "amax_history_length": 512, "backend": "TE", "fp8_format": "E4M3",
        "interval": 1, "margin": 0, "override_linear_precision": [False, False, True],
        "use_autocast_during_eval": False,
    }  # fmt: skip
    expected = Fp8Settings(
        amax_compute_algo="max", amax_history_len=512, backend="TE", fp8_format="E4M3", interval=1, margin=0,
        override_linear_precision=(False, False, True), use_autocast_during_eval=False,
    )  # fmt: skip
    assert merge_layers(parse_file({"fp8_config": recipe}, "run.yaml")).settings.fp8 == expected
    written = {"amax_compute_algo": "MAX", "fp8_amax_history_len": "512", "backend": "te"}
    short = merge_layers(parse_file({"fp8_config": written}, "run.yaml")).settings.fp8
    assert short == Fp8Settings(amax_compute_algo="max", amax_history_len=512, backend="TE")


def test_other_launchers_hand_over_a_setting_in_parts():
    parts = {"ACCELERATE_FP8_OVERRIDE_FPROP": "1", "ACCELERATE_FP8_OVERRIDE_WGRAD": "True"}
    assert from_environ(parts).fp8 == Fp8Settings(override_linear_precision=(True, False, True))
    assert worker_environ(Settings(), parts) == {}
    assert worker_environ(from_environ(parts), parts) == {
        "ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION": "true,false,true"
    }


def test_auto_leaves_a_number_to_deepspeed_or_the_script():
    table = {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "zero_stage": 3}
    content = {"distributed_type": "DEEPSPEED", "deepspeed_config": table}
    settings = merge_layers(parse_file(content, "run.yaml")).settings
    assert settings == Settings(
        deepspeed=DeepSpeedSettings(zero_stage=3), launch=LaunchSettings(distributed_type="DEEPSPEED")
    )


def test_a_bare_no_in_yaml_is_a_word_where_a_word_is_expected():
    merged = merge_layers(parse_file({"mixed_precision": False, "distributed_type": False}, "run.yaml"))
    assert merged.settings.precision.mixed_precision == "no"
    assert merged.settings.launch.distributed_type == "NO"


@pytest.mark.parametrize("nothing", [None, ""])
def test_an_empty_key_is_not_given(nothing):
    assert parse_file({"num_processes": nothing, "dynamo_config": None, "gpu_ids": nothing}, "run.yaml") == {}


def test_minus_one_process_leaves_the_number_to_be_found_out():
    assert parse_file({"num_processes": -1}, "run.yaml") == {}


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
        parse_file(content, "run.yaml")
    assert [part for part in parts if part not in str(caught.value)] == []


def test_all_keys_that_cannot_be_used_are_reported_at_once():
    with pytest.raises(SettingsError) as caught:
        parse_file({"num_proceses": 2, "num_machines": 0, "debug": True}, "run.yaml")
    answers = str(caught.value).splitlines()
    assert [line[:24] for line in answers] == [
        "several settings cannot ",
        "- key num_proceses of ru",
        "- key num_machines of ru",
    ]


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        ({"fp16": True}, {"mixed_precision": "fp16"}, "'fp16: True' is 'mixed_precision: fp16' now"),
        ({"dynamo_backend": "INDUCTOR"}, {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "dynamo_config."),
        ({"distributed_type": "TPU"}, {"distributed_type": "XLA"}, "XLA"),
        ({"use_mps_device": True}, {}, "no longer needed"),
        ({"ipex_config": {"ipex": False}}, {}, "no longer needed"),
        (
            {"fsdp_config": {"min_num_params": 2000, "sharding_strategy": 1}},
            {
                "fsdp_config": {
                    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
                    "fsdp_min_num_params": 2000,
                    "fsdp_sharding_strategy": 1,
                }
            },
            "'fsdp_config.min_num_params' is 'fsdp_config.fsdp_min_num_params' now",
        ),
        ({"mpirun_config": {"mpirun_ccl": "1"}}, {"mpirun_config": {}}, "no longer needed"),
        (
            {"distributed_type": "TP", "tp_config": {"tp_size": 4}},
            {"distributed_type": "MULTI_GPU", "parallelism_config": {"parallelism_config_tp_size": 4}},
            "parallelism_config_tp_size",
        ),
    ],
)
def test_an_older_format_is_translated_and_says_so(old, new, note):
    translation = translate({**old, "num_machines": 1})
    assert translation.content == {**new, "num_machines": 1}
    assert any(note in one for one in translation.notes)
    assert parse_file(old, "run.yaml").keys() == parse_file(new, "run.yaml").keys()


@pytest.mark.parametrize(
    ("key", "value", "table", "expected"),
    [
        ("dynamo_backend", "INDUCTOR", "dynamo_config", {"dynamo_backend": "INDUCTOR"}),
        ("tp_config", {"tp_size": 4}, "parallelism_config", {"parallelism_config_tp_size": 4}),
    ],
)
def test_an_old_key_is_kept_beside_an_empty_table_and_a_value_in_its_place_is_refused(
    key, value, table, expected
):
    assert translate({key: value, table: None}).content == {table: expected}
    with pytest.raises(SettingsError, match=f"key {table} of run.yaml is 5: expected a table"):
        parse_file({key: value, table: 5}, "run.yaml")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"fp16": True, "mixed_precision": None}, {"mixed_precision": "fp16"}),
        ({"tpu_cluster": True, "tpu_use_cluster": None}, {"tpu_use_cluster": True}),
        (
            {"fsdp_config": {"min_num_params": 9, "fsdp_min_num_params": None}},
            {"fsdp_config": {"fsdp_min_num_params": 9, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}},
        ),
        (
            {
                "tp_config": {"tp_size": 4},
                "parallelism_config": {"parallelism_config_tp_size": None},
            },
            {"parallelism_config": {"parallelism_config_tp_size": 4}},
        ),
        ({"fp16": True, "mixed_precision": "bf16"}, {"mixed_precision": "bf16"}),
    ],
)
def test_an_old_key_counts_where_the_present_one_is_empty(content, expected):
    assert translate(content).content == expected


def test_the_present_format_needs_no_translation():
    assert translate(DOCUMENTED_FILE).notes == ()
    assert translate(DOCUMENTED_FILE).content == DOCUMENTED_FILE


@given(
    st.dictionaries(
        st.sampled_from(["fp16", "tp_config", "mpirun_config", "distributed_type", "dynamo_config", *BY_KEY]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
            max_leaves=4,
        ),
    )
)
def test_any_content_of_a_file_is_read_or_refused_with_a_sentence(content):
    with contextlib.suppress(SettingsError):
        merge_layers(parse_file(content, "run.yaml"))


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


def test_a_user_without_a_home_has_a_config_folder(monkeypatch) -> None:
    def home(*_: object):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr(Path, "expanduser", home)
    assert default_config_folder({}).name == "accelerate"
    assert default_config_folder({"HF_HOME": "/data"}) == Path("/data/accelerate")
