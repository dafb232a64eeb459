"""Pipelines of torch: numbers of one process for every schedule, checkpoints, refusals."""

from __future__ import annotations

import functools
import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM

from accel_plugins import tiling
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs import GradScalerKwargs, TilingKwargs
from accel_plugins.parallelism.config import ParallelismConfig, TorchPipelineParallelConfig
from accel_plugins.sharding.folder import ShardWriter
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import CheckpointError, SettingsError
from accel_train import Accelerator
from harness import distributed
from harness.small_llama import SIZES, make_llama

WIDTH, LAYERS, TOKENS, LENGTH, ROWS = 8, 8, 17, 6, 8
STEPS, WINDOW, MAX_NORM = 2, 2, 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A model of no library: its loss is a mean over tokens, and it takes a mask by name."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(TOKENS, WIDTH), nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, input_ids, labels=None, attention_mask=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def make(kind):
    torch.manual_seed(0)
    if kind in ("plain", "frozen"):
        model = Net().double()
        if kind == "frozen":  # the first stage of two is not trained
            model.embed.requires_grad_(requires_grad=False)
            model.layers[:-1].requires_grad_(requires_grad=False)
        return model
    if kind == "mixture":
        mixture = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
        model = MixtralForCausalLM(MixtralConfig(**SIZES | mixture | {"num_hidden_layers": LAYERS}))
        with torch.no_grad():
            for parameter in model.parameters():  # the constructor leaves experts uninitialized
                parameter.normal_(std=0.1)
        return model.double()
    model = make_llama(num_hidden_layers=LAYERS, tie_word_embeddings=kind == "tied", use_cache=True).double()
    if kind == "checkpointed":
        model.activation_checkpointing_enable()
    return model


def samples(*, is_padded):
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(STEPS * WINDOW * ROWS):
        tokens = torch.randint(0, TOKENS, (LENGTH,), generator=generator)
        labels, mask = tokens.clone(), torch.ones_like(tokens)
        if is_padded and index % 3 == 0:  # micro-batches have different numbers of labels
            labels[2:], mask[4:] = -100, 0
        rows.append({"input_ids": tokens, "labels": labels, "attention_mask": mask})
    return rows


@contextmanager
def without_view_warnings():
    with warnings.catch_warnings():
        # Tensor-parallel layers return views; nothing changes them in place here.
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        yield


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def prepared(kind, sizes, *, is_padded, plugin=None, **options):
    config = ParallelismConfig(**sizes, pp_handler=TorchPipelineParallelConfig(**options))
    handlers = [TilingKwargs(loss_chunk_size=5, mlp_tile_size=4)] if kind == "tiled" else []
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=config,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=WINDOW,
        kwargs_handlers=handlers,
    )
    model = make(kind)
    loader = DataLoader(samples(is_padded=is_padded), batch_size=ROWS // config.data_parallel_size)
    return accelerator, *accelerator.prepare(model, optimizer_of(model), loader)


def train(accelerator, model, optimizer, loader):
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            assert len({*accelerator.gather(loss).tolist()}) == 1
            losses.append(loss.item())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


@functools.cache
def train_alone(kind, *, is_padded):
    model = make(kind)
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for index, batch in enumerate(DataLoader(samples(is_padded=is_padded), batch_size=ROWS)):
        loss = model(**batch)["loss"]
        (loss / WINDOW).backward()
        losses.append(loss.item())
        if (index + 1) % WINDOW == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, losses, norms


def check_equal_to_one_process(kind, sizes, **options):
    # Ranks with other batches average their mean losses.
    is_padded = sizes.keys() <= {"pp_size", "tp_size", "sp_size"}
    accelerator, model, optimizer, loader = prepared(kind, sizes, is_padded=is_padded, **options)
    losses, norms = train(accelerator, model, optimizer, loader)
    alone, alone_optimizer, expected, expected_norms = train_alone(kind, is_padded=is_padded)
    # Losses of transformers are computed in float32.
    precise = {"rtol": 1e-12, "atol": 1e-12} if kind == "plain" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(losses, expected, **precise)
    torch.testing.assert_close(norms, expected_norms, **precise)
    state, wanted = accelerator.get_state_dict(model), alone.state_dict()
    if accelerator.is_main_process:
        assert [*state] == [*wanted]
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, **precise)
    check_evaluation(accelerator, model, alone)
    check_optimizer(accelerator, model, optimizer, alone_optimizer, precise)
    return accelerator, model, optimizer, alone


