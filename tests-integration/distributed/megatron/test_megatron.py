"""Megatron's engine trains models of transformers as one process of plain PyTorch does."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from accel_plugins.kwargs import DataLoaderConfiguration
from accel_plugins.megatron.data import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from accel_plugins.megatron.library import core
from accel_plugins.megatron.plugin import MegatronLMPlugin
from accel_plugins.megatron.stages import TorchAttention
from accel_plugins.megatron.train_steps import GPTTrainStep, causal_mask
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError, UnsupportedError
from accel_train import Accelerator
from harness import cases, distributed
from harness.cuda_names import cuda_answered_by_cpu

TOKENS, LENGTH, STEPS, SAMPLES = 32, 8, 8, 4


def make_gpt2(**options):
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 4, "n_head": 4, "vocab_size": TOKENS, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes | options, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))


def make_llama(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "vocab_size": TOKENS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes | heads | options))


def make_rows():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, TOKENS, (STEPS * SAMPLES, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def make_optimizer(model):
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2)


@functools.cache
def train_plainly(make, steps, clipping):
    """Train one model in one process, on the same samples."""
    model = make()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    rows = make_rows()
    for start in range(0, len(rows), len(rows) // steps):
        tokens = torch.stack([row["input_ids"] for row in rows[start : start + len(rows) // steps]])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    return losses, model.state_dict(), logits


def train(make, plugin, accumulation=1, **options):
    """Train by Megatron; a step has `SAMPLES` samples of all ranks and micro-batches."""
    accelerator = Accelerator(
        cpu=True,
        megatron_lm_plugin=plugin,
        gradient_accumulation_steps=accumulation,
        step_scheduler_with_optimizer=True,
        dataloader_config=DataLoaderConfiguration(split_batches=False),
        **options,
    )
    model = make()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    replicas = accelerator._parts.strategy.sharding.num_shards
    each = SAMPLES // replicas // accumulation // plugin.num_micro_batches
    loader = DataLoader(make_rows(), batch_size=each)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    losses = torch.tensor(losses).view(-1, accumulation).mean(1).tolist()
    return accelerator, model, losses


def check_equal(make, plugin, accumulation=1):
    with cuda_answered_by_cpu():
        accelerator, model, losses = train(make, plugin, accumulation)
        state = accelerator.get_state_dict(model)
    expected, weights, _ = train_plainly(make, STEPS, plugin.gradient_clipping)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    if accelerator.is_main_process:
        torch.testing.assert_close(state, weights, rtol=1e-5, atol=1e-5)
    accelerator.free_memory()


CASES = {
    "tensor": {"tp_degree": 2, "gradient_clipping": 0.0},
    "tensor, clipped": {"tp_degree": 2, "gradient_clipping": 0.5},
    "sequence, accumulated": {"tp_degree": 2, "sequence_parallelism": True, "num_micro_batches": 2},
    "recomputed": {"tp_degree": 2, "recompute_granularity": "full"},
    "distributed optimizer": {"use_distributed_optimizer": True, "gradient_clipping": 0.5},
    "pipeline": {"pp_degree": 2, "num_micro_batches": 2, "gradient_clipping": 0.5},
    "virtual stages": {"pp_degree": 2, "num_micro_batches": 2, "num_layers_per_virtual_pipeline_stage": 1},
    "context": {"context_parallel_size": 2, "num_micro_batches": 2, "gradient_clipping": 0.5},
    "context, loss by token": {
        "context_parallel_size": 2,
        "calculate_per_token_loss": True,
        "recompute_activations": True,
    },
    "loss by token, megatron-core's attention": {
        "calculate_per_token_loss": True,
        "recompute_activations": True,
        "attention_backend": "unfused",
    },
}


ALWAYS = {"sequence, accumulated", "virtual stages", "context, loss by token"}
"""What contains the other cases, but for what a smaller model has."""


@pytest.mark.parametrize("case", cases(CASES, always=ALWAYS))
@distributed(world_size=2)
def test_two_ranks_train_a_llama_as_one_process(case):
    check_equal(make_llama, MegatronLMPlugin(**CASES[case]))


@pytest.mark.parametrize("case", ["tensor, clipped", "pipeline", "context"])
@distributed(world_size=2)
def test_two_ranks_train_a_gpt2_as_one_process(case):
    check_equal(make_gpt2, MegatronLMPlugin(**CASES[case]))


@pytest.mark.parametrize("case", ["sequence, accumulated", "virtual stages"])
@distributed(world_size=2)
def test_windows_of_several_calls_train_as_one_batch(case):
    check_equal(make_llama, MegatronLMPlugin(**CASES[case]), accumulation=2)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (make_llama, {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2}),
        pytest.param(
            make_gpt2,
            {"tp_degree": 2, "use_distributed_optimizer": True, "num_micro_batches": 2},
            marks=pytest.mark.thorough,
        ),
        (make_llama, {"tp_degree": 4}),  # twice the key-value heads
        (make_llama, {"context_parallel_size": 2, "tp_degree": 2, "sequence_parallelism": True}),
        pytest.param(
            make_llama,
            {"context_parallel_size": 2, "pp_degree": 2, "num_micro_batches": 2},
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            make_llama,
            {"context_parallel_size": 2, "use_distributed_optimizer": True},
            marks=pytest.mark.thorough,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@distributed(world_size=4)
def test_four_ranks_train_as_one_process(make, options):
    check_equal(make, MegatronLMPlugin(**options))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (make_llama, {"tp_degree": 2}),
        (make_gpt2, {"pp_degree": 2, "num_micro_batches": 2}),
        (make_llama, {"context_parallel_size": 2, "num_micro_batches": 2}),
    ],
    ids=["tensor", "pipeline", "context"],
)
@distributed(world_size=2)
def test_logits_in_evaluation_are_those_of_transformers_with_the_gathered_weights(make, options):
    model = make(vocab_size=TOKENS + 1)  # which two ranks cannot split evenly
    batch = {"input_ids": torch.stack([row["input_ids"] for row in make_rows()[:2]])}
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][:, :2] = -100
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, -3:] = 0
    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(return_logits=True, **options)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        model, _ = accelerator.prepare(model, make_optimizer(model))
        model.eval()
        outputs = model(**batch)
        state = accelerator.get_state_dict(model)
        assert accelerator.unwrap_model(model).config.vocab_size == TOKENS + 1
    if accelerator.is_main_process:
        expected = make(vocab_size=TOKENS + 1)
        expected.load_state_dict(state)
        expected.eval()
        with torch.no_grad():
            right = expected(**batch)
            parts = [
                expected(**{name: rows[i : i + 1] for name, rows in batch.items()}).loss for i in range(2)
            ]
        assert type(outputs) is type(right)
        torch.testing.assert_close(outputs.logits, right.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(outputs.loss, torch.stack(parts).mean(), rtol=1e-5, atol=1e-5)
    accelerator.free_memory()


@distributed(world_size=2)
def test_a_micro_batch_without_labels_has_no_gradient():
    tokens = torch.stack([row["input_ids"] for row in make_rows()[:2]])
    labels = tokens.clone()
    labels[0] = -100  # the first of two micro-batches
    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(tp_degree=2, num_micro_batches=2)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        model = make_llama()
        model, optimizer = accelerator.prepare(model, make_optimizer(model))
        alone = make_llama()
        accelerator.backward(model(input_ids=tokens, labels=labels).loss)
        optimizer.step()
        state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        plain = make_optimizer(alone)
        (alone(input_ids=tokens[1:], labels=labels[1:]).loss / 2).backward()
        plain.step()
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-3, msg=name)
    accelerator.free_memory()


LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@distributed(world_size=2)
def test_a_llama_3_has_the_rotary_positions_of_transformers():
    options = {"hidden_size": 32, "max_position_embeddings": 512, "initializer_range": 0.2}
    plain = make_llama(**options, rope_parameters=LLAMA_3)
    other = make_llama(**options, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    tokens = torch.randint(0, TOKENS, (1, 512), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, unscaled = (network.eval()(input_ids=tokens).logits for network in (plain, other))
    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(return_logits=True, tp_degree=2)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        wrong = make_llama(**options, rope_parameters=LLAMA_3 | {"low_freq_factor": 2.0})
        with pytest.raises(UnsupportedError, match=r"low_freq_factor=2\.0 of rope_type='llama3'.*computes 1"):
            accelerator.prepare(wrong)
        model = accelerator.prepare(plain)
        model.eval()
        logits = model(input_ids=tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert (unscaled - expected).abs().max() > 1e-3
    accelerator.free_memory()


@distributed(world_size=2)
def test_attention_of_pytorch_is_that_of_megatron_core():
    torch.manual_seed(torch.distributed.get_rank())
    padded = torch.ones(2, LENGTH)
    padded[0, :3] = 0
    with cuda_answered_by_cpu():
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
        model = accelerator.prepare(make_llama())
        layer = core("utils").unwrap_model(model.chunks[0]).decoder.layers[0].self_attention
        kind = core("transformer.enums").AttnMaskType.causal
        unfused = core("transformer.dot_product_attention").DotProductAttention(
            model.transformer_config, 1, kind, "self"
        )
        for mask in (None, causal_mask(padded)):
            results = []
            sizes = (LENGTH, 2, 2, 4), (LENGTH, 2, 1, 4), (LENGTH, 2, 1, 4)
            inputs = [torch.randn(size, requires_grad=True) for size in sizes]
            weights = torch.randn(LENGTH, 2, 8)
            if mask is not None:
                weights[:3, 0] = 0  # what padding computes is not used
            for attention in (layer.core_attention, unfused):
                output = attention(*inputs, mask, attn_mask_type=kind)
                results.append(
                    [weights.sign() * output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]
                )
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
        assert type(layer.core_attention) is TorchAttention
    accelerator.free_memory()


@distributed(world_size=2)
def test_ranks_that_seed_differently_train_the_model_of_rank_0_with_its_dropout():
    rank = torch.distributed.get_rank()
    expected = make_llama().state_dict()
    for options in ({"tp_degree": 2}, {"use_distributed_optimizer": True}):
        model = make_llama()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank)
        torch.manual_seed(rank)
        with cuda_answered_by_cpu():
            accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**options))
            model, _ = accelerator.prepare(model, make_optimizer(model))
            state = accelerator.get_state_dict(model)
            norms = accelerator.gather(
                next(parameter for parameter in model.parameters() if parameter.ndim == 1).detach()[None]
            )
            random = accelerator.gather(torch.get_rng_state().int()[None])
            accelerator.free_memory()
        AcceleratorState._reset_state(reset_partial_state=True)
        if rank == 0:
            torch.testing.assert_close(state, dict(expected), rtol=0, atol=0)
        assert torch.equal(norms[0], norms[1])
        assert torch.equal(random[0], random[1])


@distributed(world_size=2)
def test_the_schedule_of_the_plugin_follows_the_optimizer():
    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(train_iters=10, lr_warmup_iters=2, num_micro_batches=2)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        model = make_gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = MegatronLMDummyScheduler(optimizer)
        loader = DataLoader(make_rows(), batch_size=1)
        model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
        assert plugin.global_batch_size == 4
        rates = []
        for batch in [*loader][:4]:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            rates += schedule.get_last_lr()
    assert rates == pytest.approx([0.05, 0.1, 0.1 * 7 / 8, 0.1 * 6 / 8])
    accelerator.free_memory()


@distributed(world_size=2)
def test_a_schedule_in_samples_counts_those_of_every_call_of_a_step():
    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(train_samples=80, lr_warmup_samples=16, num_micro_batches=2)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin, gradient_accumulation_steps=2)
        model = make_gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = MegatronLMDummyScheduler(optimizer)
        loader = DataLoader(make_rows(), batch_size=1)
        model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
        rates = []
        for batch in [*loader][:8]:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            rates += schedule.get_last_lr() if accelerator.sync_gradients else []
    # a step has 2 calls x 2 ranks x 2 micro-batches
    assert rates == pytest.approx([0.05, 0.1, 0.1 * 56 / 64, 0.1 * 48 / 64])
    accelerator.free_memory()


@distributed(world_size=2)
def test_bfloat16_trains_with_float32_master_weights():
    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(tp_degree=2, gradient_clipping=0.0)
        accelerator, model, losses = train(make_llama, plugin, mixed_precision="bf16")
        masters = {parameter.dtype for parameter in model.optimizer.chained_optimizers[0].get_parameters()}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert masters == {torch.float32}
    expected, _, _ = train_plainly(make_llama, STEPS, 0.0)
    torch.testing.assert_close(losses, expected, rtol=0.02, atol=0.02)
    accelerator.free_memory()


class WeightedStep(GPTTrainStep):
    """Multiplies the loss."""

    def __init__(self, accelerator, args, factor):
        self.factor = factor
        super().__init__(accelerator, args)

    def get_loss_func(self, accelerator):
        plain = super().get_loss_func(accelerator)

        def weighted(loss_mask, output_tensor):
            loss, reduced = plain(loss_mask, output_tensor)
            return self.factor * loss, {"lm loss": self.factor * reduced["lm loss"]}

        return weighted


def train_a_little(plugin, rate):
    """Return the losses and weights of three steps of SGD."""
    with cuda_answered_by_cpu():
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        model = make_gpt2()
        model, optimizer = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        )
        losses = []
        for row in make_rows()[:3]:
            loss = model(input_ids=row["input_ids"][None]).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e6)
            assert norm > 0
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        state = accelerator.get_state_dict(model)
        accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    return torch.tensor(losses), state


@distributed(world_size=2)
def test_a_train_step_of_the_user_changes_the_loss():
    options = {"tp_degree": 2, "gradient_clipping": 0.0}
    losses, state = train_a_little(MegatronLMPlugin(**options), rate=0.2)
    plugin = MegatronLMPlugin(
        **options, custom_train_step_class=WeightedStep, custom_train_step_kwargs={"factor": 2.0}
    )
    weighted, changed = train_a_little(plugin, rate=0.1)
    torch.testing.assert_close(weighted, 2 * losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(changed, state, rtol=1e-5, atol=1e-5)


def write_documents(path):
    """Write a data set in Megatron's format, of documents of 4 to 9 tokens."""
    builder = core("datasets.indexed_dataset").IndexedDatasetBuilder(f"{path}.bin")
    generator = torch.Generator().manual_seed(2)
    for number in range(60):
        length = 4 + number % 6
        builder.add_document(torch.randint(0, TOKENS, (length,), generator=generator).numpy(), [length])
    builder.finalize(f"{path}.idx")


