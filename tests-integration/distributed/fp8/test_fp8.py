"""FP8 with torchao: several processes give what one does by hand, checkpoints have plain weights."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.fp8 import build, te
from accel_plugins.fp8.ao import has_ao_layers
from accel_plugins.fp8.recipe import AORecipeKwargs, TERecipeKwargs
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs import TorchDynamoPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import UnsupportedError
from accel_state.libraries import BY_NAME
from accel_train import Accelerator
from harness import cases, distributed
from harness.engines import deepspeed_process

pytest.importorskip("torchao")

STEPS = 6
ROWS = 4
VOCABULARY = 32
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, hidden):
        return hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))


class Model(torch.nn.Module):
    """Predicts the next token from the present one and the mean of those before it."""

    _no_split_modules = ("Block",)

    def __init__(self, width=32):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.first = torch.nn.Linear(width, width)
        self.blocks = torch.nn.ModuleList([Block(width), Block(width)])
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        hidden = self.first(self.embed(tokens))
        counts = torch.arange(1, 1 + tokens.shape[1], dtype=hidden.dtype)[:, None]
        hidden = hidden + hidden.cumsum(1) / counts
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def make_model(seed=3):
    torch.manual_seed(seed)
    model = Model()
    model.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    return model


def make_batches(steps=STEPS, rows=ROWS, seed=4):
    """Sequences in which each token follows from the one before it."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(VOCABULARY, (steps, rows, 1), generator=generator)
    return (first + 5 * torch.arange(9) + torch.arange(9) ** 2) % VOCABULARY


