"""Expert parallelism: numbers of one process, checkpoints under other sizes, and what is refused."""

from __future__ import annotations

import functools
import warnings
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutput

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.optimizers.muon import Muon
from accel_plugins.parallelism.config import ParallelismConfig
from accel_plugins.parallelism.experts import experts_of
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError
from accel_train import Accelerator
from harness import cases, distributed
from harness.resuming import check_resuming, local
from harness.small_llama import SIZES

LENGTH, WINDOW, BATCH, HIDDEN, VOCABULARY, EXPERTS = 6, 2, 2, 16, 16, 4
MAX_NORM = 0.5


class Experts(nn.Module):
    """The protocol, by hand: squared ReLU between two matrices of each expert."""

    def __init__(self, experts=EXPERTS):
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, HIDDEN, 24) / 4)
        self.up_bias = nn.Parameter(torch.randn(experts, 24) / 4)
        self.down = nn.Parameter(torch.randn(experts, 24, HIDDEN) / 4)

    def forward(self, hidden, indices, weights):
        output = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            rows, slots = torch.where(indices == expert)
            inside = (hidden[rows] @ self.up[expert] + self.up_bias[expert]).relu().square()
            output = output.index_add(0, rows, inside @ self.down[expert] * weights[rows, slots, None])
        return output


class Layer(nn.Module):
    def __init__(self, experts=EXPERTS, favourite=None):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, experts)
        self.up, self.down = nn.Linear(HIDDEN, 8), nn.Linear(8, HIDDEN)
        self.experts = Experts(experts)
        if favourite is not None:
            with torch.no_grad():
                self.router.bias.copy_(torch.arange(experts) * favourite)

    def forward(self, hidden):
        hidden = hidden + self.down(self.up(hidden).tanh())
        tokens = self.norm(hidden).reshape(-1, HIDDEN)
        weights, indices = self.router(tokens).softmax(dim=-1).topk(2)
        return hidden + self.experts(tokens, indices, weights).view_as(hidden)


class OwnModel(nn.Module):
    """Two layers of experts, in float64; its loss is that of the next token."""

    _no_split_modules = ("Layer",)
    tp_plan: ClassVar = {
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "layers.*.experts": "of another library",
    }

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(**options) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.double()

    def forward(self, input_ids, labels, use_cache):
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)[:, :-1].reshape(-1, VOCABULARY)
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss)


def make_family(kind, config, **options):
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": VOCABULARY, "num_experts_per_tok": 2, "num_local_experts": EXPERTS}
    model = kind(config(**sizes | options))
    with torch.no_grad():
        for parameter in model.parameters():  # experts are left uninitialised by the constructor
            parameter.normal_(std=0.2)
    return model


AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
FAMILIES = {
    "own": OwnModel,
    "uneven": partial(OwnModel, favourite=9.0),  # experts 2 and 3 get all tokens
    "mixtral": partial(make_family, MixtralForCausalLM, MixtralConfig, **AUXILIARY),
    "qwen3": partial(
        make_family, Qwen3MoeForCausalLM, Qwen3MoeConfig, moe_intermediate_size=8, head_dim=4, **AUXILIARY
    ),
    "deepseek": partial(
        make_family,
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        num_key_value_heads=4,
        moe_intermediate_size=8,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "gpt_oss": partial(
        make_family, GptOssForCausalLM, GptOssConfig, head_dim=4, attn_implementation="eager", **AUXILIARY
    ),
}


def batches(number):
    torch.manual_seed(1)
    return torch.randint(0, VOCABULARY, (number * BATCH, LENGTH)).split(BATCH)


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def make_muon(model):
    return Muon(model, lr=0.02, momentum=0.9, adamw={"lr": 0.01, "eps": 1e-3})


def train(accelerator, model, steps, make_optimizer=make_optimizer):
    """Train by micro-batches; return what was prepared, and the losses and norms of each step."""
    shards = accelerator._parts.strategy.sharding.num_shards
    rows = torch.cat(batches(steps * WINDOW * shards))
    loader = DataLoader(TensorDataset(rows), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)
    losses, norms = [], []
    for (tokens,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, losses, norms


@functools.cache
def train_alone(family, shards, steps, make_optimizer=make_optimizer):
    """The same in one process, by plain PyTorch; the batch of each rank has an auxiliary loss of its own."""
    model = FAMILIES[family]()
    optimizer = make_optimizer(model)
    losses, norms = [], []
    parts = iter(batches(steps * WINDOW * shards))
    for _ in range(steps):
        for _ in range(WINDOW):
            total = 0.0
            for _ in range(shards):
                tokens = next(parts)
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / shards
                (loss / WINDOW).backward()
                total += loss.item()
            losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, losses, norms


def check_equal_to_one_process(family, sizes, folder=None, steps=2, make_optimizer=make_optimizer, **plugin):
    fsdp = FullyShardedDataParallelPlugin(fsdp_version=2, **plugin)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=WINDOW,
        parallelism_config=ParallelismConfig(**sizes),
        **({"fsdp_plugin": fsdp} if sizes.keys() != {"tp_size"} else {}),
    )
    sharded = FAMILIES[family]()
    names = [name for name, _ in sharded.named_parameters()]
    # torch's, of a layer whose output is gathered over the ranks of tensor parallelism
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    model, optimizer, losses, norms = train(accelerator, sharded, steps, make_optimizer)
    for experts in experts_of_prepared(model):
        ranks = dist.get_world_size() // sizes.get("dp_replicate_size", 1)
        for parameter in experts.parameters():
            assert local(parameter).numel() == parameter.numel() // ranks
    shards = accelerator._parts.strategy.sharding.num_shards
    alone, _, expected, expected_norms = train_alone(family, shards, steps, make_optimizer)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    if family in {"own", "uneven"}:
        close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
    close(losses, expected)
    close(norms, expected_norms)
    assert [name for name, _ in model.named_parameters()] == names
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        for name, value in alone.state_dict().items():
            close(state[name], value, msg=lambda text, name=name: f"{name}: {text}")
    if folder is not None:
        check_resuming(accelerator, model, optimizer, folder)
    return accelerator, model


def experts_of_prepared(model):
    modules = [*experts_of(model).values()]
    assert modules
    return modules


TWO_RANKS = {
    "own": ("own", {"dp_shard_size": 2, "ep_size": 2}),
    "one rank gets no token": ("uneven", {"dp_shard_size": 2, "ep_size": 2}),
    "the ranks of tensor parallelism": ("own", {"tp_size": 2, "ep_size": 2}),
    "mixtral": ("mixtral", {"dp_shard_size": 2, "ep_size": 2}),
    "qwen3": ("qwen3", {"dp_shard_size": 2, "ep_size": 2}),
    "deepseek": ("deepseek", {"dp_shard_size": 2, "ep_size": 2}),
    "gpt_oss": ("gpt_oss", {"dp_shard_size": 2, "ep_size": 2}),
    "mixtral, inside of experts": ("mixtral", {"tp_size": 2}),
    "qwen3, inside of experts": ("qwen3", {"tp_size": 2}),
    "deepseek, inside of experts": ("deepseek", {"tp_size": 2}),
}
FOUR_RANKS = {
    "ep 2": ("own", {"dp_shard_size": 4, "ep_size": 2}),
    "ep 4": ("own", {"dp_shard_size": 4, "ep_size": 4}),
    "uneven": ("uneven", {"dp_shard_size": 4, "ep_size": 4}),
    "replicas": ("own", {"dp_replicate_size": 2, "dp_shard_size": 2, "ep_size": 2}),
    "tp": ("own", {"dp_shard_size": 2, "tp_size": 2, "ep_size": 2}),
    "tp, ep 4": ("own", {"dp_shard_size": 2, "tp_size": 2, "ep_size": 4}),
    "mixtral, tp": ("mixtral", {"dp_shard_size": 2, "tp_size": 2, "ep_size": 2}),
    "qwen3, inside of experts": ("qwen3", {"dp_shard_size": 2, "tp_size": 2}),
}


@pytest.mark.parametrize(
    "case",
    cases(
        TWO_RANKS,
        always={"own", "one rank gets no token", "deepseek", "gpt_oss", "qwen3, inside of experts"},
    ),
)
@distributed(world_size=2)
def test_two_ranks_train_as_one_process(case, tmp_path):
    check_equal_to_one_process(*TWO_RANKS[case], tmp_path)


@pytest.mark.parametrize("case", cases(FOUR_RANKS, always={"uneven", "replicas", "tp, ep 4"}))
@distributed(world_size=4)
def test_four_ranks_train_as_one_process(case, tmp_path):
    check_equal_to_one_process(*FOUR_RANKS[case], tmp_path)


@distributed(world_size=4)
def test_muon_trains_shards_of_experts_as_one_process(tmp_path):
    for index, sizes in enumerate(
        (
            {"dp_shard_size": 4, "ep_size": 2},  # dim 0 of experts is sharded twice
            {"dp_shard_size": 4, "ep_size": 4},
            {"dp_shard_size": 2, "tp_size": 2, "ep_size": 2},
        )
    ):
        AcceleratorState._reset_state()
        folder = tmp_path / str(index)
        check_equal_to_one_process("own", sizes, folder, make_optimizer=make_muon)


@pytest.mark.thorough
@distributed(world_size=4)
def test_twenty_steps_train_as_one_process():
    for sizes in ({"dp_shard_size": 4, "ep_size": 2}, {"dp_shard_size": 2, "tp_size": 2, "ep_size": 2}):
        AcceleratorState._reset_state()
        check_equal_to_one_process("own", sizes, steps=20)


@distributed(world_size=2)
def test_experts_train_as_one_process_with_recomputed_activations(tmp_path):
    sizes = {"dp_shard_size": 2, "ep_size": 2}
    check_equal_to_one_process("mixtral", sizes, activation_checkpointing=True)


@distributed(world_size=2)
def test_the_ranks_of_a_ring_share_experts():
    config = ParallelismConfig(cp_size=2, ep_size=2)
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    alone, length = FAMILIES["mixtral"](), 8
    model = accelerator.prepare(FAMILIES["mixtral"]())
    tokens = torch.randint(0, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(1))
    labels, positions = tokens.roll(-1, 1), torch.arange(length).repeat(BATCH, 1)

    def mean_loss(model, tokens, labels, positions):
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss / (BATCH * length)

    expected = mean_loss(alone, tokens, labels, positions)
    expected.backward()
    parts = [tokens.clone(), labels.clone(), positions.clone()]
    with accelerator.maybe_context_parallel(parts, [1] * 3, {*parts}):
        loss = mean_loss(model, *parts)
        accelerator.backward(2 * loss)  # the mean over two ranks is taken
    torch.testing.assert_close(accelerator.reduce(loss.detach(), "sum"), expected.detach())
    for (name, ours), right in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), right.grad, rtol=1e-4, atol=1e-6, msg=name)


