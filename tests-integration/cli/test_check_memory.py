"""`accel check`: what ranks hold when their models are sharded, beside arithmetic and what is measured."""

from __future__ import annotations

import json
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from accel import Accelerator
from accel.utils import ParallelismConfig
from accel_ops.tree import local_part
from harness import distributed
from harness.checks import run_checks

WIDTH, LAYERS = 256, 4
NET = """\
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator
from accel.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, MSAMPRecipeKwargs, ParallelismConfig

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear({width}, 4 * {width}), nn.Linear(4 * {width}, {width})

    def forward(self, x):
        y = x.unflatten(-1, (4, -1)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2).flatten(2)
        return x + y + self.down(nn.functional.gelu(self.up(x)))

class Net(nn.Module):
    _no_split_modules = ["Block"]
    tp_plan = {{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range({layers})])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

accelerator = Accelerator({arguments})
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(64, {length}, {width})), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (rows,) in loader:
    with accelerator.maybe_context_parallel(buffers=[rows], buffer_seq_dims=[1], no_restore_buffers={{rows}}):
        loss = model(rows).square().mean()
        accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
if {condition}:
    model(rows)
accelerator.save_state("out")
accelerator.save_model(model, "weights")
"""
FSDP = (
    'fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap"{})'
)
ELEMENTS = LAYERS * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)


PRETRAINED = """\
import torch
from accel import Accelerator
from accel.utils import DeepSpeedPlugin
from transformers import AutoModelForCausalLM

accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
model = AutoModelForCausalLM.from_pretrained("model")
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
ids = torch.randint(0, 100, (2, 16), device=accelerator.device)
accelerator.backward(model(input_ids=ids, labels=ids).loss)
optimizer.step()
state = accelerator.get_state_dict(model)
accelerator.unwrap_model(model).save_pretrained(
    "final", is_main_process=accelerator.is_main_process, state_dict=state, save_function=accelerator.save
)
"""


STAGES_OF_T5 = """\
import torch
from transformers import T5Config, T5ForConditionalGeneration
from accel import Accelerator
from accel.utils import MegatronLMPlugin

accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(pp_degree=2, num_micro_batches=2))
sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 32}
model = T5ForConditionalGeneration(T5Config(**sizes))
accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
"""


MEGATRON = """\
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel
from accel import Accelerator
from accel.utils import MegatronLMPlugin

sizes = {{"tp_degree": 2, "pp_degree": {stages}, "num_micro_batches": 2}}
plugin = MegatronLMPlugin(**sizes, use_distributed_optimizer=True)
accelerator = Accelerator(megatron_lm_plugin=plugin, mixed_precision="bf16")
model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=128, n_positions=32))
optimizer = torch.optim.AdamW(model.parameters())
rows = [{{"input_ids": row, "labels": row}} for row in torch.randint(0, 128, (64, 16))]
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
"""


MIXTURE = """
import torch
from torch import nn
from accel import Accelerator
from accel.parallelism_config import ParallelismConfig


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = 8
        self.up, self.down = nn.Parameter(torch.randn(8, 16, 64)), nn.Parameter(torch.randn(8, 64, 16))

    def forward(self, hidden, indices, weights):
        output = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            rows, slots = torch.where(indices == expert)
            inside = (hidden[rows] @ self.up[expert]).relu() @ self.down[expert]
            output = output.index_add(0, rows, inside * weights[rows, slots, None])
        return output


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(16, 8, bias=False), Experts()

    def forward(self, hidden):
        weights, indices = self.router(hidden).softmax(-1).topk(2)
        return hidden + self.experts(hidden, indices, weights)


Layers = type("Layers", (nn.Sequential,), {"_no_split_modules": ["Layer"]})
accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=4, ep_size=2))
model = Layers(Layer(), Layer())
loader = torch.utils.data.DataLoader(torch.randn(32, 16), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for batch in loader:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""

OPTIMIZED = """
import torch
from torch import nn
from accel import Accelerator
from accel.optimizers import HostAdamW, Muon
from accel.utils import ParallelismConfig