def check_evaluation(accelerator, model, alone):
    rows = samples(is_padded=False)[: ROWS - 1]  # no multiple of the micro-batches
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    model.eval()
    alone.eval()
    with torch.no_grad():
        output, expected = model(**batch), alone(**batch)
    torch.testing.assert_close(output["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output["loss"], expected["loss"], rtol=1e-5, atol=1e-5)
    loader = accelerator.prepare_data_loader(DataLoader(rows, batch_size=4))
    if accelerator.deepspeed_ulysses_dl_adapter(loader, model).shard_sequences is not None:
        check_evaluation_of_shards(model, alone, loader, rows)
        return
    gathered = []
    for part in loader:
        with torch.no_grad():
            gathered.append(accelerator.gather_for_metrics(model(**part)["logits"]))
    torch.testing.assert_close(torch.cat(gathered), expected["logits"], rtol=1e-5, atol=1e-5)
    model.train()
    alone.train()


def check_evaluation_of_shards(model, alone, loader, rows):
    """Each rank of a sequence gets the logits of its shard, and the loss of all."""
    # The second batch is completed by further rows.
    for part, batch in zip(loader, DataLoader(rows, batch_size=4), strict=True):
        with torch.no_grad():
            output, expected = model(**part), alone(**batch)
        number = len(expected["logits"])
        if number == len(output["logits"]):
            torch.testing.assert_close(output["loss"], expected["loss"], rtol=1e-5, atol=1e-5)
        logits, positions = output["logits"][:number], part["position_ids"][:number, :, None]
        shard = expected["logits"].gather(1, positions.expand_as(logits))
        torch.testing.assert_close(logits, shard, rtol=1e-5, atol=1e-5)


def check_optimizer(accelerator, model, optimizer, alone, precise):
    full = accelerator._parts.strategy.states.full_optimizer_state(optimizer.optimizer, [model])
    wanted = alone.state_dict()
    assert full["state"].keys() == wanted["state"].keys()
    for index, values in wanted["state"].items():
        torch.testing.assert_close(full["state"][index]["exp_avg"], values["exp_avg"], **precise)
    assert [group["params"] for group in full["param_groups"]] == [
        group["params"] for group in wanted["param_groups"]
    ]


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("plain", "1F1B"),
        ("tied", "GPipe"),
        ("llama", "1F1B"),
        ("checkpointed", "1F1B"),
        ("tied", "Interleaved1F1B"),
        ("plain", "InterleavedZeroBubble"),
        ("tiled", "Interleaved1F1B"),
        ("tied", "ZBVZeroBubble"),
    ],
)
def test_two_stages_train_as_one_process(tmp_path, kind, schedule):
    with mock.patch.object(tiling, "chunked_cross_entropy", wraps=tiling.chunked_cross_entropy) as chunked:
        accelerator, *_ = check_equal_to_one_process(
            kind, {"pp_size": 2}, pp_schedule=schedule, pp_num_microbatches=4
        )
    is_used = kind == "tiled" and accelerator.is_last_process  # which has the last stage
    assert chunked.called == is_used


@distributed(world_size=4)
def test_four_stages_train_as_one_process(tmp_path):
    check_equal_to_one_process("plain", {"pp_size": 4}, pp_schedule="1F1B")