@distributed(world_size=2)
def test_mixed_precision_trains_as_without_expert_parallelism():
    losses = []
    for sizes in ({"dp_shard_size": 2}, {"dp_shard_size": 2, "ep_size": 2}):
        AcceleratorState._reset_state()
        accelerator = Accelerator(
            cpu=True,
            mixed_precision="bf16",
            gradient_accumulation_steps=WINDOW,
            parallelism_config=ParallelismConfig(**sizes),
        )
        losses.append(train(accelerator, FAMILIES["mixtral"](), 3)[2])
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)


LAYOUTS = {
    2: ({"dp_shard_size": 2, "ep_size": 2}, {"dp_shard_size": 2}, {"tp_size": 2, "ep_size": 2}),
    4: ({"dp_shard_size": 4, "ep_size": 2}, {"dp_shard_size": 4, "ep_size": 4}, {"dp_replicate_size": 4}),
}


def check_loading_under_other_sizes(folder):
    saved = None
    for sizes in LAYOUTS[dist.get_world_size()]:
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
        if saved is None:
            model, optimizer, _, _ = train(accelerator, OwnModel(), 1)
            accelerator.save_state(folder / "state", flush=False)
            accelerator.save_model(model, folder / "model")
        else:
            model = OwnModel()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model, optimizer = accelerator.prepare(model, make_optimizer(model))
            accelerator.load_state(folder / "state")
        state = accelerator.get_state_dict(model)
        moments = accelerator._parts.strategy.states.full_optimizer_state(optimizer.optimizer, [model])
        if accelerator.is_main_process:
            now = [*state.values(), *(value["exp_avg"] for value in moments["state"].values())]
            saved = saved or now
            for tensor, expected in zip(now, saved, strict=True):
                assert torch.equal(tensor, expected), sizes
            alone = OwnModel()
            alone.load_state_dict(load_file(folder / "model" / "model.safetensors"))
            assert all(torch.equal(value, state[name]) for name, value in alone.state_dict().items())
        saved = saved or True


