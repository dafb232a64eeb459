"""Losses in chunks and MLPs in tiles on one and several ranks: the numbers of the plain model."""

from __future__ import annotations

import copy
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.distributed import DistributedConfig

from accel_plugins import TilingKwargs, chunked_log_probs
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs import TorchDynamoPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.environ import patch_environment
from accel_state.errors import UnsupportedError
from accel_train import Accelerator
from harness import distributed
from harness.small_llama import SIZES, make_llama

VOCABULARY, ROWS, LENGTH = 16, 4, 13
CHUNKS, TILES = 5, 4
TILING = TilingKwargs(loss_chunk_size=CHUNKS, mlp_tile_size=TILES)

GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2}
EAGER = {"attn_implementation": "eager"}
FAMILIES = {
    "llama": lambda: make_llama(vocab_size=VOCABULARY),
    "tied": lambda: make_llama(vocab_size=VOCABULARY, tie_word_embeddings=True),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
    "caps": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES | EAGER, head_dim=4, final_logit_softcapping=0.1)),
    "scales": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=0.1)),
}


def token_rows():
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH))
    labels = tokens.clone()
    labels[:, :3] = -100  # as many for each rank: a mean of means
    return tokens, labels


def train_step(model, backward=torch.Tensor.backward, rank=0, ranks=1, **options):
    tokens, labels = (rows.chunk(ranks)[rank] for rows in token_rows())
    outputs = model.train()(input_ids=tokens, labels=labels, use_cache=False, **options)
    backward(outputs.loss)
    return outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_trains_as_the_plain_model(family):
    torch.manual_seed(0)
    plain = FAMILIES[family]()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[TILING])
    model = accelerator.prepare(copy.deepcopy(plain))
    expected = train_step(plain)
    outputs = train_step(model, accelerator.backward)
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, expected.loss)
    for parameter, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, right.grad, rtol=1e-4, atol=1e-6)
    tokens, labels = token_rows()
    for inputs, train in (({}, True), ({}, False), ({"labels": labels}, False)):
        logits, right = (m.train(train)(input_ids=tokens, **inputs).logits for m in (model, plain))
        torch.testing.assert_close(logits, right, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler
@pytest.mark.parametrize("regional", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_compiled_model_trains_as_the_plain_model(regional):
    plain = FAMILIES["llama"]()
    compiler = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[TILING], dynamo_plugin=compiler)
    model = accelerator.prepare(copy.deepcopy(plain))
    for _ in range(2):
        expected = train_step(plain)
        outputs = train_step(model, accelerator.backward)
        assert outputs.logits is None
        torch.testing.assert_close(outputs.loss, expected.loss)
    for parameter, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, right.grad, rtol=1e-4, atol=1e-6)


def test_items_of_the_batch_and_shifted_labels_count_as_for_the_plain_model():
    plain = FAMILIES["llama"]()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[TILING])
    model = accelerator.prepare(copy.deepcopy(plain))
    tokens, labels = token_rows()
    shifted = torch.roll(labels, -1, 1)
    for options in ({"num_items_in_batch": 100}, {"shift_labels": shifted}, {"return_dict": False}):
        loss, right = (
            m.train()(input_ids=tokens, labels=labels, use_cache=False, **options)[0] for m in (model, plain)
        )
        torch.testing.assert_close(loss, right)


def test_the_variables_switch_it_on():
    with patch_environment(accelerate_loss_chunk_size=str(CHUNKS), accelerate_mlp_tile_size=str(TILES)):
        accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(FAMILIES["llama"]())
    assert train_step(model).logits is None


def gradients(model):
    """Return full gradients by name."""
    return {
        name.removeprefix("module."): p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in model.named_parameters()
    }


def check_ranks(accelerator, model, ranks_with_data):
    plain = FAMILIES["llama"]()
    expected = train_step(plain).loss
    right = {name: p.grad for name, p in plain.named_parameters()}
    model = accelerator.prepare(model)
    sharding = accelerator._parts.strategy.sharding
    assert sharding.num_shards == ranks_with_data
    outputs = train_step(model, accelerator.backward, sharding.shard_index, sharding.num_shards)
    assert outputs.logits is None
    torch.testing.assert_close(accelerator.reduce(outputs.loss.detach(), "mean"), expected.detach())
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, right[name], rtol=1e-4, atol=1e-6)


def fsdp2():
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )


