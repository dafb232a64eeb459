"""Full parameters out of a training run: every strategy, bit for bit, bucket by bucket."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from accel_bigmodel import cpu_offload
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.megatron.plugin import MegatronLMPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_plugins.sharding.shards import write_shard
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.torch_private import StridedShard
from accel_train import Accelerator
from distributed.axes.test_experts import OwnModel
from distributed.fsdp.test_sharded import make_model
from distributed.megatron.test_megatron import make_gpt2
from distributed.pipeline.test_pipeline import make as make_full
from distributed.pipeline.test_pipeline import prepared as make_pipeline
from harness import cases, distributed
from harness.cuda_names import cuda_answered_by_cpu
from harness.engines import deepspeed_process

FSDP1 = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}


def fsdp(version, **options):
    wrapping = {**FSDP1, **options}
    return FullyShardedDataParallelPlugin(fsdp_version=version, **wrapping)


def make_uneven():
    """A model of sizes that no number of ranks divides, with a buffer, a scalar value, NaNs and -0.0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 7, bias=False), nn.Linear(7, 1))
    with torch.no_grad():
        model[0].weight[0, 0], model[0].weight[4, 2], model[2].weight[6, 4] = -0.0, float("nan"), -0.0
    return model


def bits(tensor):
    """The bytes of a tensor: NaNs are equal, and -0.0 is not 0.0."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def expect(found, state, names):
    """Compare full parameters with those of a state dict, bit for bit."""
    assert sorted(found) == sorted(names)
    for name, tensor in found.items():
        assert tensor.shape == state[name].shape
        assert tensor.dtype == state[name].dtype
        assert torch.equal(bits(tensor), bits(state[name])), name


def check(accelerator, model, names, bucket_bytes=300):
    """Compare with `get_state_dict` on the main process: all ranks, one rank, and in another dtype."""
    is_main = accelerator.is_main_process
    state = accelerator.get_state_dict(model)
    orders, found = [], {}
    for name, tensor in accelerator.named_full_parameters(bucket_bytes=bucket_bytes):
        found[name] = tensor.clone()
        orders.append(name)
    shared = [None] * accelerator.num_processes
    dist.all_gather_object(shared, (orders, {name: bits(value).tolist() for name, value in found.items()}))
    assert all(other == shared[0] for other in shared)
    if is_main:
        expect(found, state, names)
    main = dict(accelerator.named_full_parameters(model, to_main_only=True))
    if is_main:
        expect(main, state, names)
    else:
        assert not main
    halves = dict(accelerator.named_full_parameters(dtype=torch.bfloat16))
    if is_main:
        converted = {
            name: value.to(torch.bfloat16) if value.is_floating_point() else value
            for name, value in state.items()
        }
        expect(halves, converted, names)


def names_of(model):
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


LAYOUTS = {
    "ddp": {},
    "fsdp1": {"fsdp_plugin": fsdp(1)},
    "fsdp1, flat": {"fsdp_plugin": fsdp(1, use_orig_params=False)},
    "fsdp1, no shard": {"fsdp_plugin": fsdp(1, sharding_strategy="NO_SHARD")},
    "fsdp2": {"fsdp_plugin": fsdp(2)},
    "fsdp2, kept gathered": {"fsdp_plugin": fsdp(2, reshard_after_forward=False)},
    "fsdp2, offloaded": {"fsdp_plugin": fsdp(2, cpu_offload=True)},
    "tensor": {"parallelism_config": {"tp_size": 2}},
}
LAYOUTS_OF_FOUR = {
    "hsdp": {
        "parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2},
        "fsdp_plugin": fsdp(2),
    },
    "fsdp2 of tensor": {
        "parallelism_config": {"dp_shard_size": 2, "tp_size": 2},
        "fsdp_plugin": fsdp(2),
    },
    "replicas of tensor": {"parallelism_config": {"dp_replicate_size": 2, "tp_size": 2}},
}


def prepare(layout, make, step=True):
    options = dict(layout)
    if "parallelism_config" in options:
        options["parallelism_config"] = ParallelismConfig(**options["parallelism_config"])
    accelerator = Accelerator(cpu=True, **options)
    model = make()
    names = names_of(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    if step:
        accelerator.backward(model(torch.arange(6).view(2, 3)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        model(torch.arange(6).view(2, 3))  # may leave parameters gathered
    return accelerator, model, names


@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(world_size=2)
def test_full_parameters_are_those_of_the_state_dict(layout):
    check(*prepare(LAYOUTS[layout], make_model))


@pytest.mark.parametrize("layout", cases(LAYOUTS_OF_FOUR, always={"replicas of tensor"}))
@distributed(world_size=4)
def test_full_parameters_of_meshes_with_two_axes_are_those_of_the_state_dict(layout):
    check(*prepare(LAYOUTS_OF_FOUR[layout], make_model))


@pytest.mark.parametrize("version", [1, 2])
@distributed(world_size=2)
def test_bits_survive_uneven_shards(version):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    check(*prepare({"fsdp_plugin": plugin}, make_uneven, step=False), bucket_bytes=50)


@distributed(world_size=4)
def test_experts_that_are_sharded_come_in_full():
    layout = {
        "parallelism_config": {"dp_shard_size": 4, "ep_size": 2},
        "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2),
    }
    check(*prepare(layout, OwnModel, step=False))


@distributed(world_size=4)
def test_shards_of_any_placement_are_written_where_they_belong():
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(16 * 6.0).view(16, 6)
    for placements in (
        [Shard(0), Shard(0)],
        [Shard(1), Shard(0)],
        [Replicate(), Shard(1)],
        [StridedShard(0, split_factor=2), Shard(0)],
        [Replicate(), StridedShard(0, split_factor=2)],  # two packed weights
        [Shard(1), StridedShard(0, split_factor=4)],
    ):
        shard = distribute_tensor(full, mesh, placements)
        written = torch.zeros(16, 6, dtype=torch.float64)
        write_shard(shard, written)
        count = torch.tensor(float((written != 0).sum() + (dist.get_rank() == 0)))
        dist.all_reduce(written)
        replicas = (
            4
            // torch.tensor(
                [mesh.size(axis) for axis, row in enumerate(placements) if not row.is_replicate()]
            )
            .prod()
            .item()
        )
        torch.testing.assert_close(written, full.double() * replicas)
        assert count <= shard.to_local().numel() + 1


@pytest.mark.parametrize("kind", ["plain", "tied"])
@distributed(world_size=2)
def test_stages_of_a_pipeline_come_together(kind):
    accelerator, model, _, _ = make_pipeline(kind, {"pp_size": 2}, is_padded=False)
    check(accelerator, model, names_of(make_full(kind)))


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_zero_shards_come_in_full(stage):
    with deepspeed_process():
        plugin = DeepSpeedPlugin(zero_stage=stage)
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, mixed_precision="bf16")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7))
        names = names_of(model)
        data = torch.utils.data.DataLoader(torch.randn(8, 3), batch_size=2)
        model, optimizer, data = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.1), data
        )
        for batch in data:
            accelerator.backward(model(batch).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        check(accelerator, model, names, bucket_bytes=40)
        accelerator.free_memory()


@distributed(world_size=2)
def test_megatron_gives_the_names_of_transformers():
    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(tp_degree=2)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        model = make_gpt2()
        names = names_of(model)
        data = torch.utils.data.DataLoader([{"input_ids": torch.arange(8)}] * 4, batch_size=4)
        model, _, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
        check(accelerator, model, names)
        accelerator.free_memory()


@distributed(world_size=2)
def test_a_bucket_takes_one_collective():
    accelerator, model, names = prepare(LAYOUTS["fsdp2"], make_model)
    sizes = {name: value.numel() * 4 for name, value in accelerator.get_state_dict(model).items()}
    sizes = [None if accelerator.process_index else sizes]
    dist.broadcast_object_list(sizes)
    limit = max(sizes[0].values()) // 2  # some parameters are larger than a bucket
    reduced = []
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as collective:
        found = dict(accelerator.named_full_parameters(bucket_bytes=limit))
        reduced = [call.args[0].numel() * 4 for call in collective.call_args_list]
    assert sorted(found) == sorted(names)
    assert sum(reduced) < sum(sizes[0].values()) + 16 * len(names)  # a tied weight comes once
    assert all(
        size <= limit or size in {-(-full // 16) * 16 for full in sizes[0].values()} for size in reduced
    )
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as collective:
        assert sorted(dict(accelerator.named_full_parameters())) == sorted(names)
    assert collective.call_count == 1


def test_bad_arguments_are_named_before_anything_is_gathered():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(SettingsError, match="since 0 models are prepared"):
        accelerator.named_full_parameters()
    model = accelerator.prepare(nn.Linear(2, 1))
    with pytest.raises(SettingsError, match="bucket_bytes=0"):
        accelerator.named_full_parameters(bucket_bytes=0)
    with pytest.raises(SettingsError, match=r"dtype=torch\.int8"):
        accelerator.named_full_parameters(dtype=torch.int8)
    with pytest.raises(TypeError, match="takes a model"):
        accelerator.named_full_parameters("model")
    with pytest.raises(UnsupportedError, match="no LoRA adapters"):
        accelerator.named_full_parameters(merge_adapters=True)
    parameters = dict(accelerator.named_full_parameters())
    assert parameters["weight"].data_ptr() == model.weight.data_ptr()
    assert not parameters["weight"].requires_grad


def test_offloaded_weights_come_with_their_values():
    model = make_uneven()
    expected = {name: value.clone().bfloat16() for name, value in model.named_parameters()}
    cpu_offload(model, torch.device("cpu"))
    found = dict(Accelerator(cpu=True).named_full_parameters(model, dtype=torch.bfloat16))
    expect(found, expected, names_of(model))
