"""Context parallelism with and without causality, bad input, and axes that contradict each other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import (
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelPlugin,
)
from accel_state.errors import SettingsError, UnsupportedError
from accel_train import Accelerator
from harness import distributed

WIDTH, HEADS, TOKENS, LENGTH, ROWS = 8, 2, 7, 8, 3


class Reader(nn.Module):
    """Two layers of attention over whole sequences."""

    def __init__(self, *, causal):
        super().__init__()
        self.causal = causal
        self.embed, self.place = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens, positions):
        x = self.embed(tokens) + self.place(positions)
        for layer in self.layers:
            heads = [one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in layer(x).chunk(3, dim=-1)]
            seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=self.causal)
            x = x + seen.transpose(1, 2).flatten(2)
        return self.head(x)


def make_model(*, causal):
    torch.manual_seed(0)
    return Reader(causal=causal)


def make_accelerator(size, rotation="allgather"):
    config = ParallelismConfig(cp_size=size, cp_handler=TorchContextParallelConfig(rotation))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    return Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)


def check(rotation, *, causal, length=LENGTH):
    size = dist.get_world_size()
    accelerator, right = make_accelerator(size, rotation), make_model(causal=causal)
    alone = torch.optim.SGD(right.parameters(), lr=0.5)
    model = make_model(causal=causal)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        tokens, labels = torch.randint(0, TOKENS, (2, ROWS, length), generator=generator)
        positions = torch.arange(length).repeat(ROWS, 1)
        wanted = nn.functional.cross_entropy(right(tokens, positions).flatten(0, 1), labels.flatten())
        wanted.backward()
        alone.step()
        alone.zero_grad()
        buffers = [tokens, labels, positions]
        with accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers)):
            assert tokens.shape == (ROWS, length // size)
            logits = model(tokens, positions)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(accelerator.reduce(loss, "mean"), wanted.detach(), rtol=0, atol=1e-6)
    found = accelerator._parts.strategy.states.full_state_dict(model)
    for name, value in right.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
@pytest.mark.parametrize("causal", [True, False])
@distributed(world_size=2)
def test_two_parts_train_as_the_whole(rotation, causal):
    check(rotation, causal=causal)


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
@distributed(world_size=4)
def test_four_parts_train_as_the_whole(rotation):
    check(rotation, causal=False)
    check(rotation, causal=True)
    check(rotation, causal=True, length=4)  # too short to give each a part of the beginning and the end


@distributed(world_size=2)
def test_what_cannot_be_divided_is_refused_on_every_rank():
    accelerator = make_accelerator(2)
    odd, even = torch.zeros(ROWS, 5), torch.zeros(ROWS, LENGTH)

    def refused(story, *arguments):
        with (
            pytest.raises(ValueError, match=story),
            accelerator.maybe_context_parallel(*arguments),
        ):
            pass

    refused(r"\(3, 5\) has a dim 1 that is not a multiple of cp_size=2\. Pad", [odd], [1])
    refused(r"1 buffers and 2 buffer_seq_dims", [even], [1, 1])
    refused(r"0 buffers", [], [])
    refused(r"sequences of 4 .*another of 8", [even, torch.zeros(ROWS, 4)], [1, 1])
    refused(r"requires grad", [torch.zeros(1, 2, requires_grad=True)], [1])
    refused(r"`no_restore_buffers` must be a subset", [even], [1], {torch.zeros(ROWS, LENGTH)})


@distributed(world_size=2)
def test_a_mask_over_whole_sequences_is_refused():
    accelerator = make_accelerator(2)
    heads = torch.randn(1, HEADS, LENGTH, 4)
    mask = torch.zeros(LENGTH, LENGTH)
    with (
        pytest.raises(UnsupportedError, match="attn_mask"),
        accelerator.maybe_context_parallel([heads], [2]),
    ):
        nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)


@distributed(world_size=2)
def test_axes_that_contradict_each_other_are_refused_on_every_rank():
    plugin = TorchTensorParallelPlugin(tp_size=2)

    def refused(story, **arguments):
        with pytest.raises(SettingsError, match=story):
            Accelerator(cpu=True, **arguments)

    refused(
        r"torch_tp_plugin=.*tp_size=2.*contradicts parallelism_config=.*pass only one of the two",
        torch_tp_plugin=plugin,
        parallelism_config=ParallelismConfig(dp_shard_size=2),
    )
    refused(
        "makes 3 processes, but the world size is 2",
        parallelism_config=ParallelismConfig(dp_replicate_size=3),
    )
    strange = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    refused(
        r"torch_device_mesh=.*'dp_replicate', 'dp_shard'",
        torch_tp_plugin=TorchTensorParallelPlugin(torch_device_mesh=strange),
    )
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(torch_device_mesh=mesh))
    assert accelerator.torch_device_mesh is mesh


@distributed(world_size=2)
def test_a_config_without_sizes_replicates_and_too_large_a_mesh_is_left_to_torch():
    config = ParallelismConfig()
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    accelerator.prepare(nn.Linear(2, 2))
    assert config.dp_replicate_size == accelerator.num_processes == 2
    with pytest.raises(RuntimeError, match="Mesh should not be bigger than default world size"):
        ParallelismConfig(dp_shard_size=2, tp_size=4).build_device_mesh("cpu")
