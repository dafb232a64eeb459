"""Every field of `MegatronLMPlugin` is read by something, or refused."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import accel_plugins.megatron as package
from accel_plugins.megatron.data import MegatronLMDummyScheduler
from accel_plugins.megatron.optimizer import (
    check_other_args,
    ddp_config,
    optimizer_config,
    parameter_factors,
    transformer_config,
)
from accel_plugins.megatron.plugin import UNSUPPORTED, MegatronLMPlugin, check_model, scheduler_arguments
from accel_plugins.megatron.strategy import groups_of
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.libraries import is_installed
from accel_state.settings.engines import MegatronSettings

FIELDS = [field.name for field in fields(MegatronLMPlugin)]
SOURCES = [*Path(package.__file__).parent.glob("*.py")]
DESCRIBING = {"plugin.py"}
"""The module that checks every field, which by itself is no effect."""
FOR_TRAIN_STEPS = {"encoder_seq_length", "decoder_seq_length"}
"""Fields that only a user's train step reads."""


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
    assert (name in names_read() | FOR_TRAIN_STEPS or name in RECEIVED) is not (name in UNSUPPORTED)


OTHER = {"use_custom_fsdp": True, "set_all_logging_options": True, "tensorboard_dir": "logs"}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_refused_says_what_to_use_instead(name):
    with pytest.raises(UnsupportedError, match=rf"{name}=.* is not supported: .{{10}}"):
        MegatronLMPlugin(**{name: OTHER.get(name, 2)})


AWARE = {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True}
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
    configs = (
        transformer_config(plugin, SIZES, "no"),
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
    "use_precision_aware_optimizer": (True, {"use_distributed_optimizer": True}),
    "optimizer_cpu_offload": (True, AWARE),
    "overlap_cpu_optimizer_d2h_h2d": (True, AWARE | {"optimizer_cpu_offload": True}),
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
WITH_ENGINE = {"use_precision_aware_optimizer", "optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"}
WITHOUT = {"scale_lr_cond": {"lr_mult"}}


@pytest.mark.skipif(not is_installed("megatron_lm"), reason="needs megatron-core")
@pytest.mark.filterwarnings("ignore")  # of megatron-core
@pytest.mark.parametrize("name", RECEIVED)
def test_megatron_core_receives_a_field(name):
    if name in WITH_ENGINE and not is_installed("transformer_engine"):
        pytest.skip("needs TransformerEngine")
    value, beside = RECEIVED[name]
    before = {key: value for key, value in beside.items() if key not in WITHOUT.get(name, ())}
    assert received(beside | {name: value}) != received(before | PAIRS.get(name, {}))


def model_of(kind):
    """A model of transformers' by its class name and configuration, without weights."""
    name, config = MODELS[kind]
    instance = type(name, (nn.Module,), {})()
    instance.config = SimpleNamespace(model_type=kind, vocab_size=96, tie_word_embeddings=True, **config)
    return instance


GPT2 = {"n_layer": 4, "n_embd": 32, "n_inner": None, "n_head": 4, "n_positions": 64, "embd_pdrop": 0.0}
GPT2 |= {"activation_function": "gelu", "layer_norm_epsilon": 1e-5, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
LLAMA = {"num_hidden_layers": 6, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "attention_dropout": 0.0}
LLAMA |= {"hidden_act": "silu", "max_position_embeddings": 64, "rope_parameters": {"rope_theta": 1e4}}
BERT = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
BERT |= {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "attention_probs_dropout_prob": 0.0}
BERT |= {"hidden_dropout_prob": 0.0, "max_position_embeddings": 64, "type_vocab_size": 2, "num_labels": 2}
T5 = {"num_layers": 4, "num_decoder_layers": 4, "d_model": 32, "d_ff": 64, "num_heads": 4, "d_kv": 8}
T5 |= {"dense_act_fn": "relu", "is_gated_act": False, "layer_norm_epsilon": 1e-5, "dropout_rate": 0.0}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", LLAMA),
    "bert": ("BertForMaskedLM", BERT),
    "t5": ("T5ForConditionalGeneration", T5),
}


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"use_rotary_position_embeddings": True}, "gpt2", "its configuration decides"),
        ({"use_rotary_position_embeddings": False}, "llama", "its configuration decides"),
        ({"context_parallel_size": 2}, "bert", "decoders only"),
        ({"attention_backend": "fused"}, "t5", "decoders only"),
    ],
)
def test_options_that_a_kind_of_model_does_not_have_are_refused(options, kind, text):
    (name,) = options
    with pytest.raises(
        UnsupportedError, match=rf"'{kind}' .*{name}={options[name]!r} \({text}\): leave it out"
    ):
        check_model(MegatronLMPlugin(**options), model_of(kind))


VIRTUAL = {"pp_degree": 2, "num_micro_batches": 4, "num_layers_per_virtual_pipeline_stage": 1}


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"tp_degree": 3}, "llama", "LlamaForCausalLM cannot be divided .*4 attention heads by tp_degree=3"),
        ({"tp_degree": 3}, "llama", "2 key-value heads"),
        ({"pp_degree": 4}, "llama", "6 layers by pp_degree=4"),
        (
            {**VIRTUAL, "num_layers_per_virtual_pipeline_stage": 2},
            "llama",
            "6 layers by pp_degree=2, num_layers_per_virtual_pipeline_stage=2",
        ),
        (
            {"pp_degree": 3, "decoder_last_pipeline_num_layers": 1},
            "llama",
            "6 layers by pp_degree=3, decoder_last_pipeline_num_layers=1",
        ),
        ({"pp_degree": 2}, "t5", r"an encoder and a decoder by pp_degree=2 \(use tp_degree"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(options, kind, message):
    with pytest.raises(SettingsError, match=message):
        check_model(MegatronLMPlugin(**options), model_of(kind))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "llama"),
        ({"use_rotary_position_embeddings": True}, "llama"),
        ({"use_rotary_position_embeddings": False}, "bert"),
        ({"context_parallel_size": 2}, "llama"),
        ({"attention_backend": "flash"}, "gpt2"),
        ({"attention_backend": "local"}, "bert"),
        ({"tp_degree": 2, "use_distributed_optimizer": True}, "t5"),
        ({"tp_degree": 4}, "llama"),
        ({"pp_degree": 3}, "llama"),
        ({**VIRTUAL, "num_layers_per_virtual_pipeline_stage": 3}, "llama"),
        ({"pp_degree": 3, "decoder_last_pipeline_num_layers": 2}, "llama"),
    ],
)
def test_options_and_sizes_that_a_model_has_are_not_refused(options, kind):
    assert check_model(MegatronLMPlugin(**options), model_of(kind)).name == kind


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