def fsdp2_of_every_layer():
    """The MLPs and the head are units of their own."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaMLP", "Linear"],
    )


ARGUMENTS = {
    "ddp": dict,
    "fsdp2": lambda: {"fsdp_plugin": fsdp2()},
    "every layer": lambda: {"fsdp_plugin": fsdp2_of_every_layer()},
    "tp": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
}


@pytest.mark.parametrize("layout", ARGUMENTS)
@distributed(world_size=2)
def test_two_ranks_train_as_the_plain_model(layout):
    accelerator = Accelerator(cpu=True, kwargs_handlers=[TILING], **ARGUMENTS[layout]())
    check_ranks(accelerator, FAMILIES["llama"](), 1 if layout == "tp" else 2)


def sequences():
    """Rows whose length two ranks can share, as a prepared loader gets them."""
    return [
        {"input_ids": tokens[1:], "labels": labels[1:]} for tokens, labels in zip(*token_rows(), strict=True)
    ]


def plain_step_on_sequences():
    plain = FAMILIES["llama"]()
    batch = next(iter(DataLoader(sequences(), batch_size=ROWS)))
    loss = plain(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in plain.named_parameters()}


@distributed(world_size=2)
def test_shards_of_sequences_train_as_the_plain_model():
    expected, right = plain_step_on_sequences()
    config = ParallelismConfig(sp_size=2)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[TILING], parallelism_config=config)
    model, loader = accelerator.prepare(FAMILIES["llama"](), DataLoader(sequences(), batch_size=ROWS))
    (batch,) = loader
    outputs = model(**batch)
    assert outputs.logits is None
    accelerator.backward(outputs.loss)
    torch.testing.assert_close(outputs.loss.detach(), expected)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, right[name], rtol=1e-4, atol=1e-6)
    accelerator.free_memory()


@distributed(world_size=2)
def test_rings_train_as_the_plain_model():
    expected, right = plain_step_on_sequences()
    config = ParallelismConfig(cp_size=2)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[TILING], parallelism_config=config)
    model = accelerator.prepare(FAMILIES["llama"]())
    batch = next(iter(DataLoader(sequences(), batch_size=ROWS)))
    labels = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    parts = [batch["input_ids"].clone(), labels, torch.arange(LENGTH - 1).repeat(ROWS, 1)]
    count = int((labels != -100).sum())
    with accelerator.maybe_context_parallel(parts, [1] * 3, {*parts}):
        tokens, labels, positions = parts
        outputs = model.train()(
            input_ids=tokens,
            position_ids=positions,
            labels=labels,
            shift_labels=labels,
            num_items_in_batch=count,
            use_cache=False,
        )
        assert outputs.logits is None
        accelerator.backward(outputs.loss * 2)  # the mean over two ranks is taken
    torch.testing.assert_close(accelerator.reduce(outputs.loss.detach(), "sum"), expected)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, right[name], rtol=1e-4, atol=1e-6)


def one_sgd_step(accelerator, model):
    """Return the full state after a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    sharding = accelerator._parts.strategy.sharding
    train_step(model, accelerator.backward, sharding.shard_index, sharding.num_shards)
    optimizer.step()
    return accelerator.get_state_dict(model)


def check_state_after_a_step(state):
    plain = FAMILIES["llama"]()
    train_step(plain)
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    assert state.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


@distributed(world_size=2)
def test_flat_shards_train_as_the_plain_model():
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[TILING], fsdp_plugin=plugin)
    state = one_sgd_step(accelerator, FAMILIES["llama"]())
    if accelerator.is_main_process:
        check_state_after_a_step(state)


@distributed(world_size=4)
def test_shards_of_layers_train_as_the_plain_model():
    config = ParallelismConfig(dp_shard_size=2, tp_size=2)
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[TILING], fsdp_plugin=fsdp2(), parallelism_config=config
    )
    check_ranks(accelerator, FAMILIES["llama"](), 2)


@pytest.mark.parametrize("sizes", [{"fsdp_size": 2}, {"tp_size": 2}])
@distributed(world_size=2)
def test_a_model_that_is_sharded_when_it_is_loaded_trains_as_the_plain_model(sizes, tmp_path):
    if dist.get_rank() == 0:
        FAMILIES["llama"]().save_pretrained(tmp_path)
    dist.barrier()
    check = "transformers.integrations.accelerate.is_accelerate_available"
    with warnings.catch_warnings(), mock.patch(check, return_value=True):
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=DistributedConfig(**sizes))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[TILING])
    check_ranks(accelerator, model, 2 if "fsdp_size" in sizes else 1)