accelerator = Accelerator(parallelism_config=ParallelismConfig({sizes}))
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Linear(64, 1))
optimizer = {optimizer}(model.parameters())
loader = torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for rows in loader:
    accelerator.backward(model(rows).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""

STAGES = """
import torch
from torch import nn
from accel import Accelerator
from accel.utils import ParallelismConfig, TorchPipelineParallelConfig


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.head = nn.Linear(16, 64)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


handler = TorchPipelineParallelConfig(pp_schedule="{schedule}", pp_num_microbatches=4)
config = ParallelismConfig(pp_size=2, dp_shard_size={shards}, pp_handler=handler)
accelerator = Accelerator(parallelism_config=config, mixed_precision="{precision}")
model = Net()
length = 10 + ({differs}) * accelerator.process_index
tokens = torch.randint(0, 64, (32, length))
loader = torch.utils.data.DataLoader(tokens, batch_size=8 // {shards})
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for batch in loader:
    accelerator.backward(model(batch))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
model.eval()
accelerator.gather(model(batch))
accelerator.save_state("out")
accelerator.save_model(model, "weights")
"""

STAGES_OF_LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from accel import Accelerator
from accel.utils import ParallelismConfig, TorchPipelineParallelConfig

handler = TorchPipelineParallelConfig(pp_schedule="ZBVZeroBubble", pp_num_microbatches=4)
accelerator = Accelerator(parallelism_config=ParallelismConfig(pp_size=2, pp_handler=handler))
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=100, tie_word_embeddings=True))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 100, (16, 12))]
loader = torch.utils.data.DataLoader(rows, batch_size=8)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
"""

SEQUENCES = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from accel import Accelerator
from accel.utils import ParallelismConfig
from accel_plugins import TilingKwargs

config = ParallelismConfig({sizes})
accelerator = Accelerator(parallelism_config=config, kwargs_handlers=[TilingKwargs({tiles})])
sizes = {{"hidden_size": 32, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=1000))
tokens = torch.ones(1024, dtype=torch.int64)
loader = torch.utils.data.DataLoader([{{"input_ids": tokens, "labels": tokens}}] * 8, batch_size=1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for batch in loader:
    accelerator.backward(model(**batch, use_cache=False).loss)
    optimizer.step()
    optimizer.zero_grad()
"""


AXES_IN_STAGES = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from accel import Accelerator
from accel.utils import ParallelismConfig

axes = dict({axes})
accelerator = Accelerator(parallelism_config=ParallelismConfig(pp_size=2, **axes))
sizes = {{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}}
sizes |= {{"num_key_value_heads": 4, "vocab_size": 100}}
if "ep_size" in axes:
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))
else:
    model = LlamaForCausalLM(LlamaConfig(**sizes))