@distributed(world_size=4)
@pytest.mark.parametrize(
    ("kind", "sizes", "schedule"),
    [
        pytest.param("plain", {"dp_shard_size": 2}, "1F1B", marks=pytest.mark.thorough),
        pytest.param("plain", {"dp_replicate_size": 2}, "InterleavedZeroBubble", marks=pytest.mark.thorough),
        pytest.param("tied", {"dp_shard_size": 2}, "Interleaved1F1B", marks=pytest.mark.thorough),
        pytest.param("tied", {"dp_replicate_size": 2}, "GPipe", marks=pytest.mark.thorough),
        ("llama", {"dp_shard_size": 2}, "ZBVZeroBubble"),
        ("llama", {"tp_size": 2}, "1F1B"),
        pytest.param("tied", {"tp_size": 2}, "Interleaved1F1B", marks=pytest.mark.thorough),
        pytest.param("llama", {"sp_size": 2}, "Interleaved1F1B", marks=pytest.mark.thorough),
        pytest.param("tied", {"sp_size": 2}, "InterleavedZeroBubble", marks=pytest.mark.thorough),
        pytest.param("mixture", {"dp_shard_size": 2, "ep_size": 2}, "1F1B", marks=pytest.mark.thorough),
        pytest.param("mixture", {"tp_size": 2, "ep_size": 2}, "Interleaved1F1B", marks=pytest.mark.thorough),
        ("mixture", {"sp_size": 2, "ep_size": 2}, "InterleavedZeroBubble"),
    ],
)
def test_stages_beside_other_axes_train_as_one_process(tmp_path, kind, sizes, schedule):
    with without_view_warnings():
        check_equal_to_one_process(kind, {"pp_size": 2} | sizes, pp_schedule=schedule)


@distributed(world_size=4)
@pytest.mark.parametrize(("kind", "sizes"), [("plain", {"dp_shard_size": 2}), ("llama", {"tp_size": 2})])
def test_stages_can_be_moved_and_trained_by_a_later_optimizer(tmp_path, kind, sizes):
    with without_view_warnings():
        accelerator, model, _, loader = prepared(kind, {"pp_size": 2} | sizes, is_padded=False)
        assert model.to("cpu") is model
        optimizer = accelerator.prepare(optimizer_of(model))
        losses, _ = train(accelerator, model, optimizer, loader)
        assert model.to("cpu") is model
    _, alone, expected, _ = train_alone(kind, is_padded=False)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    check_optimizer(accelerator, model, optimizer, alone, {"rtol": 1e-5, "atol": 1e-6})


@distributed(world_size=4)
@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("ZBVZeroBubble", marks=pytest.mark.thorough)])
def test_stages_share_sequences_by_ring_attention(tmp_path, schedule):
    accelerator, model, optimizer, loader = prepared(
        "llama", {"pp_size": 2, "cp_size": 2}, is_padded=False, pp_schedule=schedule
    )
    losses, norms = [], []
    for batch in loader:
        tokens = batch["input_ids"]
        labels = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], dim=1)
        buffers = [tokens, labels, torch.arange(LENGTH).repeat(len(tokens), 1)]
        count = (labels != -100).sum() / 2
        context = accelerator.maybe_context_parallel(buffers, [1] * 3, {*buffers})
        with accelerator.accumulate(model), context:
            tokens, labels, positions = buffers
            loss = model(
                input_ids=tokens,
                labels=labels,
                shift_labels=labels,
                position_ids=positions,
                num_items_in_batch=count,
            ).loss
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss, "mean").item())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
    alone, _, expected, expected_norms = train_alone("llama", is_padded=False)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=1e-6)
    state = accelerator.get_state_dict(model)
    for name, value in alone.state_dict().items() if accelerator.is_main_process else ():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@distributed(world_size=4)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"auto_wrap_policy": "transformer_based_wrap"}, marks=pytest.mark.thorough),
        {"auto_wrap_policy": "transformer_based_wrap", "activation_checkpointing": True},
        {"auto_wrap_policy": "transformer_based_wrap", "cpu_offload": True, "forward_prefetch": True},
    ],
    ids=lambda options: [*options][-1],
)
def test_options_of_fsdp2_apply_to_stages(tmp_path, options):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    _, model, _, _ = check_equal_to_one_process("llama", {"pp_size": 2, "dp_shard_size": 2}, plugin=plugin)
    units = [type(module).__name__ for module in model.modules() if isinstance(module, FSDPModule)]
    assert units == ["FSDPLlamaDecoderLayer"] * (LAYERS // 2)


@distributed(world_size=2)
def test_options_of_fsdp2_apply_to_stages_that_nothing_shards(tmp_path):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", activation_checkpointing=True
    )
    check_equal_to_one_process("llama", {"pp_size": 2}, plugin=plugin, pp_schedule="Interleaved1F1B")