class LogProbs(nn.Module):
    """A head that returns log-probabilities and entropies, as a trainer by reinforcement learning needs."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, hidden, labels):
        hidden = hidden * 2
        if isinstance(self.head.weight, DTensor):
            hidden = DTensor.from_local(hidden, self.head.weight.device_mesh, [Replicate()], run_check=False)
        return chunked_log_probs(hidden, self.head.weight, labels, bias=self.head.bias, chunk_size=CHUNKS)


def log_prob_step(model, hidden, labels):
    log_probs, entropy = model(hidden, labels)
    (log_probs * torch.arange(LENGTH) + entropy).mean().backward()
    return log_probs.detach(), entropy.detach()


@pytest.mark.parametrize("layout", ["fsdp2", "tp"])
@distributed(world_size=2)
def test_log_probs_of_a_sharded_head_are_those_of_the_plain_one(layout):
    torch.manual_seed(0)
    plain = LogProbs()
    model, mesh = copy.deepcopy(plain), init_device_mesh("cpu", (2,))
    hidden, (_, labels) = torch.randn(ROWS, LENGTH, 6), token_rows()
    rows = slice(None)
    if layout == "tp":
        for name, parameter in [*model.head.named_parameters()]:
            shard = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            setattr(model.head, name, nn.Parameter(shard))
    else:
        fully_shard(model, mesh=mesh)
        half = ROWS // 2
        rows = slice(dist.get_rank() * half, dist.get_rank() * half + half)
    of_plain, of_model = hidden.clone().requires_grad_(), hidden[rows].clone().requires_grad_()
    expected = log_prob_step(plain, of_plain, labels)
    for value, right in zip(log_prob_step(model, of_model, labels[rows]), expected, strict=True):
        torch.testing.assert_close(value, right[rows])
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
    torch.testing.assert_close(of_model.grad, of_plain.grad[rows] * (1 if layout == "tp" else 2))


def mixtral():
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2))


def t5():
    return T5ForConditionalGeneration(T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1))


def with_another_loss():
    model = FAMILIES["llama"]()
    model.loss_function = nn.functional.cross_entropy
    return model


REFUSED = {
    "experts": (mixtral, TilingKwargs(mlp_tile_size=2), "'model.layers.0.mlp' of Mixtral.*experts"),
    "an encoder": (t5, TilingKwargs(loss_chunk_size=2), "not a causal language model"),
    "no causal loss": (
        lambda: LlamaForSequenceClassification(make_llama().config),
        TilingKwargs(loss_chunk_size=2),
        "LlamaForSequenceClassification: its head is NoneType",
    ),
    "another loss": (with_another_loss, TilingKwargs(loss_chunk_size=2), "has the loss function"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_to_which_it_cannot_be_applied_is_refused(case):
    make, tiling, reason = REFUSED[case]
    with pytest.raises(UnsupportedError, match=reason):
        Accelerator(cpu=True, kwargs_handlers=[tiling]).prepare(make())


def test_logits_that_a_model_changes_in_an_unknown_way_are_noticed_in_the_first_step():
    model = FAMILIES["scales"]()
    model = Accelerator(cpu=True, kwargs_handlers=[TilingKwargs(loss_chunk_size=2)]).prepare(model)
    tokens, labels = token_rows()
    forward = type(model.lm_head).__call__

    def doubled(self, hidden):
        outputs = forward(self, hidden)
        return 2 * outputs if self is model.lm_head else outputs

    with (
        mock.patch.object(nn.Linear, "__call__", doubled),
        pytest.raises(UnsupportedError, match="changes its logits in a way"),
    ):
        model(input_ids=tokens, labels=labels)


def test_the_auxiliary_loss_of_experts_is_added():
    torch.manual_seed(0)
    plain = mixtral()
    model = Accelerator(cpu=True, kwargs_handlers=[TilingKwargs(loss_chunk_size=3)]).prepare(
        copy.deepcopy(plain)
    )
    loss, right = (train_step(m, output_router_logits=True).loss for m in (model, plain))
    torch.testing.assert_close(loss, right)


def test_adapters_of_peft_train_as_without_chunks():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.0, init_lora_weights=False)
    plain = peft.get_peft_model(FAMILIES["llama"](), config)
    model = Accelerator(cpu=True, kwargs_handlers=[TILING]).prepare(copy.deepcopy(plain))
    loss, right = (train_step(m).loss for m in (model, plain))
    torch.testing.assert_close(loss, right)
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        if "lora" in name:
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-6)