rows = [{{"input_ids": row, "labels": row}} for row in torch.randint(0, 100, (8, 16))]
loader = torch.utils.data.DataLoader(rows, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for batch in loader:
    parts = []
    if "cp_size" in axes:
        labels = torch.nn.functional.pad(batch["input_ids"][:, 1:], (0, 1), value=-100)
        batch |= {{"labels": labels, "shift_labels": labels.clone()}}
        batch["position_ids"] = torch.arange(16).repeat(4, 1)
        parts = [*batch.values()]
    with accelerator.maybe_context_parallel(parts, [1] * len(parts), {{*parts}}):
        accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_state("out")
"""


def make_llama():
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=100
    )
    return LlamaForCausalLM(config)


def script(arguments, condition="False", length=64):
    return NET.format(width=WIDTH, layers=LAYERS, arguments=arguments, condition=condition, length=length)


def deepspeed(config):
    return script(f"deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={config})")


def sharded(sizes, more="", **parts):
    return script(f"{FSDP.format(more)}, parallelism_config=ParallelismConfig({sizes})", **parts)


def optimized(optimizer, sizes):
    return OPTIMIZED.format(optimizer=optimizer, sizes=sizes)


def stages(**parts):
    return STAGES.format(**{"schedule": "1F1B", "shards": 1, "precision": "no", "differs": 0} | parts)


OFFLOADED = {"stage": 2, "reduce_bucket_size": 1_000_000, "offload_optimizer": {"device": "cpu"}}
CASES = {
    "copies of shards": (32, "0,9", sharded("dp_replicate_size=4, dp_shard_size=8")),
    "shards of tensor-parallel layers": (
        8,
        "0,7",
        sharded(
            "dp_shard_size=4, tp_size=2",
            ', state_dict_type="FULL_STATE_DICT"',
            condition="accelerator.is_main_process",
        ),
    ),
    "experts": (4, "3", MIXTURE),
    "stages": (2, "0,1", stages()),
    "stages of other batches": (2, "0,1", stages(differs=2)),
    "shards of stages": (4, "0,1,2,3", stages(shards=2, precision="bf16", schedule="Interleaved1F1B")),
    "stages of Llama": (2, "0,1", STAGES_OF_LLAMA),
    "stages that share sequences": (4, "0,3", AXES_IN_STAGES.format(axes="sp_size=2")),
    "stages with a ring": (4, "0,3", AXES_IN_STAGES.format(axes="cp_size=2")),
    "stages that share experts": (4, "0,3", AXES_IN_STAGES.format(axes="dp_shard_size=2, ep_size=2")),
    "whole sequences": (2, "1", sharded("dp_shard_size=2", length=2048)),
    "parts of sequences": (8, "1", sharded("dp_shard_size=2, cp_size=4", length=2048)),
    "fewer rows than ranks": (4, "0,3", optimized("torch.optim.AdamW", "dp_shard_size=4")),
    "Muon": (4, "3", optimized("Muon", "dp_shard_size=4")),
    "Muon, copies of shards": (4, "3", optimized("Muon", "dp_replicate_size=2, dp_shard_size=2")),
    "AdamW on the host": (4, "3", optimized("HostAdamW", "dp_shard_size=4")),
    "AdamW on the host, replicas": (4, "3", optimized("HostAdamW", "dp_replicate_size=4")),
    "full sequences": (2, "1", SEQUENCES.format(sizes="dp_shard_size=2", tiles="")),
    "Ulysses": (2, "1", SEQUENCES.format(sizes="sp_size=2", tiles="")),
    "chunks and tiles": (
        2,
        "1",
        SEQUENCES.format(sizes="dp_shard_size=2", tiles="loss_chunk_size=64, mlp_tile_size=64"),
    ),
    "tensor-parallel layers": (2, "1", script("parallelism_config=ParallelismConfig(tp_size=2)")),
    "ZeRO-2": (8, "0,3", script("deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), mixed_precision='bf16'")),
    "a configuration of DeepSpeed": (
        8,
        "3",
        deepspeed({"zero_optimization": OFFLOADED, "bf16": {"enabled": True}, "train_batch_size": "auto"}),
    ),
    "a configuration of DeepSpeed that is contradicted": (
        8,
        "3",
        deepspeed({"zero_optimization": {"stage": 2}, "train_batch_size": 7}),
    ),
    "a model of transformers": (8, "0", PRETRAINED),
    "bfloat16": (8, "3", script(f"{FSDP.format('')}, mixed_precision='bf16'")),
    "FP8 with torchao": (8, "3", script(f"{FSDP.format('')}, mixed_precision='fp8'")),
    "FP8 with MS-AMP": (
        8,
        "3",
        script("mixed_precision='fp8', kwargs_handlers=[MSAMPRecipeKwargs()]"),
    ),
    "Megatron": (8, "3", MEGATRON.format(stages=2)),
    "Megatron with too many stages": (8, "3", MEGATRON.format(stages=8)),
    "Megatron with a T5 in stages": (4, "3", STAGES_OF_T5),
}
"""Size of the job, ranks, and the script."""

USUAL = (
    "shards of tensor-parallel layers",
    "experts",
    "stages",
    "full sequences",
    "chunks and tiles",
    "tensor-parallel layers",
    "ZeRO-2",
    "Megatron",
    "Megatron with too many stages",
)
"""The cases of every commit. Tests of the others are thorough."""


class Findings(dict):
    """What `accel check` finds in each case; those of a group are forked from one process."""

    def __init__(self, make_folder):
        self.make_folder = make_folder

    def __missing__(self, wanted):
        base, lines = self.make_folder("checks"), {}
        for name, (world, ranks, text) in CASES.items():
            if (name in USUAL) == (wanted in USUAL):
                folder = base / name
                folder.mkdir()
                (folder / "train.py").write_text(text)
                lines[name] = ["--world", str(world), "--ranks", ranks, "--json", "train.py"]
        if "a model of transformers" in lines:
            make_llama().save_pretrained(base / "a model of transformers" / "model")
        for name, check in run_checks(lines, base, {"HF_HOME": str(base / "hf")}).items():
            assert check.output, check.errors
            left = {path.name for path in check.folder.iterdir() if path.is_dir()} - {"model", "__pycache__"}
            self[name] = {**json.loads(check.output), "left": left}
        return self[wanted]


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    return Findings(tmp_path_factory.mktemp)


@pytest.mark.thorough
def test_copies_of_shards_hold_what_arithmetic_says_and_one_copy_is_saved(checks):
    result = checks["copies of shards"]
    assert result["problems"] == []
    for rank in result["ranks"].values():
        assert rank["strategy"] == "fsdp2: dp_replicate 4 x dp_shard 8"
        assert rank["parts"]["parameters"] == 4 * ELEMENTS / 8
        # AdamW counts its steps, tensor by tensor.
        assert rank["parts"]["optimizer"] == pytest.approx(8 * ELEMENTS / 8, rel=1e-3)
    first, other = (rank["files"] for rank in result["ranks"].values())
    assert [rank["host memory"] for rank in result["ranks"].values()] == [4 * ELEMENTS, 0], "save_model"
    assert first["weights/model*.safetensors"] == 4 * ELEMENTS
    assert first["out/pytorch_model_fsdp_0/__0_0.distcp"] == 4 * ELEMENTS / 8
    assert other["out/pytorch_model_fsdp_0/__9_0.distcp"] == 0, "the second copy"


def test_tensor_parallel_layers_are_sharded_and_a_forward_pass_that_one_rank_would_miss_is_named(checks):
    result = checks["shards of tensor-parallel layers"]
    rank = result["ranks"]["7"]
    assert rank["strategy"] == "fsdp2: dp_shard 4 x tp 2"
    whole = LAYERS * WIDTH  # the bias that is added after the parts are summed up
    assert rank["parts"]["parameters"] == 4 * ((ELEMENTS - whole) / 8 + whole / 4)
    assert result["ranks"]["0"]["files"]["out/model.safetensors"] == 4 * ELEMENTS
    assert "out/model.safetensors" not in rank["files"]
    # A full state dict is gathered, of the optimizer too.
    assert result["ranks"]["0"]["host memory"] == pytest.approx(12 * ELEMENTS, rel=1e-3)
    (problem,) = result["problems"]
    assert "rank 0 calls all_gather" in problem.replace("allgather", "all_gather")
    assert "rank 7 calls save_state" in problem


def test_experts_are_shared_by_ranks_and_their_weights_are_sharded(checks):
    result = checks["experts"]
    assert result["problems"] == []
    rank = result["ranks"]["3"]
    assert rank["strategy"] == "fsdp2: dp_shard 4 x ep 2"
    assert rank["parts"]["parameters"] == 4 * 2 * (2 * 8 * 16 * 64 + 16 * 8) / 4


EMBEDDING, HIDDEN, HEAD = 64 * 16, 16 * 16 + 16, 64 * 16 + 64
"""Elements of the modules of `STAGES`."""


def transfers(rank, preposition):
    return [words for words in map(str.split, rank["collectives"]) if preposition in words]


def test_stages_hold_their_own_modules_and_send_what_the_others_receive(checks):
    result = checks["stages"]
    assert result["problems"] == []
    first, last = result["ranks"]["0"], result["ranks"]["1"]
    assert first["strategy"] == "pipeline: pp 2"
    # Stages are cut so that the larger of the two is as small as possible.
    counts = [EMBEDDING, *[HIDDEN] * 6, HEAD]
    halves = [(sum(counts[:cut]), sum(counts[cut:])) for cut in range(1, 8)]
    for rank, elements in zip((first, last), min(halves, key=max), strict=True):
        assert rank["parts"]["parameters"] == 4 * elements
        assert rank["parts"]["optimizer"] == pytest.approx(8 * elements, rel=0.02)  # AdamW counts its steps
    # Four micro-batches of two rows, three times (`--batches`): activations, and back their gradients.
    for sender, receiver in ((first, last), (last, first)):
        sizes = [int(words[1]) for words in transfers(sender, "to")]
        assert sizes == [4 * 2 * 10 * 16] * 4 * 3
        assert sizes == [int(words[1]) for words in transfers(receiver, "from")]
    assert first["files"]["out/model.safetensors"] == 4 * sum(counts)
    assert first["files"]["weights/model*.safetensors"] == 4 * sum(counts)
    assert first["files"]["out/optimizer.bin"] == pytest.approx(8 * sum(counts), rel=0.02)
    assert "out/model.safetensors" not in last["files"]


@pytest.mark.thorough
def test_stages_that_get_batches_of_different_shapes_are_a_problem(checks):
    problems = checks["stages of other batches"]["problems"]
    assert problems[0].startswith(f"rank 0 sends {4 * 2 * 10 * 16} bytes to rank 1 at train.py:")
    assert problems[0].endswith(f"which expects {4 * 2 * 12 * 16}")


@pytest.mark.thorough
def test_shards_of_stages_talk_within_their_stage_and_send_bfloat16(checks):
    result = checks["shards of stages"]
    assert result["problems"] == []
    assert result["ranks"]["3"]["strategy"] == "pipeline: pp 2 x dp_shard 2"
    # Rank 0 shares its stages with rank 1, and sends to rank 2; the loss is passed back in no message.
    sent = {(words[-3], int(words[1])) for words in transfers(result["ranks"]["0"], "to")}
    assert sent == {("2", 2 * 1 * 10 * 16)}
    held = [rank["parts"]["parameters"] for rank in result["ranks"].values()]
    assert sum(held) == 4 * (EMBEDDING + 6 * HIDDEN + HEAD)
    # Each writes its part of its stages to a sharded checkpoint.
    shards = "out/pytorch_model_fsdp_0/__{}_0.distcp"
    written = [rank["files"][shards.format(number)] for number, rank in result["ranks"].items()]
    assert written == held


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("stages that share sequences", "sp 2"),
        ("stages with a ring", "cp 2"),
        ("stages that share experts", "dp_shard 2 x ep 2"),
    ],
)
def test_ranks_of_a_stage_share_sequences_and_experts(checks, name, axes):
    result = checks[name]
    assert result["problems"] == []
    for number, rank in result["ranks"].items():
        assert rank["strategy"] == f"pipeline: pp 2 x {axes}"
        written = rank["files"][f"out/pytorch_model_fsdp_0/__{number}_0.distcp"]
        assert written == rank["parts"]["parameters"] - 32, "without the frequencies of positions"


@pytest.mark.thorough
def test_stages_of_a_model_of_transformers_exchange_the_gradients_of_tied_weights(checks):
    result = checks["stages of Llama"]
    assert result["problems"] == []
    for rank, peer in (("0", "1"), ("1", "0")):
        sizes = [int(words[1]) for words in transfers(result["ranks"][rank], "to")]
        assert all(words[-3] == peer for words in transfers(result["ranks"][rank], "to"))
        assert sizes.count(4 * 100 * 32) in {0, 2}, "two batches"


MATRICES, VECTORS = 2 * 64 * 256, 256 + 64
"""Elements of `OPTIMIZED` without its last layer, of which there is one row: the last rank has none of it."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "shards", "elements"),
    [
        ("fewer rows than ranks", 4, 2 * (MATRICES + VECTORS)),
        ("Muon", 4, MATRICES + 2 * VECTORS),
        ("Muon, copies of shards", 2, MATRICES + 2 * VECTORS),
    ],
)
def test_the_state_of_an_optimizer_is_sharded_like_the_parameters(checks, case, shards, elements):
    result = checks[case]
    assert result["problems"] == []
    rank = result["ranks"]["3"]
    assert rank["parts"]["parameters"] == 4 * (MATRICES + VECTORS) / shards
    assert rank["parts"]["optimizer"] == pytest.approx(4 * elements / shards, abs=64), "and numbers of steps"


