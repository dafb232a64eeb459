"""The DeepSpeed configuration and its plugin; DeepSpeed itself is not needed."""

from __future__ import annotations

import base64
import copy
import json
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_plugins.deepspeed.config import (
    DummyOptim,
    DummyScheduler,
    HfDeepSpeedConfig,
    autofill,
    batch_size_of,
    fill,
    hidden_size_of,
    open_keys,
    read_config,
)
from accel_plugins.deepspeed.library import load_library
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin, get_active_deepspeed_plugin
from accel_plugins.deepspeed.strategy import check_request
from accel_plugins.strategy import Bundle
from accel_state.environ import clear_environment, patch_environment
from accel_state.errors import MissingDependencyError, SettingsError, UnsupportedError
from accel_state.libraries import installed_version, is_deepspeed_available

if TYPE_CHECKING:
    from pathlib import Path

ZERO2 = {"zero_optimization": {"stage": 2}}
KEY = st.sampled_from(["a", "b", "c", "d"])
CONFIGS = st.recursive(
    st.dictionaries(KEY, st.integers() | st.just("auto") | st.booleans(), max_size=3),
    lambda inner: st.dictionaries(KEY, inner | st.integers() | st.just("auto"), max_size=3),
    max_leaves=8,
)


def leaves(config, prefix=""):
    """Yield the dotted keys of the values that are not dictionaries."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def values_of(config: dict[str, Any]) -> dict[str, Any]:
    return {key: HfDeepSpeedConfig(config).get_value(key) for key in leaves(config)}


def without_variables(**fields: Any) -> DeepSpeedPlugin:
    with clear_environment():
        return DeepSpeedPlugin(**fields)


# --------------------------------------------------------------------------- reading


def test_a_configuration_is_read_from_a_dictionary_a_path_and_base64_alike(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO2))
    encoded = base64.urlsafe_b64encode(json.dumps(ZERO2).encode()).decode()
    for source in (ZERO2, path, str(path), encoded):
        assert HfDeepSpeedConfig(source).config == ZERO2


def test_what_is_filled_in_does_not_come_back_to_the_dictionary_of_the_caller():
    configuration = {"train_batch_size": "auto", "zero_optimization": {"stage": 2}}
    before = copy.deepcopy(configuration)
    without_variables(hf_ds_config=configuration, zero_stage=2).deepspeed_config_process(train_batch_size=8)
    assert configuration == before


@pytest.mark.parametrize(
    ("content", "story"),
    [("[1]", "must be one object"), ("{", "cannot be read: Expecting property name")],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path, content, story):
    path = tmp_path / "ds.json"
    path.write_text(content)
    with pytest.raises(SettingsError, match=rf"(?s)ds\.json.*{story}"):
        read_config(path)


@pytest.mark.parametrize("source", ["no/such/file.json", 3, None])
def test_what_is_nowhere_to_be_found_is_named(source):
    with pytest.raises(SettingsError, match=repr(source)):
        read_config(source)


@given(CONFIGS)
def test_every_leaf_is_found_by_its_key(config):
    asked = HfDeepSpeedConfig(config)
    for key, value in values_of(config).items():
        assert asked.get_value(key) == value
        node, last = asked.find_config_node(key)
        assert node is not None
        assert node[last] == value


@given(CONFIGS)
def test_a_tree_that_was_deleted_is_gone_and_the_rest_is_there(config):
    for doomed in [*config]:
        asked = HfDeepSpeedConfig(config)
        asked.del_config_sub_tree(doomed, must_exist=True)
        assert asked.config == {name: value for name, value in config.items() if name != doomed}
        with pytest.raises(ValueError, match=doomed):
            asked.del_config_sub_tree(doomed, must_exist=True)
        asked.del_config_sub_tree(doomed)


def test_questions_about_stages_and_offloading():
    zero3 = HfDeepSpeedConfig({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})
    assert (zero3.is_zero3(), zero3.is_zero2(), zero3.is_offload()) == (True, False, True)
    zero1 = HfDeepSpeedConfig({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}})
    assert (zero1.is_zero3(), zero1.is_zero2(), zero1.is_offload()) == (False, False, False)
    flags = HfDeepSpeedConfig({"bf16": {"enabled": True}, "fp16": {"enabled": False}})
    assert (flags.is_true("bf16.enabled"), flags.is_false("bf16.enabled")) == (True, False)
    assert (flags.is_true("fp16.enabled"), flags.is_false("fp16.enabled")) == (False, True)
    assert (flags.is_true("amp.enabled"), flags.is_false("amp.enabled")) == (False, False)


# --------------------------------------------------------------------------- filling


@given(CONFIGS, st.dictionaries(st.sampled_from(["a", "b", "a.b", "a.b.c", "d.a"]), st.integers()))
def test_filling_changes_what_is_open_and_known_and_nothing_else(config, values):
    filled = copy.deepcopy(config)
    mismatches = fill(filled, {key: (value, "test") for key, value in values.items()})
    after, before = values_of(filled), values_of(config)
    for key, value in before.items():
        expected = values.get(key, "auto") if value == "auto" else value
        assert after[key] == expected
    assert after.keys() == before.keys()
    assert {*open_keys(filled)} == {key for key, value in after.items() if value == "auto"}
    wrong = {
        key for key, value in before.items() if value != "auto" and _differs(value, values.get(key, value))
    }
    assert {mismatch.partition(" is ")[0] for mismatch in mismatches} == wrong


def _differs(value: Any, other: Any) -> bool:
    return isinstance(value, bool) != isinstance(other, bool) or value != other


def test_all_mismatches_are_reported_at_once_with_both_values_and_their_sources():
    config = {
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "offload_param": {"device": "none"}},
    }
    with pytest.raises(SettingsError) as failure:
        without_variables(
            hf_ds_config=config, zero_stage=3, gradient_clipping=0.5, offload_param_device="cpu"
        )
    story = str(failure.value)
    for part in (
        "zero_optimization.stage is 2 in the configuration, but 3 by DeepSpeedPlugin(zero_stage=3)",
        "gradient_clipping is 1.0 in the configuration, but 0.5 by DeepSpeedPlugin(gradient_clipping=0.5)",
        "offload_param.device is 'none' in the configuration, but 'cpu'",
    ):
        assert part in story


def test_a_mismatch_with_the_environment_names_the_variable():
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    with (
        clear_environment(),
        patch_environment(**variables),
        pytest.raises(SettingsError, match=r"3 by .*ACCELERATE_DEEPSPEED_ZERO_STAGE"),
    ):
        DeepSpeedPlugin(hf_ds_config=ZERO2)


def test_the_environment_stands_for_fields_that_were_not_given():
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    }
    with clear_environment(), patch_environment(**variables):
        plugin = DeepSpeedPlugin(gradient_clipping=2.0)
    assert plugin.deepspeed_config["zero_optimization"] == {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    assert (plugin.gradient_clipping, plugin.zero_stage) == (2.0, 3)


def test_a_configuration_fills_the_fields_of_the_plugin():
    config = {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}},
    }
    plugin = without_variables(hf_ds_config=config)
    assert (plugin.zero_stage, plugin.gradient_accumulation_steps, plugin.gradient_clipping) == (3, 4, None)
    assert (plugin.offload_optimizer_device, plugin.offload_optimizer_nvme_path) == ("nvme", "/disk")
    assert plugin.zero3_init_flag is True


def test_without_anything_the_stage_is_2():
    plugin = without_variables()
    assert plugin.zero_stage == 2
    assert plugin.is_auto("train_batch_size")
    assert plugin.is_zero3_init_enabled() is False


@pytest.mark.parametrize(
    ("fields", "story"),
    [
        ({"zero_stage": 4}, "zero_optimization.stage=4"),
        ({"zero_stage": 2, "offload_param_device": "cpu"}, "offload_param to 'cpu' needs ZeRO stage 3.*is 2"),
        ({"zero_stage": 0, "offload_optimizer_device": "cpu"}, "needs ZeRO stage 1"),
        ({"zero_stage": 3, "offload_param_device": "nvme"}, "offload_param_nvme_path"),
        ({"is_train_batch_min": "no"}, "is_train_batch_min='no'"),
        ({"hf_ds_config": {"zero_optimization": True}}, "zero_optimization=True"),
        (
            {"hf_ds_config": {**ZERO2, "managed_gradient_accumulation": False}},
            "managed_gradient_accumulation",
        ),
    ],
)
def test_a_field_that_cannot_be_used_is_refused(fields, story):
    with pytest.raises(SettingsError, match=story):
        without_variables(**fields)


@pytest.mark.parametrize(
    "field",
    [{"zero3_init_flag": True}, {"zero3_save_16bit_model": True}, {"transformer_moe_cls_names": "Moe"}],
)
def test_what_belongs_to_stage_3_is_named_at_another(field, caplog):
    (name,) = field
    with caplog.at_level(logging.WARNING):
        without_variables(zero_stage=2, **field)
        without_variables(zero_stage=3, **field)
    assert [record.getMessage() for record in caplog.records] == [
        f"{name}={field[name]!r} has no effect with ZeRO stage 2."
    ]


@pytest.mark.parametrize("fields", [{"enable_msamp": True}, {"msamp_opt_level": "O1"}])
def test_msamp_is_refused(fields):
    with pytest.raises(UnsupportedError, match="MS-AMP"):
        without_variables(**fields)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_groups_of_adagrad_are_refused_where_zero_would_lose_them(stage):
    config, model = HfDeepSpeedConfig({"zero_optimization": {"stage": stage}}), torch.nn.Linear(2, 2)

    def check(*groups):
        optimizer = torch.optim.Adagrad([{"params": group} for group in groups])
        check_request(config, Bundle(models=[model], optimizers=[optimizer]), trains=False)

    check([*model.parameters()])
    if stage in {0, 3}:
        check([model.weight], [model.bias])
        return
    with pytest.raises(SettingsError, match=f"Adagrad with 2 parameter groups: stage {stage} of DeepSpeed"):
        check([model.weight], [model.bias])


# --------------------------------------------------------------------------- the documented methods


def test_processing_reports_all_that_contradicts_and_fills_all_that_is_open():
    config = {"train_batch_size": "auto", "optimizer": {"params": {"lr": 0.1}}, **ZERO2}
    plugin = without_variables(hf_ds_config=config)
    values = {"train_batch_size": 8, "optimizer.params.lr": 0.2, "zero_optimization.stage": 3}
    with pytest.raises(
        SettingsError, match=r"(?s)optimizer\.params\.lr is 0\.1.*zero_optimization\.stage is 2"
    ):
        plugin.deepspeed_config_process(**values)
    assert plugin.get_value("train_batch_size") == 8
    plugin.deepspeed_config_process(must_match=False, **values)
    assert plugin.get_value("optimizer.params.lr") == 0.1
    noted: list[str] = []
    plugin.fill_match("zero_optimization.stage", noted, **values)
    assert len(noted) == 1
    plugin.deepspeed_config["gradient_clipping"] = None
    plugin.fill_match("gradient_clipping", gradient_clipping=1.0)  # null contradicts nothing


def test_what_is_open_and_unknown_is_named():
    plugin = without_variables(hf_ds_config={"train_batch_size": "auto", **ZERO2})
    with pytest.raises(SettingsError, match="'auto' for train_batch_size"):
        plugin.fill_match("train_batch_size")


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_precision_of_the_run_is_that_of_the_engine(name):
    plugin = without_variables(zero_stage=1)
    plugin.set_mixed_precision(name)
    assert plugin.get_value(f"{name}.enabled") is True
    assert plugin.mixed_precision == name


def test_a_precision_that_the_configuration_has_stays():
    plugin = without_variables(hf_ds_config={"bf16": {"enabled": True}, **ZERO2})
    plugin.set_mixed_precision("no")
    assert plugin.mixed_precision == "bf16"
    with pytest.raises(SettingsError, match=r"bf16\.enabled is True.*mixed_precision='fp16'"):
        plugin.set_mixed_precision("fp16")
    with pytest.raises(UnsupportedError, match="fp8"):
        plugin.set_mixed_precision("fp8")


def test_an_open_precision_is_decided():
    plugin = without_variables(
        hf_ds_config={"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, **ZERO2}
    )
    plugin.set_mixed_precision("bf16")
    assert plugin.deepspeed_config["bf16"] == {"enabled": True}
    assert plugin.deepspeed_config["fp16"] == {"enabled": False}


def test_only_the_state_selects_a_plugin():
    plugin = without_variables()
    with pytest.raises(ValueError, match="select_deepspeed_plugin"):
        plugin.select()
    assert not plugin.selected
    plugin.select(_from_accelerator_state=True)
    assert plugin.selected
    plugin._unselect()
    assert not plugin.selected


def test_init_can_be_switched_within_a_block():
    plugin = without_variables(zero_stage=3)
    with plugin.zero3_init_context_manager(enable=False):
        assert not plugin.is_zero3_init_enabled()
    assert plugin.is_zero3_init_enabled()


def test_a_copy_of_a_plugin_does_not_share_its_configuration():
    plugin = without_variables(zero_stage=1)
    other = copy.deepcopy(plugin)
    other.deepspeed_config["gradient_clipping"] = 3.0
    assert plugin.get_value("gradient_clipping") is None


def test_asking_for_a_plugin_where_there_is_none():
    plugin = without_variables()
    assert get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugin=plugin)) is plugin
    with pytest.raises(ValueError, match="does not use DeepSpeed"):
        get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugin=None))


# --------------------------------------------------------------------------- preparation


@given(
    world=st.integers(1, 8),
    micro=st.none() | st.integers(1, 16),
    steps=st.integers(1, 4),
    said=st.fixed_dictionaries(
        {},
        optional={
            "train_batch_size": st.just("auto"),
            "train_micro_batch_size_per_gpu": st.just("auto") | st.integers(1, 16),
            "gradient_accumulation_steps": st.just("auto"),
        },
    ),
)
def test_the_three_sizes_of_a_batch_fit_each_other(world, micro, steps, said):
    config = autofill({**said, **ZERO2}, world_size=world, micro_batch=micro, accumulation=(steps, "test"))
    assert config["train_batch_size"] == world * steps * config["train_micro_batch_size_per_gpu"]
    assert config["gradient_accumulation_steps"] == steps
    asked = said.get("train_micro_batch_size_per_gpu", "auto")
    assert config["train_micro_batch_size_per_gpu"] == ((micro or 1) if asked == "auto" else asked)


def test_sizes_of_batches_that_do_not_fit_are_refused_together():
    config = {"train_batch_size": 7, "gradient_accumulation_steps": 2, **ZERO2}
    with pytest.raises(
        SettingsError, match=r"train_batch_size is 7.*16 by.*gradient_accumulation_steps is 2.*3 by"
    ):
        autofill(config, world_size=2, micro_batch=4, accumulation=(3, "Accelerator(...=3)"))


def test_sizes_of_buckets_come_from_the_width_of_the_model():
    zero = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    filled = autofill({"zero_optimization": zero}, hidden_size=10)["zero_optimization"]
    assert filled == {
        "stage": 3,
        "reduce_bucket_size": 100,
        "stage3_prefetch_bucket_size": 90,
        "stage3_param_persistence_threshold": 100,
    }
    assert autofill({"zero_optimization": zero})["zero_optimization"] == {"stage": 3}


def test_what_stands_for_an_optimizer_and_a_schedule_fills_theirs():
    optimizer = DummyOptim(torch.nn.Linear(1, 1).parameters(), lr=0.1, weight_decay=0.2, betas=[0.8, 0.9])
    schedule = DummyScheduler(optimizer, total_num_steps=100, warmup_num_steps=10)
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.5, "betas": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")},
        **ZERO2,
    }
    filled = autofill(config, optimizer=optimizer, scheduler=schedule, schedule_shards=4)
    assert filled["optimizer"]["params"] == {"lr": 0.1, "weight_decay": 0.5, "betas": [0.8, 0.9]}
    assert filled["scheduler"]["params"] == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 0.1,
        "warmup_num_steps": 3,
        "total_num_steps": 25,
    }


def test_all_that_stays_open_is_named():
    config = {
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": "auto"}},
        **ZERO2,
    }
    with pytest.raises(SettingsError, match=r"optimizer\.params\.lr='auto', optimizer\.params\.eps='auto'"):
        autofill(config)


@pytest.mark.parametrize(("smallest", "expected"), [(True, 2), (False, 4)])
def test_the_size_of_a_batch_is_that_of_the_loaders(smallest, expected):
    loaders = [torch.utils.data.DataLoader(range(8), batch_size=size) for size in (4, 8)]
    assert batch_size_of(loaders, smallest=smallest, split_into=2) == expected
    sampler = torch.utils.data.BatchSampler(range(8), batch_size=3, drop_last=False)
    assert (
        batch_size_of(
            [torch.utils.data.DataLoader(range(8), batch_sampler=sampler)], smallest=True, split_into=1
        )
        == 3
    )
    assert batch_size_of([], smallest=True, split_into=1) is None


def test_a_model_without_a_configuration_has_no_known_width():
    assert hidden_size_of(torch.nn.Linear(1, 1)) is None
    text = SimpleNamespace(config=SimpleNamespace(text_config=SimpleNamespace(hidden_size=7)))
    assert hidden_size_of(text) == 7


def test_a_class_that_the_model_does_not_have_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    plugin = without_variables(zero_stage=3, transformer_moe_cls_names="Linera")
    with pytest.raises(SettingsError, match=r"'Linera'; it has Linear, ReLU, Sequential"):
        plugin.set_moe_leaf_modules(model)


@pytest.mark.skipif(not is_deepspeed_available(), reason="deepspeed is not installed")
def test_a_deepspeed_that_is_older_than_the_tested_ones_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    metadata = tmp_path / "deepspeed-0.18.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.18.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed_version.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"needs deepspeed 0.19.8 or newer.*0.18.9 is inst"):
        load_library("the strategy 'deepspeed'")
    installed_version.cache_clear()


def test_a_configuration_file_that_is_no_text_is_refused(tmp_path: Path):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(SettingsError, match=r"bytes.json' cannot be read: 'utf-8' codec"):
        HfDeepSpeedConfig(tmp_path / "bytes.json")
