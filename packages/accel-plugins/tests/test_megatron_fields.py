"""Every field of `MegatronLMPlugin` is read by something, or refused."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

import accel_plugins.megatron as package
from accel_plugins.megatron.arguments import scheduler_arguments
from accel_plugins.megatron.checks import check_kind, check_offload
from accel_plugins.megatron.data import MegatronLMDummyScheduler
from accel_plugins.megatron.optimizer import (
    check_other_args,
    ddp_config,
    optimizer_config,
    optimizer_values,
    parameter_factors,
    transformer_config,
)
from accel_plugins.megatron.plugin import UNSUPPORTED, MegatronLMPlugin
from accel_plugins.megatron.stages import virtual_stages
from accel_plugins.megatron.strategy import groups_of
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.libraries import is_installed
from accel_state.settings.engines import MegatronSettings

FIELDS = [field.name for field in fields(MegatronLMPlugin)]
SOURCES = [*Path(package.__file__).parent.glob("*.py")]
DESCRIBING = {"plugin.py"}
"""The module that checks every field, which by itself is no effect."""


def names_read():
    """Attributes that are read, and keys by which Megatron's arguments are read."""
    names = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and path.name not in DESCRIBING:
                names.add(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                names.add(node.slice.value)
            elif isinstance(node, ast.Dict) and path.name not in DESCRIBING:
                names |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return names


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_read_or_refused(name):
    assert (name in names_read() or name in RECEIVED) is not (name in UNSUPPORTED)


OTHER = {"use_custom_fsdp": True, "set_all_logging_options": True, "tensorboard_dir": "logs"}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_refused_says_what_to_use_instead(name):
    with pytest.raises(UnsupportedError, match=rf"{name}=.* is not supported: .{{10}}"):
        MegatronLMPlugin(**{name: OTHER.get(name, 2)})


SIZES = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4}


def received(options):
    """What megatron-core receives: the sizes of groups, its configurations and its schedule."""
    plugin = MegatronLMPlugin(**options)
    groups = groups_of(plugin, 8, 3)
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.02)
    plugin.set_training_args(2, groups.data)
    plugin.set_optimizer_type(optimizer)
    plugin.set_scheduler_args(MegatronLMDummyScheduler(optimizer, 800, 8))
    virtual = virtual_stages(plugin, SIZES["num_layers"])
    configs = (
        transformer_config(plugin, SIZES, "no", virtual),
        ddp_config(plugin),
        optimizer_config(plugin, optimizer, "no"),
    )
    values = [
        {name: value for name, value in vars(config).items() if not callable(value)} for config in configs
    ]
    factors = parameter_factors(plugin, "weight", layer.weight)
    return groups, *values, scheduler_arguments(plugin.megatron_lm_default_args), factors


RECEIVED = {
    "tp_degree": (2, {}),
    "pp_degree": (2, {}),
    "context_parallel_size": (2, {}),
    "decoder_last_pipeline_num_layers": (1, {"pp_degree": 2}),
    "recompute_granularity": ("full", {}),
    "recompute_method": ("block", {"recompute_granularity": "full"}),
    "recompute_num_layers": (2, {"recompute_granularity": "full"}),
    "recompute_activations": (True, {}),
    "attention_backend": ("local", {}),
    "attention_dropout": (0.3, {}),
    "hidden_dropout": (0.3, {}),
    "attention_softmax_in_fp32": (False, {}),
    "calculate_per_token_loss": (True, {}),
    "gradient_clipping": (0.5, {}),
    "sequence_parallelism": (True, {"tp_degree": 2}),
    "use_distributed_optimizer": (True, {}),
    "num_layers_per_virtual_pipeline_stage": (1, {"pp_degree": 2, "num_micro_batches": 2}),
    "num_micro_batches": (2, {}),
    "train_iters": (300, {}),
    "train_samples": (9000, {}),
    "weight_decay_incr_style": ("linear", {}),
    "start_weight_decay": (0.01, {"end_weight_decay": 0.05, "weight_decay_incr_style": "linear"}),
    "end_weight_decay": (0.06, {"start_weight_decay": 0.01, "weight_decay_incr_style": "linear"}),
    "lr_decay_style": ("cosine", {}),
    "lr_decay_iters": (50, {}),
    "lr_decay_samples": (500, {"train_samples": 9000}),
    "lr_warmup_iters": (3, {}),
    "lr_warmup_samples": (30, {"train_samples": 9000}),
    "lr_warmup_fraction": (0.2, {}),
    "min_lr": (0.01, {}),
    "no_wd_decay_cond": (lambda name, _: name == "weight", {}),
    "scale_lr_cond": (lambda name, _: name == "weight", {"lr_mult": 0.5}),
    "lr_mult": (0.5, {"scale_lr_cond": lambda name, _: name == "weight"}),
    "other_megatron_args": ({"init_method_std": 0.5}, {}),
}
"""A value of each field that megatron-core receives, and what it needs beside itself."""
PAIRS = {"start_weight_decay": {"start_weight_decay": 0.02}, "end_weight_decay": {"end_weight_decay": 0.05}}
WITHOUT = {"scale_lr_cond": {"lr_mult"}}


@pytest.mark.skipif(not is_installed("megatron_lm"), reason="needs megatron-core")
@pytest.mark.filterwarnings("ignore")  # of megatron-core
@pytest.mark.parametrize("name", RECEIVED)
def test_megatron_core_receives_a_field(name):
    value, beside = RECEIVED[name]
    before = {key: value for key, value in beside.items() if key not in WITHOUT.get(name, ())}
    assert received(beside | {name: value}) != received(before | PAIRS.get(name, {}))