def loss_of(model, tokens):
    logits = model(tokens[:, :-1]).float()
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def convert_by_hand(model, name):
    """torchao's own call, for the four layers in the middle."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(name), emulate=True, pad_inner_dim=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "blocks" in name)


class Rounded(torch.nn.Module):
    """Computes as FSDP2 does with a policy of bfloat16: parameters and inputs of blocks are rounded to it.

    Weights that are all-gathered in 8 bits are rounded to these alone.
    """

    def __init__(self, model, name):
        super().__init__()
        self.model = model
        gathered = ("up.weight", "down.weight") if name == "tensorwise" else ()
        self.rounded = [one for one, _ in model.named_parameters() if not one.endswith(gathered)]
        for block in model.blocks:
            block.register_forward_pre_hook(lambda _, inputs: tuple(one.bfloat16() for one in inputs))

    def forward(self, tokens):
        parameters = dict(self.model.named_parameters())
        rounded = {one: parameters[one].bfloat16() for one in self.rounded}
        return torch.func.functional_call(self.model, rounded, tokens)


def train_by_hand(name, shards, clip=None, *, rounded=False):
    """One process: gradients are means over what each of several ranks would compute."""
    model = make_model()
    if name is not None:
        convert_by_hand(model, name)
    optimizer = make_optimizer(model)
    forward = Rounded(model, name) if rounded else model
    for batch in make_batches():
        for shard in range(shards):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(forward, batch[shard::shards])
            (loss / shards).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(accelerator, model, optimizer, batches, clip=None):
    sharding = accelerator._parts.strategy.sharding
    own = slice(sharding.shard_index, None, sharding.num_shards)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch[own]))
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def distance(found, expected):
    """How far apart two results are, as a share of the way from the beginning."""
    start = make_model().state_dict()
    apart = sum((found[name] - expected[name]).square().sum() for name in start)
    return (apart / sum((expected[name] - start[name]).square().sum() for name in start)).sqrt().item()


def prepared(accelerator):
    model = make_model()
    return accelerator.prepare(model, make_optimizer(model))


def fsdp(version, **more):
    wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    return FullyShardedDataParallelPlugin(fsdp_version=version, **wrap, **more)


def zero(stage):
    config = {"train_micro_batch_size_per_gpu": ROWS // 2, "zero_optimization": {"stage": stage}}
    return DeepSpeedPlugin(hf_ds_config=config)


PLUGINS = {
    "ddp": dict,
    "fsdp2": lambda: {"fsdp_plugin": fsdp(2)},
    "fsdp2-recomputed": lambda: {"fsdp_plugin": fsdp(2, activation_checkpointing=True)},
    "tp": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
    "fsdp1": lambda: {"fsdp_plugin": fsdp(1)},
    "zero2": lambda: {"deepspeed_plugin": zero(2)},
    "zero3": lambda: {"deepspeed_plugin": zero(3)},
    "hsdp": lambda: {
        "fsdp_plugin": fsdp(2),
        "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
    },
    "fsdp2+tp": lambda: {
        "fsdp_plugin": fsdp(2),
        "parallelism_config": ParallelismConfig(dp_shard_size=2, tp_size=2),
    },
}


def make_accelerator(config=None, strategy="ddp", **more):
    handlers = [AORecipeKwargs(config=config)]
    return Accelerator(
        cpu=True, mixed_precision="fp8", kwargs_handlers=handlers, **PLUGINS[strategy](), **more
    )


@pytest.mark.parametrize("name", RECIPES[:3])
def test_one_process_trains_as_by_hand(name):
    accelerator = make_accelerator(name)
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, make_batches(), clip=0.5)
    torch.testing.assert_close(model.state_dict(), train_by_hand(name, 1, clip=0.5))


def final_loss(seed, name=None):
    precision, handlers = ("bf16", []) if name is None else ("fp8", [AORecipeKwargs(config=name)])
    accelerator = Accelerator(cpu=True, mixed_precision=precision, kwargs_handlers=handlers)
    model = make_model(seed)
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    train(accelerator, model, optimizer, make_batches(40, 8, seed))
    AcceleratorState._reset_state(reset_partial_state=True)
    with torch.no_grad():
        return loss_of(model, make_batches(1, 64, 9)[0]).item()


@pytest.mark.thorough
def test_a_small_language_model_learns_as_it_does_in_bf16():
    """The final loss is within 5 % of that in bfloat16, and below that of a model that knows nothing."""
    for seed in (1, 2, 3):
        expected = final_loss(seed)
        assert expected < 0.8 * math.log(VOCABULARY)
        for name in RECIPES:
            assert abs(final_loss(seed, name) / expected - 1) < 0.05, (seed, name)


@pytest.mark.parametrize("name", ["tensorwise", "mxfp8"])
def test_what_is_saved_loads_without_torchao(name, tmp_path):
    accelerator = make_accelerator(name)
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, make_batches())
    accelerator.save_model(model, tmp_path / "model")
    accelerator.save_state(tmp_path / "state")
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    for file in (tmp_path / "model" / "model.safetensors", tmp_path / "state" / "model.safetensors"):
        plain = make_model()
        plain.load_state_dict(load_file(file))
        torch.testing.assert_close(plain.state_dict(), weights, rtol=0, atol=0)
    train(accelerator, model, optimizer, make_batches())
    accelerator.load_state(tmp_path / "state")
    torch.testing.assert_close(accelerator.get_state_dict(model), weights, rtol=0, atol=0)


def test_micro_batches_are_one_batch():
    """Scales of rows do not depend on the other rows, nor do gradients of weights in high precision."""
    accelerator = make_accelerator("rowwise_with_gw_hp", gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator)
    halves = [half for batch in make_batches() for half in batch.split(ROWS // 2)]
    train(accelerator, model, optimizer, halves)
    assert distance(accelerator.get_state_dict(model), train_by_hand("rowwise_with_gw_hp", 1)) < 0.05


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_regions_compute_the_same():
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
    accelerator = make_accelerator("tensorwise", dynamo_plugin=plugin)
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, make_batches(), clip=0.5)
    assert distance(accelerator.get_state_dict(model), train_by_hand("tensorwise", 1, clip=0.5)) < 0.05


CASES = {
    "ddp": "rowwise",
    "fsdp2": "tensorwise",
    "fsdp2-recomputed": "rowwise_with_gw_hp",
    "tp": "tensorwise",
    "fsdp1": "tensorwise",
    "zero2": "tensorwise",
    "zero3": "rowwise_with_gw_hp",
}
CASES_OF_FOUR = {"hsdp": "tensorwise", "fsdp2+tp": "tensorwise"}


ROUNDED = ("fsdp2", "fsdp2-recomputed", "hsdp")
"""Strategies that are compared with one process that rounds parameters and inputs of blocks as they do."""
BOUNDS = {"ddp": 1e-5, **dict.fromkeys(ROUNDED, 0.04)}
"""By hand, noise of 1e-7 in the first weights moves results by up to 0.027: the first steps of AdamW are as
large for small gradients as for others, and an element may fall on the other side of a step of eight bits."""
BOUND = 0.2
"""Rounding parameters and inputs to bfloat16 moves results by 0.04 to 0.08 (seeds 3 to 6), and the others
round elsewhere than one process does: 0.07 to 0.11 were seen."""


def gathers_in_8_bits(model):
    weight = model.get_submodule("blocks.0.up").weight if hasattr(model, "blocks") else None
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return "Float8" in type(local).__name__


@pytest.mark.parametrize("strategy", CASES)
@distributed(world_size=2)
def test_several_processes_train_as_one_does_and_resume(strategy, tmp_path):
    with deepspeed_process() if strategy.startswith("zero") else nullcontext():
        check_strategy(strategy, CASES[strategy], tmp_path)


@pytest.mark.parametrize("strategy", cases(CASES_OF_FOUR, always={"fsdp2+tp"}))
@distributed(world_size=4)
def test_four_processes_along_two_axes_train_as_one_does_and_resume(strategy, tmp_path):
    check_strategy(strategy, CASES_OF_FOUR[strategy], tmp_path)


def check_strategy(strategy, name, tmp_path):
    accelerator = make_accelerator(name, strategy)
    model, optimizer = prepared(accelerator)
    assert has_ao_layers(model)
    assert gathers_in_8_bits(model) is (strategy in {"fsdp2", "hsdp", "fsdp2+tp"})
    batches = make_batches()
    train(accelerator, model, optimizer, batches[:3], clip=0.5)
    accelerator.save_state(tmp_path / "half")
    train(accelerator, model, optimizer, batches[3:], clip=0.5)
    found = accelerator.get_state_dict(model)
    shards = accelerator._parts.strategy.sharding.num_shards
    if accelerator.is_main_process:
        assert {type(value) for value in found.values()} == {torch.Tensor}
        expected = train_by_hand(name, shards, clip=0.5, rounded=strategy in ROUNDED)
        apart = distance(found, expected)
        assert apart < BOUNDS.get(strategy, BOUND), apart
    accelerator.load_state(tmp_path / "half")
    train(accelerator, model, optimizer, batches[3:], clip=0.5)
    again = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.testing.assert_close(again, found, rtol=0, atol=0)


@distributed(world_size=2)
def test_ranks_may_not_run_out_of_batches_where_each_forward_pass_reduces_maxima():
    replaced = patch.multiple(te, make_recipe=lambda _: None, has_transformer_engine_layers=lambda _: True)
    with replaced, patch.object(build, "choose_backend", lambda *_, **__: BY_NAME["TE"]):  # as on a GPU
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()])
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        with (
            pytest.raises(UnsupportedError, match="recipe='delayed'"),
            accelerator.join_uneven_inputs([model]),
        ):
            pass
        accelerator.te_recipe_handler = TERecipeKwargs(recipe="current")
        with accelerator.join_uneven_inputs([model]):
            pass