@pytest.mark.thorough
def test_adamw_on_the_host_has_12_bytes_of_each_element_there(checks):
    result, elements = checks["AdamW on the host"], (MATRICES + VECTORS) / 4
    assert result["problems"] == []
    rank = result["ranks"]["3"]
    assert rank["parts"]["optimizer"] <= 64, "the numbers of steps"
    assert 12 * elements <= rank["host memory"] <= 20 * elements, "and gradients and weights on their way"


@pytest.mark.thorough
def test_the_memory_of_replicas_with_adamw_on_the_host_is_estimated_as_adams(checks):
    assert checks["AdamW on the host, replicas"]["problems"] == []


@pytest.mark.thorough
def test_parts_of_sequences_need_parts_of_the_activations(checks):
    names = ("whole sequences", "parts of sequences")
    working = [checks[name]["ranks"]["1"]["parts"]["working"] for name in names]
    assert working[1] < working[0] / 2


@pytest.mark.parametrize(
    ("case", "share"), [pytest.param("Ulysses", 0.65, marks=pytest.mark.thorough), ("chunks and tiles", 0.4)]
)
def test_shards_chunks_and_tiles_of_sequences_need_parts_of_the_activations(checks, case, share):
    results = [checks[name] for name in ("full sequences", case)]
    assert [result["problems"] for result in results] == [[], []]
    working = [result["ranks"]["1"]["parts"]["working"] for result in results]
    assert working[1] < share * working[0]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = x.unflatten(-1, (4, -1)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2).flatten(2)
        return x + y + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def counted(checks):
    """What `accel check` says of a rank."""
    return checks["tensor-parallel layers"]["ranks"]["1"]["memory"]


