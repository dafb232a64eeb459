"""Estimates of memory beside what is measured, on models of transformers and on two processes."""

from __future__ import annotations

import gc
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralForCausalLM,
)

from accel import Accelerator
from accel.utils import DeepSpeedPlugin, ParallelismConfig
from accel_cli.main import main
from accel_inspect.estimate.command import passes_of_batch
from accel_inspect.estimate.memory import Buckets, TrainingSetup, estimate, estimate_axes
from accel_inspect.estimate.meta_model import meta_model, shares_of, sizes_of, weights_in
from accel_inspect.estimate.trace import MemoryTracker, moments_of
from accel_ops.tree import local_part
from accel_plugins import TilingKwargs
from accel_plugins.optimizers.host_adamw import HostAdamW
from accel_plugins.optimizers.muon import Muon
from harness import cases, distributed
from harness.engines import deepspeed_process

LLAMA = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 256,
}  # fmt: skip
BERT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 300, "max_position_embeddings": 128,
}  # fmt: skip
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, LLAMA),
    "bert": (BertConfig, BertForSequenceClassification, BERT),
}


def peak_of(train):
    """The most bytes that the allocator has given out at a time."""
    gc.collect()  # or what is freed later would be taken from what is measured
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = train()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del kept
    return peak


def steps(model, optimizer, passes, count=3):
    for _ in range(count):
        held = passes(model)
        held[0].backward()
        del held
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(params=sorted(KINDS))
def described(request, tmp_path):
    """A configuration file, and the model that it describes."""
    config_type, model_type, options = KINDS[request.param]
    config = config_type(**options)
    config.architectures = [model_type.__name__]
    config.save_pretrained(tmp_path)
    return tmp_path / "config.json", lambda: model_type(config)


