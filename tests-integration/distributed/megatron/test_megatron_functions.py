"""Megatron with the user's own functions, in float16, and beside itself."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from accel_ops.modules import extract_model_from_parallel
from accel_plugins.megatron.data import MegatronLMDummyScheduler
from accel_plugins.megatron.families import GPT2
from accel_plugins.megatron.library import core
from accel_plugins.megatron.plugin import MegatronLMPlugin, add_model_config_to_megatron_parser
from accel_plugins.megatron.stages import gather_chunks, own_chunks
from accel_plugins.megatron.state import find_rows, load
from accel_plugins.megatron.strategy import groups_of
from accel_plugins.megatron.train_steps import causal_mask
from accel_state.errors import MissingDependencyError, SettingsError, UnsupportedError
from accel_train import Accelerator
from harness import distributed
from harness.cuda_names import cuda_answered_by_cpu

TOKENS, LENGTH, STEPS, SAMPLES = 32, 8, 10, 4
SIZES = {"n_embd": 16, "n_layer": 4, "n_head": 4, "vocab_size": TOKENS, "n_positions": 16}


def make_gpt2(**options):
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**SIZES | options, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))


class Unknown(GPT2LMHeadModel):
    """A model without a row."""

    class Config(GPT2Config):
        model_type = "unknown_to_megatron"

    config_class = Config


def make_unknown():
    torch.manual_seed(0)
    config = Unknown.Config(**SIZES, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    return Unknown(config)


def describe(plugin, model, batch):
    del batch
    plugin.megatron_lm_default_args |= {
        "model_type_name": "gpt",
        "num_layers": model.config.n_layer,
        "hidden_size": model.config.n_embd,
        "num_attention_heads": model.config.n_head,
        "return_logits": False,
    }


def describe_without_step(plugin, model, batch):
    describe(plugin, model, batch)
    plugin.megatron_lm_default_args["model_type_name"] = "mine"


def make_rows():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, TOKENS, (STEPS * SAMPLES, LENGTH), generator=generator)
    return [{"words": row} for row in rows]


def provider(plugin):
    """Return a function that makes the stages of a GPT-2, with the weights of `make_gpt2`."""

    def provide(pre_process, post_process, add_encoder, add_decoder):
        assert add_encoder
        assert add_decoder
        config = core("transformer.transformer_config").TransformerConfig(
            **GPT2.transformer_config(make_gpt2().config),
            tensor_model_parallel_size=plugin.tp_degree,
            pipeline_model_parallel_size=plugin.pp_degree,
            pipeline_dtype=torch.float32,
        )
        module = core("models.gpt.gpt_model").GPTModel(
            config=config,
            transformer_layer_spec=core("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(),
            vocab_size=TOKENS,
            pre_process=pre_process,
            post_process=post_process,
            **GPT2.model_arguments(make_gpt2()),
        )
        rank = torch.distributed.get_rank()
        groups = groups_of(plugin, torch.distributed.get_world_size(), rank)
        source = make_gpt2()
        load(find_rows([module], GPT2.weights(source.config)), source.state_dict(), groups)
        return module

    return provide


def next_batch(data_iterator):
    words = next(data_iterator)["words"]
    mask = torch.ones(words.shape)
    mask[:, -1] = 0
    return words, words.roll(-1, 1), mask, None, torch.arange(LENGTH).expand_as(words)


def doubled(loss_mask, losses):
    loss = 2 * (losses * loss_mask).sum() / loss_mask.sum()
    return loss, {"doubled": loss.detach()}


@pytest.mark.parametrize("sizes", [{"tp_degree": 2}, {"pp_degree": 2, "num_micro_batches": 2}], ids=str)
@distributed(world_size=2)
def test_a_model_batches_and_a_loss_of_the_users_functions_train_as_plain_pytorch(sizes):
    add_model_config_to_megatron_parser("unknown_to_megatron")(describe)
    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(
            **sizes, gradient_clipping=0.5, custom_get_batch_function=next_batch, custom_loss_function=doubled
        )
        plugin.custom_model_provider_function = provider(plugin)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        model = make_unknown()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(make_rows(), batch_size=SAMPLES // plugin.num_micro_batches)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for batch in loader:
            loss = model(**batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    plain = make_gpt2()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = []
    for batch in DataLoader(make_rows(), batch_size=SAMPLES):
        loss = 2 * plain(input_ids=batch["words"], labels=batch["words"]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    accelerator.free_memory()


def make_llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": TOKENS + 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


@distributed(world_size=2)
def test_float16_trains_with_a_loss_scale_that_follows_overflows():
    with cuda_answered_by_cpu():
        scales = {"initial_loss_scale": 2.0**30, "hysteresis": 1, "loss_scale_window": 8}
        plugin = MegatronLMPlugin(tp_degree=2, gradient_clipping=0.0, other_megatron_args=scales)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin, mixed_precision="fp16")
        model = make_llama()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        before = [parameter.clone() for parameter in model.parameters()]
        losses, skipped, last = [], [], None
        for row in make_rows():
            loss = model(input_ids=row["words"][None]).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(optimizer.step_was_skipped)
            if skipped == [True]:
                torch.testing.assert_close([*model.parameters()], before, rtol=0, atol=0)
            losses.append(loss.item())
            last = model.optimizer.get_loss_scale().item()
        masters = {parameter.dtype for parameter in model.optimizer.chained_optimizers[0].get_parameters()}
    assert skipped[0]
    assert not all(skipped)
    assert last < 2.0**30
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert masters == {torch.float32}
    plain = make_llama()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for row, skip, actual in zip(make_rows(), skipped, losses, strict=False):
        tokens = row["words"][None]
        loss = plain(input_ids=tokens, labels=tokens).loss
        assert actual == pytest.approx(loss.item(), abs=0.02)
        if not skip:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    accelerator.free_memory()


@distributed(world_size=2)
def test_a_second_accelerator_shares_the_groups_of_a_live_one():
    row = make_rows()[0]["words"][None]
    with cuda_answered_by_cpu():
        first = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
        model = make_llama()
        model, _ = first.prepare(model, torch.optim.AdamW(model.parameters()))
        before = model(input_ids=row).loss
        second = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
        other = second.prepare(make_llama())
        other.eval()
        torch.testing.assert_close(other(input_ids=row).loss, before)
        second.free_memory()
        torch.testing.assert_close(model(input_ids=row).loss, before)
        third = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
        with pytest.raises(SettingsError, match=r"'tp': 2.*, this one .*'tp': 1.*free_memory"):
            third.prepare(make_llama())
        torch.testing.assert_close(model(input_ids=row).loss, before)
        first.free_memory()
        third.prepare(make_llama())
        third.free_memory()


def is_started():
    return core("parallel_state").model_parallel_is_initialized()


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ({"tp_degree": 2}, "no"),
        ({"use_distributed_optimizer": True}, "no"),
        ({"use_distributed_optimizer": True}, "bf16"),
    ],
    ids=str,
)
@distributed(world_size=2)
def test_what_was_prepared_is_released_and_the_accelerator_prepares_again(options, precision):
    tokens = make_rows()[0]["words"].expand(2, -1)
    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(**options)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin, mixed_precision=precision)
        for _ in range(2):
            model = make_llama()
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            assert is_started()
            for _ in range(2):
                accelerator.backward(model(input_ids=tokens).loss)
                optimizer.step()
                optimizer.zero_grad()
            kept = [weakref.ref(value) for value in (model, optimizer, *model.parameters())]
            accelerator.free_memory()
            del model, optimizer
            gc.collect()
            assert [reference() for reference in kept if reference() is not None] == []
            assert not is_started()


@distributed(world_size=4)
def test_context_parallel_ranks_have_two_chunks_of_sequences_and_gather_them():
    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(context_parallel_size=4)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        model = accelerator.prepare(make_llama())
        rank = accelerator.process_index
        chunks = torch.arange(2 * 8 * 3).view(2, 8, 3)  # eight chunks of three tokens
        tokens = chunks.flatten(1)
        square = torch.ones(24, 24).triu(1).expand(2, 1, 24, 24).contiguous()
        own = own_chunks((tokens, tokens + 1, tokens > 5, square, tokens + 2))
        right = chunks[:, [rank, 7 - rank]].flatten(1)
        for chunk, expected in zip(own, (right, right + 1, right > 5, None, right + 2), strict=True):
            if expected is not None:
                torch.testing.assert_close(chunk, expected)
        rows = tokens[0].view(8, 3)[[rank, 7 - rank]].flatten()
        torch.testing.assert_close(own[3], square[:, :, rows])
        shard = own[0].t().float().requires_grad_()
        whole = gather_chunks(shard)
        torch.testing.assert_close(whole, tokens.t().float())
        (whole * (rank + 1)).sum().backward()  # what every rank computes of it counts
        torch.testing.assert_close(shard.grad, torch.full_like(shard, 1 + 2 + 3 + 4))
        model.eval()
        with pytest.raises(
            SettingsError, match=r"of 12 tokens.*twice context_parallel_size=4.*multiple of 8"
        ):
            model(input_ids=torch.zeros(1, 12, dtype=torch.long))
    accelerator.free_memory()


def test_padding_before_tokens_is_refused_where_the_mask_of_the_future_is_the_only_one():
    right, left = torch.tensor([[1, 1, 0]]), torch.tensor([[0, 1, 1]])
    assert causal_mask(right, padding_at_end=True) is None
    assert causal_mask(right) is not None
    with pytest.raises(UnsupportedError, match="pad on the right"):
        causal_mask(left, padding_at_end=True)


@distributed(world_size=2)
def test_what_the_plugin_says_and_the_objects_contradict_is_refused():
    with cuda_answered_by_cpu():
        for make, options, message in (
            (
                make_gpt2,
                {"use_rotary_position_embeddings": True},
                r"embeddings=True .its configuration decides",
            ),
            (
                make_llama,
                {"use_rotary_position_embeddings": False},
                r"embeddings=False .its configuration decides",
            ),
        ):
            accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2, **options))
            model = make()
            with pytest.raises(UnsupportedError, match=message):
                accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            assert not is_started()
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
        model = make_gpt2()
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = MegatronLMDummyScheduler(optimizer, 10)
        model, optimizer = accelerator.prepare(model, optimizer)
        with pytest.raises(SettingsError, match="MegatronLMDummyScheduler without its optimizer"):
            accelerator.prepare(schedule)
    accelerator.free_memory()


def make_llama_of(**options):
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    return lambda: LlamaForCausalLM(LlamaConfig(**sizes | options, vocab_size=TOKENS))


@distributed(world_size=2)
def test_sizes_and_models_that_do_not_fit_are_refused_before_groups_are_made():
    tensor, pipeline = {"tp_degree": 2}, {"pp_degree": 2, "num_micro_batches": 2}
    with cuda_answered_by_cpu():
        for make, options, message in (
            (make_llama_of(num_attention_heads=3), tensor, r"3 attention heads by tp_degree=2"),
            (make_llama_of(num_key_value_heads=3), tensor, r"3 key-value heads by tp_degree=2"),
            (make_llama_of(intermediate_size=47), tensor, r"47 features of the intermediate layer by"),
            (make_llama_of(num_hidden_layers=3), pipeline, r"3 layers by pp_degree=2"),
            (make_unknown, tensor, r"'unknown_to_megatron' cannot be trained .*Add one, a ModelFamily"),
        ):
            accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**options))
            model = make()
            with pytest.raises(SettingsError, match=message) as caught:
                accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            assert "\n" not in str(caught.value)
            assert not is_started()
            assert model.lm_head.weight.device.type == "cpu", "the model is as it was"
        plugin = MegatronLMPlugin(**tensor, custom_model_provider_function=provider)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        model = make_gpt2()
        groups = [{"params": [parameter]} for parameter in model.parameters()]
        with pytest.raises(SettingsError, match=r"parameter groups.*use no_wd_decay_cond"):
            accelerator.prepare(model, torch.optim.AdamW(groups))
        model.config.model_type = "not_described"
        with pytest.raises(SettingsError, match=r"not described to Megatron.*add_model_config_to_megatron"):
            accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        assert not is_started()
        add_model_config_to_megatron_parser("without_a_step")(describe_without_step)
        model.config.model_type = "without_a_step"
        with pytest.raises(UnsupportedError, match=r"no train step .*'mine'.*custom_train_step_class"):
            accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        assert not is_started()
        with pytest.raises(SettingsError, match=r"tp_degree=3.*groups of 3 ranks, into which 2 cannot"):
            Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=3))
        assert not is_started()


@distributed(world_size=2)
def test_options_that_a_model_does_not_have_are_refused_before_groups_are_made():
    kind = BertForMaskedLM(BertConfig(**BERT, vocab_size=TOKENS))
    with cuda_answered_by_cpu():
        for make, options, message in (
            (make_gpt2, {"attention_backend": "flash"}, r"attention_backend='flash'.*transformer-engine"),
            (lambda: kind, {"attention_backend": "fused"}, r"'bert'.* attention_backend='fused'"),
            (make_gpt2, {"other_megatron_args": {"overlap": 1}}, "overlap=1"),
        ):
            accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2, **options))
            model = make()
            loader = DataLoader(make_rows(), batch_size=1)
            with pytest.raises((SettingsError, UnsupportedError), match=message) as it:
                accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
            assert "\n" not in str(it.value)
            assert not is_started()
        with pytest.raises(UnsupportedError, match=r"mixed_precision='fp8' is not supported.*'bf16'"):
            Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2), mixed_precision="fp8")
        plugin = MegatronLMPlugin(use_distributed_optimizer=True, use_precision_aware_optimizer=True)
        with pytest.raises(
            MissingDependencyError, match=r"use_precision_aware_optimizer=True. needs transformer_engine"
        ):
            Accelerator(cpu=True, megatron_lm_plugin=plugin)


BERT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}


@distributed(world_size=2)
def test_a_loss_by_token_without_its_tokens_is_refused():
    tokens = make_rows()[0]["words"][None]
    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(tp_degree=2, calculate_per_token_loss=True, custom_loss_function=doubled)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        model = make_gpt2()
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        with pytest.raises(SettingsError, match=r"calculate_per_token_loss=True.*number of tokens"):
            model(input_ids=tokens)
    accelerator.free_memory()


@distributed(world_size=2)
def test_the_users_function_gets_every_stage_before_it_is_wrapped():
    made, computed = [], []

    def prepare_stage(module):
        made.append(module)
        module.register_forward_hook(lambda *_: computed.append(module))
        return module

    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(
            pp_degree=2,
            num_micro_batches=2,
            num_layers_per_virtual_pipeline_stage=1,
            custom_prepare_model_function=prepare_stage,
        )
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        source = make_gpt2()
        model, _ = accelerator.prepare(source, torch.optim.AdamW(source.parameters()))
        assert [type(module).__name__ for module in made] == ["GPTModel", "GPTModel"]
        assert {*made} == {module.module for module in model.chunks}
        model.eval()
        model(input_ids=torch.zeros(2, LENGTH, dtype=torch.long))
        assert computed == [made[0], made[0], made[1], made[1]]
        assert extract_model_from_parallel(model) is source
    accelerator.free_memory()