@distributed(world_size=2)
def test_what_is_counted_for_tensor_parallel_layers_is_within_a_tenth_of_what_is_measured(counted):
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # as on an accelerator
    loader = DataLoader(TensorDataset(torch.randn(12, 64, WIDTH)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    grown = []
    for (rows,) in loader:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            loss = model(rows).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
        in_order = sorted(events, key=lambda event: event.start_ns())
        grown.append(max(accumulate(event.nbytes() for event in in_order)))
    kept = [*model.parameters(), *tree_leaves([*optimizer.state.values()])]
    # The profiler misses what gloo's threads free, now and then. The first step makes the states, too.
    peak = sum(local_part(tensor).nbytes for tensor in kept) + min(grown[1:])
    assert abs(counted - peak) <= peak / 10, (counted, peak, grown)


def test_an_engine_is_estimated_and_writes_a_folder_of_its_own(checks):
    result = checks["ZeRO-2"]
    assert result["problems"] == []
    assert all("out/pytorch_model" in rank["files"] for rank in result["ranks"].values())
    assert result["ranks"]["3"]["strategy"] == "ZeRO-2"
    assert result["ranks"]["3"]["parts"]["parameters"] == 2 * ELEMENTS


@pytest.mark.thorough
def test_what_a_configuration_of_deepspeed_says_is_counted(checks):
    """Buckets, what is filled in by the hidden size, an optimizer that the configuration describes."""
    rank = checks["a configuration of DeepSpeed"]["ranks"]["3"]
    largest, shard = 4 * WIDTH * WIDTH, ELEMENTS / 8
    assert rank["strategy"] == "ZeRO-2, offloaded"
    assert rank["parts"]["parameters"] == 2 * ELEMENTS
    assert rank["parts"]["communication"] == 2 * (1_000_000 + largest)
    assert rank["host memory"] == 18 * shard + 2 * largest


@pytest.mark.thorough
def test_a_model_of_a_library_is_loaded_from_a_folder_and_saved(checks):
    result = checks["a model of transformers"]
    assert result["problems"] == []
    rank = result["ranks"]["0"]
    assert rank["strategy"] == "ZeRO-3"
    assert rank["files"] == {
        "final/model*.safetensors": sum(value.nbytes for value in make_llama().parameters())
    }
    assert not result["left"]


@pytest.mark.thorough
def test_a_configuration_of_deepspeed_that_contradicts_the_script_is_a_problem(checks):
    (problem,) = checks["a configuration of DeepSpeed that is contradicted"]["problems"]
    assert "train_batch_size is 7 in the configuration, but 16" in problem


@pytest.mark.thorough
def test_fp8_with_torchao_stores_what_bfloat16_stores(checks):
    (rank,), (other,) = (checks[name]["ranks"].values() for name in ("FP8 with torchao", "bfloat16"))
    assert checks["FP8 with torchao"]["problems"] == []
    assert rank["files"] == other["files"]
    for kind in ("parameters", "optimizer"):
        assert rank["parts"][kind] == other["parts"][kind]
    # Weights are all-gathered in 8 bits, and not cast again; the activations of 128 rows are small here.
    assert 0.95 * other["memory"] <= rank["memory"] <= 1.01 * other["memory"]


@pytest.mark.thorough
def test_fp8_with_ms_amp_is_a_problem_that_names_what_to_use_instead(checks):
    (problem,) = checks["FP8 with MS-AMP"]["problems"]
    assert "MS-AMP is no longer developed, and not supported: use the FP8 backend 'AO'" in problem


def test_megatron_is_checked_without_an_estimate_of_its_memory(checks):
    result = checks["Megatron"]
    assert result["problems"] == []
    assert result["ranks"]["3"]["collectives"]
    assert result["ranks"]["3"]["memory"] is None
    refused = checks["Megatron with too many stages"]["problems"]
    assert any("make groups of 16 ranks, into which 8 cannot be divided" in reason for reason in refused)


@pytest.mark.thorough
def test_a_t5_is_not_divided_into_stages(checks):
    (refused,) = checks["Megatron with a T5 in stages"]["problems"]
    assert "T5ForConditionalGeneration cannot be divided in this way: an encoder and a decoder by" in refused
    assert "by pp_degree=2 (use tp_degree" in refused