def prepared_in(precision, kind, sizes, *handlers):
    config = ParallelismConfig(**sizes)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        parallelism_config=config,
        gradient_accumulation_steps=WINDOW,
        kwargs_handlers=[*handlers],
    )
    model = make(kind).float()
    loader = DataLoader(samples(is_padded=False), batch_size=ROWS // config.data_parallel_size)
    return accelerator, *accelerator.prepare(model, optimizer_of(model), loader)


def check_mixed_precision(precision, kind, sizes):
    accelerator, model, optimizer, loader = prepared_in(precision, kind, sizes)
    losses, norms = train(accelerator, model, optimizer, loader)
    alone, _, expected, expected_norms = train_alone(kind, is_padded=False)
    torch.testing.assert_close(losses, expected, rtol=0.01, atol=0)
    torch.testing.assert_close(norms, expected_norms, rtol=0.05, atol=0)
    for name, value in accelerator.get_state_dict(model).items():
        assert value.dtype is torch.float32
        torch.testing.assert_close(value.double(), alone.state_dict()[name], rtol=0, atol=5e-3)
    model.eval()
    with torch.no_grad():
        tokens = torch.zeros(3, LENGTH, dtype=torch.int64)
        assert model(input_ids=tokens)["logits"].dtype is torch.float32


@distributed(world_size=2)
def test_stages_compute_in_bf16(tmp_path):
    check_mixed_precision("bf16", "plain", {"pp_size": 2})


@distributed(world_size=2)
@pytest.mark.parametrize("kind", ["plain", "frozen"])
def test_stages_compute_in_fp16(kind):
    check_mixed_precision("fp16", kind, {"pp_size": 2})


@distributed(world_size=2)
def test_stages_leave_out_steps_together(tmp_path):
    # 1. A gradient of the last stage is infinite; the first one has none.
    accelerator, model, optimizer, loader = prepared_in(
        "fp16", "frozen", {"pp_size": 2}, GradScalerKwargs(init_scale=1e38)
    )
    before = accelerator.get_state_dict(model)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            assert optimizer.step_was_skipped or not accelerator.sync_gradients
            optimizer.zero_grad()
    assert accelerator.scaler.get_scale() < 1e38
    for name, value in accelerator.get_state_dict(model).items():
        assert torch.equal(value, before[name])
    AcceleratorState._reset_state(True)
    # 2. The program leaves a step out after clipping.
    accelerator, model, optimizer, loader = prepared_in("fp16", "plain", {"pp_size": 2})
    norms = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item())
                optimizer.optimizer.zero_grad()
    alone, expected = make("plain"), []
    for index, batch in enumerate(DataLoader(samples(is_padded=False), batch_size=ROWS)):
        (alone(**batch)["loss"] / WINDOW).backward()
        if (index + 1) % WINDOW == 0:
            expected.append(nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM).item())
            alone.zero_grad()
    torch.testing.assert_close(norms, expected, rtol=0.01, atol=0)


@distributed(world_size=4)
def test_shards_of_stages_compute_in_bf16(tmp_path):
    check_mixed_precision("bf16", "plain", {"pp_size": 2, "dp_shard_size": 2})


@distributed(world_size=2)
def test_a_checkpoint_loads_without_pipelines_and_the_reverse(tmp_path):
    accelerator, model, optimizer, loader = prepared("tied", {"pp_size": 2}, is_padded=True)
    train(accelerator, model, optimizer, loader)
    accelerator.save_state(tmp_path / "pipeline")
    accelerator.save_model(model, tmp_path / "model")
    state = accelerator.get_state_dict(model)
    accelerator.free_memory()
    AcceleratorState._reset_state(True)
    # 1. Load it by DDP, and save.
    plain = Accelerator(cpu=True)
    copy = make("tied")
    copy, copy_optimizer = plain.prepare(copy, optimizer_of(copy))
    plain.load_state(tmp_path / "pipeline")
    loaded = plain.get_state_dict(copy)
    if plain.is_main_process:
        torch.testing.assert_close({name: loaded[name] for name in state}, dict(state))
    moments = {index: values["exp_avg"] for index, values in copy_optimizer.state_dict()["state"].items()}
    plain.save_state(tmp_path / "ddp")
    plain.free_memory()
    AcceleratorState._reset_state(True)
    # 2. Load that by two stages on each rank, cut by name.
    accelerator, model, optimizer, loader = prepared(
        "tied", {"pp_size": 2}, is_padded=True, pp_schedule="interleaved1f1b"
    )
    accelerator.load_state(tmp_path / "ddp")
    again = accelerator.get_state_dict(model)
    full = accelerator._parts.strategy.states.full_optimizer_state(optimizer.optimizer, [model])
    if accelerator.is_main_process:
        torch.testing.assert_close(dict(again), dict(state))
        assert (tmp_path / "model" / "model.safetensors").is_file()
    torch.testing.assert_close({index: values["exp_avg"] for index, values in full["state"].items()}, moments)
    train(accelerator, model, optimizer, loader)