@distributed(world_size=2)
def test_indexed_data_sets_are_read_by_every_replica_in_shares(tmp_path):
    accelerator = None
    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(train_iters=4, eval_iters=1, gradient_clipping=0.0)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        if accelerator.is_main_process:
            write_documents(tmp_path / "corpus")
        accelerator.wait_for_everyone()
        options = {"splits_string": "8,1,1", "seq_length": LENGTH, "micro_batch_size": 2}
        data = MegatronLMDummyDataLoader(data_path=[str(tmp_path / "corpus")], **options)
        model = make_gpt2()
        optimizer = make_optimizer(model)
        model, optimizer, training, validation = accelerator.prepare(model, optimizer, data, data)
        assert plugin.global_batch_size == 4
        assert len(validation) >= 1
        losses, batches = [], []
        for batch, _ in zip(training, range(4), strict=False):
            batches.append(accelerator.gather({name: batch[name] for name in ("tokens", "labels")}))
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    plain = make_gpt2()
    optimizer = make_optimizer(plain)
    expected = []
    for batch in batches:
        logits = plain(input_ids=batch["tokens"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert [len(batch["tokens"]) for batch in batches] == [4, 4, 4, 4]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    accelerator.free_memory()


@distributed(world_size=2)
def test_what_megatron_cannot_train_is_refused():
    with cuda_answered_by_cpu():
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
        with pytest.raises(
            SettingsError, match=r"Linear of type None cannot be trained.*'gpt2', 'llama'.*ModelFamily"
        ):
            accelerator.prepare(torch.nn.Linear(1, 1))
        model = make_llama(hidden_act="relu")
        with pytest.raises(UnsupportedError, match="hidden_act='relu'"):
            accelerator.prepare(model, make_optimizer(model))
        model = make_llama()
        with pytest.raises(UnsupportedError, match="RMSprop"):
            accelerator.prepare(model, torch.optim.RMSprop(model.parameters()))
        model, _ = accelerator.prepare(model, make_optimizer(model))
        with pytest.raises(SettingsError, match="by name"):
            model(make_rows()[0]["input_ids"][None])
    accelerator.free_memory()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@distributed(world_size=2)
def test_a_machine_without_a_gpu_is_refused_before_groups_are_made():
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
    model = make_llama()
    with pytest.raises(
        UnsupportedError, match=r"Megatron trains on GPUs, but this machine has none.*FSDP"
    ) as caught:
        accelerator.prepare(model, make_optimizer(model))
    assert "\n" not in str(caught.value)
    assert not core("parallel_state").model_parallel_is_initialized()
    accelerator.free_memory()