def test_a_configuration_alone_tells_the_bytes_of_the_model(described):
    path, make = described
    meta, model = meta_model(str(path)), make()
    weights = sum(parameter.numel() for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert weights_in(meta, "float32").total == 4 * weights + buffers
    assert sizes_of(meta).parameters == weights
    assert len(sizes_of(meta).blocks) >= model.config.num_hidden_layers


def test_the_estimate_of_a_model_of_transformers_is_within_a_tenth_of_what_is_measured(described):
    path, make = described
    meta = meta_model(str(path))
    passes = passes_of_batch(4, 64)
    job = TrainingSetup(sizes=sizes_of(meta), moments=moments_of(meta.train(), passes))

    def train():
        model = make().train()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # as on an accelerator
        steps(model, optimizer, passes)
        return model, optimizer

    assert estimate("one device", job).device == pytest.approx(peak_of(train), rel=0.1)


@pytest.mark.parametrize("flags", [["--loss_chunk_size"], ["--loss_chunk_size", "--mlp_tile_size"]])
def test_losses_in_chunks_and_mlps_in_tiles_are_counted(tmp_path, capsys, flags):
    config = LlamaConfig(
        hidden_size=64, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4, vocab_size=4000
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    path = str(tmp_path / "config.json")
    line = ["estimate-memory", path, "--batch_size", "2", "--sequence_length", "512", "--json"]
    line += ["--mixed_precision", "no"]
    assert main([*line, *(word for flag in flags for word in (flag, "64"))]) == 0
    estimated = json.loads(capsys.readouterr().out)["training"]["one device"]

    def train():
        tiling = TilingKwargs(**{flag.removeprefix("--"): 64 for flag in flags})
        accelerator = Accelerator(cpu=True, kwargs_handlers=[tiling])
        model = accelerator.prepare(LlamaForCausalLM(config)).train()
        optimizer = torch.optim.AdamW(model.parameters())
        steps(model, optimizer, passes_of_batch(2, 512))
        return model, optimizer

    assert estimated["device"] == pytest.approx(peak_of(train), rel=0.1)


AXES = {
    "tp": (LlamaForCausalLM, {"tp_size": 2}),
    "dp_shard": (LlamaForCausalLM, {"dp_shard_size": 2}),
    "sp": (LlamaForCausalLM, {"sp_size": 2}),
    "pp": (LlamaForCausalLM, {"pp_size": 2}),
    "ep": (MixtralForCausalLM, {"dp_shard_size": 2, "ep_size": 2}),
}


IN_STAGES = {
    "pp, sp": (LlamaForCausalLM, {"pp_size": 2, "sp_size": 2}),
    "pp, ep": (MixtralForCausalLM, {"pp_size": 2, "dp_shard_size": 2, "ep_size": 2}),
}


@distributed(world_size=2)
@pytest.mark.parametrize("axis", AXES)
def test_a_device_has_the_parameters_that_the_row_of_its_axes_says(axis):
    check_parameters(*AXES[axis])


@distributed(world_size=4)
@pytest.mark.parametrize("axes", IN_STAGES)
def test_a_device_of_a_stage_has_the_parameters_that_the_row_of_its_axes_says(axes):
    check_parameters(*IN_STAGES[axes])


def check_parameters(kind, sizes):
    options = {"num_local_experts": 4} if "ep_size" in sizes else {}
    model = kind(kind.config_class(**LLAMA, **options))
    config = ParallelismConfig(**sizes)
    share = max(shares_of(model, config), key=lambda share: share.sizes.parameters)
    devices = dist.get_world_size()
    estimated = estimate_axes(TrainingSetup(sizes=sizes_of(model), devices=devices), share)
    model = Accelerator(cpu=True, parallelism_config=config).prepare(model)
    elements = torch.tensor(sum(local_part(parameter).numel() for parameter in model.parameters()))
    dist.all_reduce(elements, dist.ReduceOp.MAX)
    assert estimated.parts["parameters"] - share.sizes.buffers == 4 * elements.item()


OWN_OPTIMIZERS = {"adam": torch.optim.AdamW, "muon": Muon, "host_adamw": HostAdamW}


def state_after_a_step(name, model, accelerator):
    """Bytes of the state of an optimizer on this rank, but for the counts of steps."""
    made = OWN_OPTIMIZERS[name](model if name == "muon" else model.parameters())
    model, optimizer = accelerator.prepare(model, made)
    tokens = torch.ones(2, 8, dtype=torch.int64)
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(local_part(value).nbytes for value in states if value.dim())


def check_state(estimated, name, measured, gradients):
    """Without the host's copies of gradients, which no CPU needs."""
    assert estimated.parts["optimizer"] == pytest.approx(0 if name == "host_adamw" else measured, rel=1e-3)
    on_host = measured + gradients if name == "host_adamw" else 0
    assert estimated.host == pytest.approx(on_host, rel=1e-3)


@pytest.mark.parametrize("name", OWN_OPTIMIZERS)
def test_the_state_of_an_optimizer_is_what_the_row_of_one_device_says(name):
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    setup = TrainingSetup(sizes=sizes_of(model), optimizer=name)
    measured = state_after_a_step(name, model, Accelerator(cpu=True))
    check_state(estimate("one device", setup), name, measured, 4 * setup.sizes.trainable)


@distributed(world_size=2)
@pytest.mark.parametrize("name", OWN_OPTIMIZERS)
def test_the_state_of_an_optimizer_is_what_the_row_of_sharded_experts_says(name):
    kind, sizes = AXES["ep"]
    model = kind(kind.config_class(**LLAMA, num_local_experts=4))
    config = ParallelismConfig(**sizes)
    (share,) = shares_of(model, config)
    setup = TrainingSetup(sizes=sizes_of(model), devices=2, optimizer=name)
    own = state_after_a_step(name, model, Accelerator(cpu=True, parallelism_config=config))
    total = torch.tensor(own)
    dist.all_reduce(total)
    check_state(estimate_axes(setup, share), name, total.item() / 2, 2 * setup.sizes.trainable)


def test_the_command_leaves_out_what_has_an_optimizer_of_its_own(described, capsys):
    path, _ = described
    line = ["estimate-memory", str(path), "--optimizer", "muon", "--num_devices", "2"]
    assert main(line) == 0
    shown = capsys.readouterr().out
    assert "training with Muon on 2 device(s)" in shown
    assert "FSDP2" in shown
    assert "ZeRO" not in shown


def test_sizes_that_do_not_make_the_devices_are_refused(described, capsys):
    path, _ = described
    line = ["estimate-memory", str(path), "--num_devices", "4", "--parallelism_config_tp_size", "3"]
    assert main(line) != 0
    assert "tp_size=3 makes 3 processes, but the world size is 4" in capsys.readouterr().err


def test_computing_activations_again_is_counted(described, capsys):
    path, _ = described
    numbers = []
    for words in ([], ["--gradient_checkpointing"]):
        line = [
            "estimate-memory",
            str(path),
            "--batch_size",
            "8",
            "--sequence_length",
            "128",
            "--json",
            *words,
        ]
        assert main(line) == 0
        numbers.append(json.loads(capsys.readouterr().out)["training"]["one device"]["parts"]["working"])
    assert 0 < numbers[1] < numbers[0]


def test_fp8_takes_the_memory_of_bf16(described, capsys):
    path, _ = described
    outputs = {}
    for precision in ("bf16", "fp8"):
        line = ["estimate-memory", str(path), "--mixed_precision", precision]
        for words in (["--batch_size", "8", "--sequence_length", "64"], ["--json"]):
            assert main([*line, *words]) == 0
            outputs[precision, words[0]] = capsys.readouterr().out
    assert outputs["fp8", "--json"] == outputs["bf16", "--json"]
    shown, plain = outputs["fp8", "--batch_size"], outputs["bf16", "--batch_size"]
    note = "FP8 multiplies matrices in 8 bits and stores the same tensors as bf16.\n"
    assert shown == plain.replace("precision bf16", "precision fp8") + note


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(256, 1024)
        self.back = nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.back(nn.functional.gelu(self.wide(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(64, 256)
        self.blocks = nn.ModuleList([Block() for _ in range(8)])
        self.head = nn.Linear(256, 64)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def passes_on(rows, dtype=None):
    def run(model):
        output = model(torch.ones(rows, 64, dtype=dtype))
        return output.square().mean(), output

    return run


def estimate_of(strategy, rows, devices, dtype=torch.float32, buckets=None):
    with torch.device("meta"):
        plain, computing = Net(), Net().to(dtype)
    job = TrainingSetup(
        sizes=sizes_of(plain),
        devices=devices,
        moments=moments_of(computing, passes_on(rows, dtype)),
        width=dtype.itemsize,
        buckets=buckets or Buckets(),
    )
    return estimate(strategy, job)


def estimated(strategy, rows, devices):
    return estimate_of(strategy, rows, devices).device


@pytest.mark.parametrize("strategy", ["DDP", "DDP, gradients in buckets"])
@distributed(world_size=2)
def test_the_estimate_of_data_parallel_training_is_within_a_tenth_of_what_is_measured(strategy):
    def train():
        # Without the first broadcast, whose buffers gloo frees where the profiler does not look.
        views = strategy != "DDP"
        model = DistributedDataParallel(Net(), init_sync=False, gradient_as_bucket_view=views)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        steps(model, optimizer, passes_on(64))
        return model, optimizer

    peak, estimated_peak = peak_of(train), estimated(strategy, 64, 2)
    assert abs(peak - estimated_peak) <= peak / 10, (peak, estimated_peak)


@pytest.fixture
def alone_among_8():
    """A process group that sends nothing: gloo would add buffers of its own."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


@pytest.mark.parametrize("keep", [pytest.param(False, marks=pytest.mark.thorough), True])
@pytest.mark.parametrize("rows", [8, 256])
def test_the_estimate_of_sharded_training_is_within_a_tenth_of_what_is_measured(alone_among_8, rows, keep):
    def train():
        with torch.device("meta"):
            model = Net()
        for block in model.blocks:
            fully_shard(block, mesh=alone_among_8, reshard_after_forward=not keep)
        fully_shard(model, mesh=alone_among_8)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        steps(model, optimizer, passes_on(rows))
        return model, optimizer

    strategy = "FSDP2, gathered once" if keep else "FSDP2"
    assert estimated(strategy, rows, 8) == pytest.approx(peak_of(train), rel=0.1)


@pytest.mark.parametrize("rows", [8, 256])
def test_the_estimate_of_offloaded_shards_is_within_a_tenth_of_what_is_measured(alone_among_8, rows):
    """The device and the host are one memory here; what the optimizer keeps and changes is the host's."""
    away = CPUOffloadPolicy(pin_memory=False)
    with MemoryTracker(None) as tracker:
        with torch.device("meta"):
            model = Net()
        for block in model.blocks:
            fully_shard(block, mesh=alone_among_8, offload_policy=away)
        fully_shard(model, mesh=alone_among_8, offload_policy=away)
        model.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tracker.add(model)
        for _ in range(3):
            held = passes_on(rows)(model)
            held[0].backward()
            del held
            with tracker.stepping(optimizer):
                optimizer.step()
            states = [value for state in optimizer.state.values() for value in state.values()]
            kept = [*model.parameters(), *(parameter.grad for parameter in model.parameters()), *states]
            host = sum(local_part(tensor).nbytes for tensor in kept)
            del states, kept
            optimizer.zero_grad()
    needed, parts = estimate_of("FSDP2, offloaded", rows, 8), tracker.parts
    assert needed.device == pytest.approx(parts["working"], rel=0.1)
    assert needed.host == pytest.approx(host, rel=0.01)
    assert needed.device + needed.host == pytest.approx(sum(parts.values()), rel=0.1)


OFFLOADED = {
    "ZeRO-1, offloaded": (1, {"offload_optimizer": {"device": "cpu"}}),
    "ZeRO-2, offloaded": (2, {"offload_optimizer": {"device": "cpu"}}),
    "ZeRO-3, optimizer offloaded": (3, {"offload_optimizer": {"device": "cpu"}}),
    "ZeRO-3, offloaded": (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    **{f"ZeRO-{stage}": (stage, {}) for stage in (1, 2, 3)},
}


@pytest.mark.parametrize(
    ("rows", "precision"), [(512, "no"), pytest.param(8, "bf16", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize(
    "strategy", cases(sorted(OFFLOADED), always={"ZeRO-1", "ZeRO-2, offloaded", "ZeRO-3, offloaded"})
)
@distributed(world_size=2)
def test_the_estimate_of_an_engine_is_within_a_tenth_of_what_is_measured(strategy, rows, precision):
    """By the tensors that are alive, since memory that gloo gives back is not seen by the profiler.

    What is offloaded is in the same memory here; DeepSpeed's own Adam would take minutes to build.
    """
    bucket = 1_000_000
    stage, away = OFFLOADED[strategy]
    zero = {"stage": stage, "reduce_bucket_size": bucket, "stage3_param_persistence_threshold": 0, **away}
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": rows}
    plugin = DeepSpeedPlugin(hf_ds_config={**config, "zero_force_ds_cpu_optimizer": False})
    with deepspeed_process():
        accelerator = Accelerator(cpu=True, mixed_precision=precision, deepspeed_plugin=plugin)
        with MemoryTracker(None) as tracker:
            model = Net()
            # Like DeepSpeed's own, the fused optimizer needs no temporaries.
            optimizer = torch.optim.AdamW(model.parameters(), fused=bool(away), foreach=not away)
            model, optimizer = accelerator.prepare(model, optimizer)
            for _ in range(3):
                loss, held = passes_on(rows)(model)
                accelerator.backward(loss)
                del loss, held
                optimizer.step()
                optimizer.zero_grad()
        accelerator.free_memory(model, optimizer)
    dtype = torch.float32 if precision == "no" else torch.bfloat16
    needed = estimate_of(strategy, rows, 2, dtype, Buckets(reduce=bucket))
    peak, estimated_peak = sum(tracker.parts.values()), needed.device + needed.host
    assert abs(peak - estimated_peak) <= peak / 10, (peak, estimated_peak)