def states(accelerator, model, optimizer):
    persister = accelerator._parts.strategy.states
    full = persister.full_optimizer_state(optimizer.optimizer, [model])
    moments = {index: values["exp_avg"] for index, values in full["state"].items()}
    return dict(persister.full_state_dict(model)), moments


@distributed(world_size=4)
@pytest.mark.parametrize(
    ("chain", "form"),
    [
        ("tied, briefly", "SHARDED_STATE_DICT"),
        pytest.param("tied", "FULL_STATE_DICT", marks=pytest.mark.thorough),
        pytest.param("tied", "SHARDED_STATE_DICT", marks=pytest.mark.thorough),
        pytest.param("mixture", "SHARDED_STATE_DICT", marks=pytest.mark.thorough),
    ],
)
def test_a_checkpoint_of_sharded_stages_loads_under_other_sizes_and_the_reverse(tmp_path, chain, form):
    kind = chain.partition(",")[0]

    def begin(sizes):
        AcceleratorState._reset_state(True)
        is_replicated = sizes.keys() == {"dp_replicate_size"}  # by DDP
        has_plugin = "dp_shard_size" in sizes or (form == "SHARDED_STATE_DICT" and not is_replicated)
        accelerator = Accelerator(
            cpu=True,
            parallelism_config=ParallelismConfig(**sizes),
            fsdp_plugin=plugin() if has_plugin else None,
        )
        model = make(kind)
        return accelerator, *accelerator.prepare(model, optimizer_of(model))

    def plugin():
        return FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=form)

    first, others = CHAINS[chain]
    accelerator, model, optimizer, loader = prepared(kind, first, is_padded=False, plugin=plugin())
    train(accelerator, model, optimizer, loader)
    wanted = states(accelerator, model, optimizer)
    accelerator.save_state(tmp_path / "0")
    accelerator.save_model(model, tmp_path / "model")
    if accelerator.is_main_process:
        make(kind).save_pretrained(tmp_path / "published")
        saved, published = (
            load_file(tmp_path / name / "model.safetensors") for name in ("model", "published")
        )
        assert saved.keys() == published.keys()
    accelerator.free_memory()
    with without_view_warnings():
        for number, sizes in enumerate(others):
            accelerator, model, optimizer = begin(sizes)
            accelerator.load_state(tmp_path / str(number))
            assert_equal(states(accelerator, model, optimizer), wanted)
            accelerator.save_state(tmp_path / str(number + 1))
            is_full = form == "FULL_STATE_DICT" or sizes.keys() == {"dp_replicate_size"}
            assert (tmp_path / str(number + 1) / "pytorch_model_fsdp_0").is_dir() != is_full
            accelerator.free_memory()


CHAINS = {
    "tied, briefly": (
        {"pp_size": 2, "dp_shard_size": 2},
        [{"dp_shard_size": 4}, {"pp_size": 2, "tp_size": 2}, {"pp_size": 2, "dp_shard_size": 2}],
    ),
    "tied": (
        {"pp_size": 2, "dp_shard_size": 2},
        [
            {"pp_size": 4},
            {"dp_shard_size": 4},
            {"pp_size": 2, "dp_replicate_size": 2},
            {"dp_replicate_size": 4},
            {"pp_size": 2, "tp_size": 2},
            {"pp_size": 2, "dp_shard_size": 2},
        ],
    ),
    "mixture": (
        {"pp_size": 2, "dp_shard_size": 2, "ep_size": 2},
        [
            {"dp_shard_size": 4, "ep_size": 2},
            {"pp_size": 2, "tp_size": 2, "ep_size": 2},
            {"dp_replicate_size": 4},
            {"pp_size": 4},
            {"pp_size": 2, "dp_shard_size": 2, "ep_size": 2},
        ],
    ),
}
"""The sizes of a first run, and of those that load its checkpoint one after another, by kind of model."""


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class WithExtraState(Block):
    step = 0

    def get_extra_state(self):
        return {"step": self.step}

    def set_extra_state(self, state):
        self.step = state["step"]