@distributed(world_size=2)
def test_two_ranks_load_under_other_sizes(tmp_path):
    check_loading_under_other_sizes(tmp_path)


@distributed(world_size=4)
def test_four_ranks_load_under_other_sizes(tmp_path):
    check_loading_under_other_sizes(tmp_path)


@distributed(world_size=2)
def test_a_plan_shards_experts_without_fsdp_or_says_what_is_missing():
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=WINDOW, parallelism_config=ParallelismConfig(tp_size=2)
    )
    model, _, losses, _ = train(accelerator, FAMILIES["mixtral"](), 2)
    for parameter in experts_of_prepared(model)[0].parameters():
        assert local(parameter).numel() == parameter.numel() // 2
    torch.testing.assert_close(losses, train_alone("mixtral", 1, 2)[2], rtol=1e-5, atol=1e-6)

    def refused(text, **changes):
        model = FAMILIES["mixtral"]()
        model.tp_plan = {name: style for name, style in (model.tp_plan | changes).items() if style}
        with pytest.raises(SettingsError, match=text):
            accelerator.prepare(model)

    experts = "model.layers.*.mlp.experts"
    refused(r"'model\.layers\.0\.mlp\.experts'; give the module the style 'moe_tp", **{experts: None})
    refused(
        r"'model\.layers\.0\.mlp\.experts'.*does not cover its parameter 'down_proj'",
        **{f"{experts}.down_proj": None},
    )
    odd = make_family(MixtralForCausalLM, MixtralConfig, intermediate_size=7)
    with pytest.raises(SettingsError, match=r"'gate_up_proj' has the shape \(4, 14, 16\), whose dim 1"):
        accelerator.prepare(odd)


class OfTokens(Experts):
    def forward(self, hidden):
        return hidden


class WithNorm(Experts):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))


class OtherCountExperts(Experts):
    def __init__(self):
        super().__init__()
        self.num_experts = 3


def with_experts(module):
    model = OwnModel()
    model.layers[1].experts = module
    return model


@distributed(world_size=2)
def test_what_cannot_be_sharded_is_refused_by_name():
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2, ep_size=2))
    for make, text in (
        (lambda: with_experts(Experts(3)), r"'layers\.1\.experts' \(Experts\).*has 3, which 2 ranks"),
        (lambda: with_experts(WithNorm()), r"'layers\.1\.experts'.*'scale' does not have the experts"),
        (lambda: with_experts(OfTokens()), r"'layers\.1\.experts'.*forward\(hidden\) does not take"),
        (lambda: with_experts(OtherCountExperts()), r"'layers\.1\.experts'.*num_experts is not the size"),
        (
            lambda: with_experts(nn.ModuleList([nn.Linear(2, 2)])),
            r"'layers\.1\.experts'.*each is a module of its own",
        ),
        (lambda: nn.Sequential(nn.Linear(2, 2)), r"ep_size=2\): Sequential has no module of experts"),
    ):
        with pytest.raises(SettingsError, match=text):
            accelerator.prepare(make())
    AcceleratorState._reset_state()
    model = OwnModel()
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(dp_shard_size=2, ep_size=2),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules=[model.layers[0]]),
    )
    with pytest.raises(SettingsError, match=r"'layers\.0\.experts'.*ignored_modules"):
        accelerator.prepare(model)


@distributed(world_size=2)
def test_other_strategies_refuse_experts():
    for strategy, text in (("tp", r"ep_size=2\): FSDP2 shards the experts"), ("ddp", "ask for 'fsdp2'")):
        AcceleratorState._reset_state()
        with pytest.raises(SettingsError, match=text):
            Accelerator(
                cpu=True, strategy=strategy, parallelism_config=ParallelismConfig(tp_size=2, ep_size=2)
            )
