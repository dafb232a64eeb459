"""`MegatronLMPlugin`: every field, its sources, what is refused, and what is described to Megatron."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from accel_plugins.megatron.data import (
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    indexed_loaders,
    num_samples,
)
from accel_plugins.megatron.library import core
from accel_plugins.megatron.plugin import (
    DEFAULTS,
    MegatronLMPlugin,
    add_model_config_to_megatron_parser,
    scheduler_arguments,
)
from accel_plugins.megatron.strategy import groups_of
from accel_plugins.megatron.train_steps import avg_losses_across_data_parallel_group
from accel_state.errors import MissingDependencyError, SettingsError, UnsupportedError
from accel_state.libraries import is_installed
from accel_state.settings.engines import MegatronSettings

needs_megatron = pytest.mark.skipif(not is_installed("megatron_lm"), reason="needs megatron-core")


def adamw(**options):
    return torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.1, weight_decay=0.02, **options)


def model(name, **config):
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 4, "hidden_size": 32, "vocab_size": 96}
    instance = type(name, (nn.Module,), {})()
    instance.config = SimpleNamespace(**sizes, **config)
    return instance


def test_every_field_that_settings_have_is_one_of_the_plugin():
    names = {field.name for field in fields(MegatronLMPlugin)}
    assert {field.name for field in fields(MegatronSettings)} <= names


def test_nothing_said_means_the_documented_defaults():
    plugin = MegatronLMPlugin()
    assert {name: getattr(plugin, name) for name in DEFAULTS} == dict(DEFAULTS)
    assert (plugin.tp_degree, plugin.pp_degree, plugin.num_micro_batches) == (1, 1, 1)
    assert plugin.gradient_clipping == 1.0
    assert (plugin.eval_iters, plugin.eval_interval, plugin.min_lr) == (100, 1000, 0)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("tp_degree", "2", 2),
        ("gradient_clipping", "0.5", 0.5),
        ("use_distributed_optimizer", "true", True),
        ("no_save_optim", "yes", True),
        ("attention_dropout", "0.1", 0.1),
        ("recompute_granularity", "selective", "selective"),
    ],
)
def test_the_environment_sets_a_field_and_an_argument_wins(monkeypatch, name, text, value):
    monkeypatch.setenv(f"MEGATRON_LM_{name.upper()}", text)
    assert getattr(MegatronLMPlugin(), name) == value
    other = {"tp_degree": 4, "gradient_clipping": 2.0, "attention_dropout": 0.3}.get(name, False)
    other = "full" if name == "recompute_granularity" else other
    assert getattr(MegatronLMPlugin(**{name: other}), name) == other


def test_a_bad_value_names_its_variable(monkeypatch):
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "many")
    with pytest.raises(SettingsError, match="MEGATRON_LM_TP_DEGREE"):
        MegatronLMPlugin()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tp_degree", 0),
        ("pp_degree", True),
        ("num_micro_batches", 1.5),
        ("recompute_granularity", "some"),
        ("lr_decay_style", "WSD"),
        ("attention_backend", "fast"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_field(field, value):
    with pytest.raises(SettingsError, match=rf"MegatronLMPlugin\({field}=.*expected"):
        MegatronLMPlugin(**{field: value})


def test_all_bad_values_are_named_at_once():
    with pytest.raises(SettingsError, match=r"tp_degree=0.*; .*num_micro_batches=0"):
        MegatronLMPlugin(tp_degree=0, num_micro_batches=0)


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("use_custom_fsdp", True, "fsdp_version=2"),
        ("expert_model_parallel_size", 2, "no supported model has experts"),
        ("expert_tensor_parallel_size", 2, "no supported model has experts"),
        ("pipeline_model_parallel_split_rank", 1, "leave it out"),
        ("tensorboard_dir", "logs", "log_with='tensorboard'"),
        ("set_all_logging_options", True, "log_with='tensorboard'"),
    ],
)
def test_what_no_part_reads_is_refused_with_what_to_use_instead(field, value, instead):
    with pytest.raises(UnsupportedError, match=f"{field}={value!r}.*{instead}"):
        MegatronLMPlugin(**{field: value})


VIRTUAL = {"pp_degree": 2, "num_micro_batches": 4, "num_layers_per_virtual_pipeline_stage": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers_per_virtual_pipeline_stage": 1}, "needs pp_degree=2: add it"),
        ({"decoder_last_pipeline_num_layers": 1}, "needs pp_degree=2"),
        ({"optimizer_cpu_offload": True}, "needs use_precision_aware_optimizer=True"),
        ({"lr_decay_iters": 3, "lr_warmup_samples": 3}, "exclude each other"),
        ({"train_iters": 3, "train_samples": 3}, "exclude each other"),
        ({"lr_warmup_iters": 3, "lr_warmup_fraction": 0.1}, "exclude each other"),
        ({"train_samples": 3, "lr_decay_iters": 3}, "exclude each other"),
        ({**VIRTUAL, "decoder_last_pipeline_num_layers": 1}, "exclude each other"),
    ],
)
def test_what_excludes_each_other_or_lacks_what_it_needs_is_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        MegatronLMPlugin(**options)


def test_recompute_of_activations_is_the_selective_kind_and_full_has_its_defaults():
    assert MegatronLMPlugin(recompute_activations=True).recompute_granularity == "selective"
    full = MegatronLMPlugin(recompute_granularity="full")
    assert (full.recompute_method, full.recompute_num_layers) == ("uniform", 1)
    assert MegatronLMPlugin().recompute_method is None


def test_a_flag_for_the_attention_backend_stands_for_a_name():
    assert MegatronLMPlugin(attention_backend=True).attention_backend == "auto"
    assert MegatronLMPlugin(attention_backend=False).attention_backend == "unfused"


def test_arguments_have_the_names_that_megatron_gives_them():
    plugin = MegatronLMPlugin(
        tp_degree=2, pp_degree=2, sequence_parallelism=True, other_megatron_args={"foo": 1}
    )
    args = plugin.megatron_lm_default_args
    assert args["tensor_model_parallel_size"] == args["pipeline_model_parallel_size"] == 2
    assert (args["sequence_parallel"], args["clip_grad"], args["foo"]) == (True, 1.0, 1)


def test_a_global_batch_is_what_all_ranks_and_micro_batches_have_together():
    plugin = MegatronLMPlugin(num_micro_batches=3)
    plugin.set_training_args(4, 2)
    assert plugin.megatron_lm_default_args["global_batch_size"] == 24


def test_an_optimizer_is_described_and_others_are_refused():
    plugin = MegatronLMPlugin()
    plugin.set_optimizer_type(adamw(betas=(0.8, 0.9), eps=1e-6))
    args = plugin.megatron_lm_default_args
    assert (args["optimizer"], args["lr"], args["weight_decay"]) == ("adam", 0.1, 0.02)
    assert (args["adam_beta1"], args["adam_beta2"], args["adam_eps"]) == (0.8, 0.9, 1e-6)
    assert args["decoupled_weight_decay"] is True
    plugin.set_optimizer_type(torch.optim.Adam(nn.Linear(1, 1).parameters()))
    assert plugin.megatron_lm_default_args["decoupled_weight_decay"] is False
    plugin.set_optimizer_type(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0, momentum=0.9))
    assert plugin.megatron_lm_default_args["sgd_momentum"] == 0.9
    with pytest.raises(UnsupportedError, match=r"RMSprop.*AdamW"):
        plugin.set_optimizer_type(torch.optim.RMSprop(nn.Linear(1, 1).parameters()))
    with pytest.raises(UnsupportedError, match="amsgrad"):
        plugin.set_optimizer_type(adamw(amsgrad=True))


class NamedAdamW(torch.optim.AdamW):
    """Steps as AdamW does."""


class NoisyAdamW(torch.optim.AdamW):
    """Steps otherwise."""

    def step(self, closure=None):
        raise NotImplementedError


def test_an_optimizer_with_a_step_of_its_own_is_refused_as_it_would_not_be_called():
    parameters = [*nn.Linear(1, 1).parameters()]
    own = NamedAdamW(parameters, lr=0.3)  # the first object of a class, whose method torch wraps
    torch.optim.lr_scheduler.LambdaLR(own, lambda _: 1.0)
    plugin = MegatronLMPlugin()
    plugin.set_optimizer_type(own)
    assert plugin.megatron_lm_default_args["lr"] == 0.3
    with pytest.raises(UnsupportedError, match=r"NoisyAdamW has its own step\(\)"):
        plugin.set_optimizer_type(NoisyAdamW(parameters))


def scheduled(total=100, warmup=10, **options):
    plugin = MegatronLMPlugin(num_micro_batches=2, **options)
    plugin.set_training_args(4, 2)
    optimizer = adamw()
    plugin.set_optimizer_type(optimizer)
    plugin.set_scheduler_args(MegatronLMDummyScheduler(optimizer, total, warmup))
    return plugin.megatron_lm_default_args


def test_a_schedule_counts_the_batches_of_one_rank():
    args = scheduled()
    assert (args["train_iters"], args["lr_warmup_iters"]) == (50, 5)
    schedule = scheduler_arguments(args)
    assert (schedule["lr_warmup_steps"], schedule["lr_decay_steps"], schedule["wd_incr_steps"]) == (
        80,
        800,
        800,
    )
    assert (schedule["max_lr"], schedule["start_wd"], schedule["end_wd"]) == (0.1, 0.02, 0.02)


def test_the_fields_of_the_plugin_win_over_the_placeholder():
    args = scheduled(train_iters=20, lr_warmup_iters=2, lr_decay_iters=10)
    schedule = scheduler_arguments(args)
    assert (schedule["lr_warmup_steps"], schedule["lr_decay_steps"], schedule["wd_incr_steps"]) == (
        32,
        160,
        320,
    )
    schedule = scheduler_arguments(scheduled(train_samples=640, lr_warmup_fraction=0.25))
    assert (schedule["lr_warmup_steps"], schedule["lr_decay_steps"]) == (160, 640)
    schedule = scheduler_arguments(scheduled(train_samples=640, lr_warmup_samples=7, lr_decay_samples=320))
    assert (schedule["lr_warmup_steps"], schedule["lr_decay_steps"], schedule["wd_incr_steps"]) == (
        7,
        320,
        640,
    )


def test_a_schedule_without_a_length_is_refused():
    with pytest.raises(SettingsError, match="total_num_steps"):
        scheduled(total=None)


@needs_megatron
def test_megatron_runs_the_schedule_as_it_is_described():
    optimizer = adamw()
    args = scheduled(min_lr=0.01)
    kind = core("optimizer_param_scheduler").OptimizerParamScheduler
    scheduler = kind(optimizer, **scheduler_arguments(args))
    rates = []
    for _ in range(50):
        scheduler.step(args["global_batch_size"])
        rates.append(optimizer.param_groups[0]["lr"])
    wanted = [0.1 * step / 5 if step <= 5 else 0.01 + 0.09 * (50 - step) / 45 for step in range(1, 51)]
    assert rates == pytest.approx(wanted)


CONFIGS = {
    "gpt2": {
        "n_layer": 4,
        "n_embd": 32,
        "n_inner": None,
        "n_head": 4,
        "n_positions": 64,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-5,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "bert": {
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
        "max_position_embeddings": 64,
        "type_vocab_size": 2,
    },
    "t5": {
        "num_layers": 3,
        "num_decoder_layers": 4,
        "d_model": 32,
        "d_ff": 64,
        "num_heads": 4,
        "d_kv": 8,
        "dense_act_fn": "relu",
        "is_gated_act": False,
        "layer_norm_epsilon": 1e-5,
        "dropout_rate": 0.0,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
    },
}


def configured(name, model_type):
    instance = type(name, (nn.Module,), {})()
    shared = {"vocab_size": 96, "tie_word_embeddings": True, "model_type": model_type, "num_labels": 2}
    instance.config = SimpleNamespace(**CONFIGS[model_type], **shared)
    return instance


@pytest.mark.parametrize(
    ("kind", "name", "family"), [("gpt2", "GPT2LMHeadModel", "gpt"), ("bert", "Bert", "bert")]
)
def test_the_sizes_of_a_model_are_described(kind, name, family):
    plugin = MegatronLMPlugin()
    plugin.set_network_size_args(configured(name, kind))
    args = plugin.megatron_lm_default_args
    assert (args["model_type_name"], args["num_layers"], args["hidden_size"]) == (family, 4, 32)
    assert (args["seq_length"], plugin.seq_length) == (64, 64)


def test_sequences_are_as_long_as_those_of_a_batch():
    plugin = MegatronLMPlugin()
    batch = {"input_ids": torch.zeros(2, 17), "labels": torch.zeros(2, 9)}
    plugin.set_network_size_args(configured("T5", "t5"), batch)
    assert (plugin.encoder_seq_length, plugin.decoder_seq_length) == (17, 9)
    assert plugin.megatron_lm_default_args["num_layers"] == 3


def test_a_type_of_model_can_be_added():
    with pytest.raises(SettingsError, match="add_model_config_to_megatron_parser"):
        MegatronLMPlugin().set_network_size_args(model("Mine", model_type="mine"))

    @add_model_config_to_megatron_parser("mine")
    def describe(plugin, network, batch):
        plugin.megatron_lm_default_args["num_layers"] = network.config.num_hidden_layers

    plugin = MegatronLMPlugin()
    plugin.set_network_size_args(model("Mine", model_type="mine"))
    assert plugin.megatron_lm_default_args["num_layers"] == 4


def test_ranks_are_divided_into_groups():
    sizes = MegatronLMPlugin(tp_degree=2, pp_degree=2, context_parallel_size=2)
    assert groups_of(sizes, 16, 0).data == 2
    with pytest.raises(SettingsError, match=r"tp_degree=2.* groups of 4 ranks, into which 6"):
        groups_of(MegatronLMPlugin(tp_degree=2, pp_degree=2), 6, 0)


@needs_megatron
def test_other_arguments_are_fields_of_megatron_s_configurations():
    configs = [core("optimizer").OptimizerConfig, core("transformer").TransformerConfig]
    other = {"init_method_std": 0.01, "log_num_zeros_in_grad": True}
    plugin = MegatronLMPlugin(other_megatron_args=other)
    assert plugin.other_args(configs[1]) == {"init_method_std": 0.01}
    assert plugin.other_args(configs[0]) == {"log_num_zeros_in_grad": True}


def test_precisions_that_the_engine_has_are_entered():
    plugin = MegatronLMPlugin()
    plugin.set_mixed_precision("bf16")
    assert plugin.megatron_lm_default_args["bf16"] is True
    with pytest.raises(UnsupportedError, match="'fp8'"):
        plugin.set_mixed_precision("fp8")
    with pytest.raises(UnsupportedError, match="log_with"):
        plugin.set_tensorboard_logging_options()


def test_losses_are_not_averaged_before_there_are_groups():
    wanted = SettingsError if is_installed("megatron_lm") else MissingDependencyError
    with pytest.raises(wanted, match="avg_losses_across_data_parallel_group"):
        avg_losses_across_data_parallel_group([torch.ones(())])


def test_the_placeholder_of_loaders_needs_an_accelerator():
    with pytest.raises(SettingsError, match="megatron_lm_plugin"):
        MegatronLMDummyDataLoader(data_path="x").set_megatron_data_args()


@pytest.fixture
def corpus(tmp_path):
    """Thirty documents of ten tokens: 0 to 299."""
    builder = core("datasets.indexed_dataset").IndexedDatasetBuilder(str(tmp_path / "corpus.bin"))
    for start in range(0, 300, 10):
        builder.add_document(np.arange(start, start + 10), [10])
    builder.finalize(str(tmp_path / "corpus.idx"))
    return str(tmp_path / "corpus")


def provider_of(corpus, plugin, **options):
    plugin.set_training_args(2, 1)
    state = SimpleNamespace(megatron_lm_plugin=plugin)
    data = MegatronLMDummyDataLoader(data_path=[corpus], splits_string="8,1,1", seq_length=5, **options)
    return data.get_train_valid_test_datasets_provider(SimpleNamespace(state=state))


@needs_megatron
@pytest.mark.filterwarnings("ignore")
def test_indexed_data_sets_have_every_token_once(corpus):
    plugin = MegatronLMPlugin(train_samples=40, eval_iters=1, eval_interval=1000)
    provider = provider_of(corpus, plugin)
    assert num_samples(plugin) == (40, 2, 2)
    train, valid, test = indexed_loaders(plugin, provider(num_samples(plugin)))
    batches = list(train)
    assert {batch["tokens"].shape for batch in batches} == {(2, 5)}
    assert all(torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1]) for batch in batches)
    tokens = torch.cat([batch["tokens"].flatten() for batch in batches]).tolist()
    assert len(tokens) == len(set(tokens)) == 230
    assert set(tokens) <= set(range(240))
    assert 240 <= next(iter(valid))["tokens"].min() < 270 <= next(iter(test))["tokens"].min()
    plugin.consumed_samples = [8, 0, 0]
    again = list(indexed_loaders(plugin, provider(num_samples(plugin)))[0])
    assert torch.equal(again[0]["tokens"], batches[4]["tokens"])
    plugin.consumed_samples = [8]
    with pytest.raises(
        SettingsError, match=r"consumed_samples=\[8\].*one number for each of the 3 data sets"
    ):
        indexed_loaders(plugin, [None] * 3)


@needs_megatron
def test_ends_of_documents_are_known_to_data_sets_that_leave_them_out_of_the_loss(corpus):
    plugin = MegatronLMPlugin(train_samples=40, eod_mask_loss=True)
    with pytest.raises(SettingsError, match=r"eod_mask_loss=True.*tokenizer"):
        provider_of(corpus, plugin)((1, 1, 1))
    provider_of(corpus, plugin, tokenizer=Words())((1, 1, 1))


class Words:
    """A tokenizer whose last token ends a document."""

    eos_token_id = 299
    name_or_path = "words"

    def __len__(self):
        return 300


@needs_megatron
def test_options_of_data_sets_that_are_unknown_or_missing_are_refused(corpus):
    plugin = MegatronLMPlugin(train_samples=40)
    with pytest.raises(TypeError, match="unexpected keyword argument 'path_to_cach'"):
        provider_of(corpus, plugin, path_to_cach="x")((1, 1, 1))
    with pytest.raises(SettingsError, match="micro_batch_size"):
        num_samples(MegatronLMPlugin(train_samples=40))