class WithBuffers(Net):
    """A model with a buffer outside of its stages, and a state that is no tensor in each block."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(WithExtraState() for _ in range(LAYERS))
        self.register_buffer("scale", torch.zeros(3))


@distributed(world_size=2)
def test_each_value_is_in_one_file_of_a_sharded_checkpoint(tmp_path):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    config = ParallelismConfig(pp_size=2)
    accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)
    model = WithBuffers()
    model.scale.fill_(2.0)
    for number, layer in enumerate(model.layers):
        layer.step = number
    wanted = {name: value.clone() for name, value in model.state_dict().items() if "extra" not in name}
    model = accelerator.prepare(model)
    accelerator.save_state(tmp_path / "0")
    folder = tmp_path / "0" / "pytorch_model_fsdp_0"
    assert all((folder / f"__{rank}_0.distcp").stat().st_size > 0 for rank in range(2))
    nbytes = ShardWriter(
        {"model": accelerator._parts.strategy.states.model_tensors(model)},
        accelerator.process_index,
        accelerator._parts.strategy.states.writer,
    ).nbytes
    total = sum(value.numel() * value.element_size() for value in wanted.values())
    assert sum(accelerator.gather(torch.tensor([nbytes])).tolist()) == total
    # 1. Load it into stages that have other values, and in one process.
    model.scale.zero_()
    for layer in model.layers:
        layer.step = -1
    accelerator.load_state(tmp_path / "0")
    loaded = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert_equal({name: loaded[name] for name in wanted}, wanted)
    own = {number: layer.step for number, layer in enumerate(model.layers) if isinstance(layer, Block)}
    assert own == {number: number for number in own}
    accelerator.free_memory()
    AcceleratorState._reset_state(True)
    plain = Accelerator(cpu=True)
    model = plain.prepare(WithBuffers())
    plain.load_state(tmp_path / "0")
    assert [layer.step for layer in plain.unwrap_model(model).layers] == [*range(LAYERS)]
    loaded = plain.unwrap_model(model).state_dict()
    assert_equal({name: loaded[name] for name in wanted}, wanted)
    # 2. Another model is refused.
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)
    accelerator.prepare(Net())
    with pytest.raises(CheckpointError, match="which Net does not have"):
        accelerator.load_state(tmp_path / "0")


@pytest.mark.parametrize("kind", ["plain", "llama", "tiled"])
@distributed(world_size=2)
def test_micro_batches_without_labels_count_nothing(tmp_path, kind):
    rows = samples(is_padded=False)
    for row in rows[: ROWS // 2]:  # the first micro-batch
        row["labels"][:] = -100
    accelerator, model, optimizer, _ = prepared(kind, {"pp_size": 2}, is_padded=False)
    alone = make(kind)
    batch = {key: torch.stack([row[key] for row in rows[:ROWS]]) for key in rows[0]}
    expected = alone(**batch)["loss"]
    expected.backward()
    loss = model(**batch)["loss"]
    accelerator.backward(loss)
    torch.testing.assert_close(loss.detach(), expected.detach())
    gradients = {name: parameter.grad for name, parameter in alone.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad * WINDOW, gradients[name])
    # 2. The same in evaluation, and a batch without any label.
    model.eval()
    torch.testing.assert_close(model(**batch)["loss"], alone(**batch)["loss"].detach())
    model.train()
    optimizer.zero_grad()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    accelerator.backward(model(**batch)["loss"])
    for parameter in model.parameters():
        assert parameter.grad is None or not parameter.grad.any()


class WithPlaces(Net):
    """Takes a tensor of one dim that is longer than the batch, as `cache_position` of transformers."""

    def forward(self, input_ids, labels, places):
        assert len(places) == LENGTH
        return super().forward(input_ids, labels)


@distributed(world_size=2)
def test_tensors_of_one_dim_may_be_longer_than_the_batch(tmp_path):
    torch.manual_seed(0)
    model = WithPlaces().double()
    tokens = torch.randint(0, TOKENS, (LENGTH - 2, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = model(tokens, tokens, torch.arange(LENGTH))["loss"].detach()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    model = accelerator.prepare(model)
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens, places=torch.arange(LENGTH))["loss"]
        accelerator.backward(loss)
        torch.testing.assert_close(loss.detach(), expected)


@distributed(world_size=2)
def test_generation_computes_tokens_without_a_cache(tmp_path):
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    model, alone = make("llama"), make("llama")
    model = accelerator.prepare(model)
    prompts = samples(is_padded=False)[0]["input_ids"][None, :3]
    model.eval()
    wanted = alone.eval().generate(prompts, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(prompts, max_new_tokens=4, do_sample=False), wanted)
    assert len([*model.parameters()]) < len([*alone.parameters()])


class TwoStates(Net):
    def forward(self, input_ids, labels=None):
        embedded = x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x) + embedded
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Reversed(Net):
    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for layer in reversed(self.layers):
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class NoLoss(Net):
    def forward(self, input_ids, labels=None):
        return super().forward(input_ids)


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("kind", "expected"),
    [(TwoStates, "beside the activation"), (Reversed, "in the order in which"), (NoLoss, "no loss")],
)
def test_what_cannot_be_cut_is_refused_with_the_first_batch(tmp_path, kind, expected):
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    model = accelerator.prepare(kind())
    tokens = torch.zeros(4, LENGTH, dtype=torch.int64)
    with pytest.raises(SettingsError, match=expected):  # on both ranks, though one of them sees it
        model(input_ids=tokens, labels=tokens)


@distributed(world_size=2)
def test_the_strategy_can_be_selected_by_name(tmp_path):
    config = ParallelismConfig(pp_size=2)
    accelerator = Accelerator(cpu=True, strategy="pipeline", parallelism_config=config)
    model = accelerator.prepare(make("plain"))
    tokens = torch.zeros(4, LENGTH, dtype=torch.int64)
    loss = model(input_ids=tokens, labels=tokens)["loss"]
    accelerator.backward(loss)
    assert all(parameter.grad is not None for parameter in model.parameters())
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    AcceleratorState._reset_state(True)
    with pytest.raises(SettingsError, match=r"fsdp_version=1\) with a ParallelismConfig"):
        Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)


class Outside(Net):
    """A model with a parameter that no module of a stage has."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(TOKENS))