ROPE = {"positions": "rope", "has_engine": False}
LEARNED = {"positions": "learned_absolute", "has_engine": False}


@pytest.mark.parametrize(
    ("options", "kind", "beside", "text"),
    [
        ({"use_rotary_position_embeddings": True}, "gpt", LEARNED, "its configuration decides"),
        ({"use_rotary_position_embeddings": False}, "gpt", ROPE, "its configuration decides"),
        ({"context_parallel_size": 2}, "bert", LEARNED, "only sequences of decoders"),
        ({"attention_backend": "flash"}, "gpt", ROPE, "transformer-engine"),
        ({"attention_backend": "fused"}, "t5", ROPE | {"has_engine": True}, "transformer-engine"),
    ],
)
def test_options_that_a_kind_of_model_does_not_have_are_refused(options, kind, beside, text):
    (name,) = options
    with pytest.raises(UnsupportedError, match=rf"{name}={options[name]!r} \(.*{text}.*'?Leave them out"):
        check_kind(MegatronLMPlugin(**options), kind, "mine", **beside)


@pytest.mark.parametrize(
    ("options", "kind", "beside"),
    [
        ({}, "gpt", ROPE),
        ({"use_rotary_position_embeddings": True}, "gpt", ROPE),
        ({"use_rotary_position_embeddings": False}, "bert", {"positions": None, "has_engine": None}),
        ({"context_parallel_size": 2}, "gpt", ROPE),
        ({"attention_backend": "flash"}, "gpt", ROPE | {"has_engine": True}),
        ({"attention_backend": "flash"}, "gpt", ROPE | {"has_engine": None}),
        ({"attention_backend": "local"}, "bert", LEARNED),
        ({"attention_softmax_in_fp32": False}, "gpt", ROPE),
        ({"calculate_per_token_loss": True}, "gpt", ROPE),
        ({"encoder_seq_length": 8, "decoder_seq_length": 8}, "t5", ROPE),
    ],
)
def test_options_with_an_effect_are_not_refused(options, kind, beside):
    check_kind(MegatronLMPlugin(**options), kind, "mine", **beside)


AWARE = {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True}


def test_an_optimizer_is_offloaded_as_a_whole():
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    plain = optimizer_values(MegatronLMPlugin(**AWARE), optimizer, "no")
    offloaded = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
    changed = optimizer_values(MegatronLMPlugin(**AWARE, **offloaded), optimizer, "no")
    assert {name: changed[name] for name in offloaded} == offloaded
    assert (plain["optimizer_offload_fraction"], changed["optimizer_offload_fraction"]) == (0, 1)
    assert plain["use_precision_aware_optimizer"] is True


def test_an_optimizer_that_megatron_core_cannot_offload_is_refused():
    layer = nn.Linear(2, 2)
    plugin = MegatronLMPlugin(**AWARE, optimizer_cpu_offload=True)
    check_offload(plugin, torch.optim.AdamW(layer.parameters()))
    check_offload(MegatronLMPlugin(), torch.optim.SGD(layer.parameters()))
    with pytest.raises(UnsupportedError, match=r"optimizer_cpu_offload=True.*AdamW, not for Adam:"):
        check_offload(plugin, torch.optim.Adam(layer.parameters()))


@pytest.mark.skipif(not is_installed("megatron_lm"), reason="needs megatron-core")
def test_a_further_argument_that_no_configuration_has_is_refused():
    check_other_args(MegatronLMPlugin(other_megatron_args={"overlap_grad_reduce": True}))
    plugin = MegatronLMPlugin(other_megatron_args={"overlap_grad_reduc": True})
    with pytest.raises(SettingsError, match=r"overlap_grad_reduc=True.*did you mean 'overlap_grad_reduce'"):
        check_other_args(plugin)
    plugin.custom_loss_function = len  # which may read it
    check_other_args(plugin)


VALUES = {
    bool: ("true", True),
    int: ("2", 2),
    float: ("0.25", 0.25),
}
WORDS = {
    "recompute_granularity": "full",
    "recompute_method": "block",
    "attention_backend": "local",
}
NEEDED = {
    "sequence_parallelism": {"tp_degree": 2},
    "decoder_last_pipeline_num_layers": {"pp_degree": 2},
    "recompute_method": {"recompute_granularity": "full"},
    "recompute_num_layers": {"recompute_granularity": "full"},
    "optimizer_cpu_offload": AWARE,
    "overlap_cpu_optimizer_d2h_h2d": {**AWARE, "optimizer_cpu_offload": True},
    "use_precision_aware_optimizer": {"use_distributed_optimizer": True},
}


def spoken(field):
    """What a variable says for a field of the settings, and the value that it means."""
    if field.name in WORDS:
        return WORDS[field.name], WORDS[field.name]
    return next(VALUES[kind] for kind in VALUES if field.type.startswith(kind.__name__))


@pytest.mark.parametrize("field", fields(MegatronSettings), ids=lambda field: field.name)
def test_a_variable_reaches_its_field_or_is_refused_by_its_name(field, monkeypatch):
    text, value = spoken(field)
    variable = f"MEGATRON_LM_{field.name.upper()}"
    monkeypatch.setenv(variable, text)
    if field.name in UNSUPPORTED:
        with pytest.raises(UnsupportedError, match=rf"{variable}.* is not supported: "):
            MegatronLMPlugin()
        return
    actual = getattr(MegatronLMPlugin(**NEEDED.get(field.name, {})), field.name)
    assert actual == value
    assert type(actual) is type(value)