@distributed(world_size=4)
def test_parameters_that_a_stage_cannot_shard_are_refused_by_name(tmp_path):
    config = ParallelismConfig(pp_size=2, dp_shard_size=2)
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    with pytest.raises(SettingsError, match="the parameter 'bias' is in no module of a stage"):
        accelerator.prepare(Outside())
    AcceleratorState._reset_state(True)
    config.pp_handler = TorchPipelineParallelConfig(pp_schedule="ZBVZeroBubble")
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    with pytest.raises(SettingsError, match="is tied to a parameter of another stage of the same rank"):
        accelerator.prepare(make("tied"))


@distributed(world_size=2)
def test_models_and_options_that_have_no_stages_are_refused_by_name(tmp_path):
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    with pytest.raises(SettingsError, match="1 modules in a row"):
        accelerator.prepare(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(SettingsError, match="cannot be cut into pp_num_microbatches=2"):
        accelerator.prepare(make("plain"))(input_ids=torch.zeros(3, LENGTH, dtype=torch.int64))
    mixture = make("mixture")
    mixture.config.output_router_logits = True  # its loss needs the routing of all layers
    with pytest.raises(SettingsError, match="output_router_logits=True in its config"):
        accelerator.prepare(mixture)
    handler = TorchPipelineParallelConfig(pp_split_points="layers.99")
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=handler))
    with pytest.raises(SettingsError, match=r"no module 'layers\.99'"):
        accelerator.prepare(make("plain"))


@pytest.mark.parametrize(
    "options",
    [{"pp_schedule": "fifo"}, {"pp_num_microbatches": 0}, {"pp_schedule": "1F1B", "pp_stages_per_rank": 2}],
)
def test_options_are_checked(options):
    with pytest.raises(SettingsError, match=next(reversed(options))):
        TorchPipelineParallelConfig(**options)
