"""Models that are sharded when they are loaded: numbers of one process, data, checkpoints, contradictions."""

from __future__ import annotations

import functools
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.distributed import DistributedConfig

from accel_plugins.fp8.recipe import AORecipeKwargs
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError, UnsupportedError
from accel_train import Accelerator
from harness import distributed
from harness.resuming import check_resuming, local
from harness.small_llama import SIZES, make_llama

ROWS, LENGTH, STEPS, WINDOW = 16, 8, 2, 2
MICRO_BATCH = 4
MAX_NORM, VOCABULARY = 0.5, 16  # torch cuts no layer unevenly


def make_mixtral():
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES | {"vocab_size": VOCABULARY}, num_local_experts=4, num_experts_per_tok=2)
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # its experts are left uninitialised by the constructor
            parameter.normal_(std=0.1)
    return model


FAMILIES = {"llama": partial(make_llama, vocab_size=VOCABULARY), "mixtral": make_mixtral}


def token_rows():
    torch.manual_seed(1)
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH))


def train(accelerator, model, rows_per_rank, steps=STEPS):
    """Train steps of `WINDOW` micro-batches; return the losses and the norms of gradients, too."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    loader = DataLoader(TensorDataset(token_rows()), batch_size=rows_per_rank)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms = [], []
    for _ in range(steps * WINDOW * rows_per_rank * accelerator_shards(accelerator) // ROWS):
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


def accelerator_shards(accelerator):
    return accelerator._parts.strategy.sharding.num_shards


@functools.cache
def train_alone(family, micro_batch, steps=STEPS):
    """The same in one process, by plain PyTorch: `micro_batch` rows, of which each loss is the mean."""
    model = FAMILIES[family]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    losses, norms = [], []
    parts = token_rows().split(micro_batch)
    for step in range(steps):
        for index in range(WINDOW):
            tokens = parts[(step * WINDOW + index) % len(parts)]
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            (loss / WINDOW).backward()
            losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, losses, norms


def load(family, folder, **sizes):
    """Save the model by one rank, and load it sharded by all."""
    if dist.get_rank() == 0:
        FAMILIES[family]().save_pretrained(folder)
    dist.barrier()
    # Its check whether Accelerate is there guards nothing that this load uses.
    check = "transformers.integrations.accelerate.is_accelerate_available"
    with warnings.catch_warnings(), mock.patch(check, return_value=True):
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))


CASES = {
    2: [
        ("llama", {"fsdp_size": 2}, 2),
        ("llama", {"tp_size": 2}, 1),
        ("llama", {"dp_replicate_size": 2}, 2),
        ("mixtral", {"fsdp_size": 2}, 2),
        ("mixtral", {"tp_size": 2, "ep_size": 2}, 1),
        ("mixtral", {"fsdp_size": 2, "ep_size": 2}, 2),
    ],
    4: [
        ("llama", {"fsdp_size": 2, "tp_size": 2}, 2),
        ("llama", {"fsdp_size": 2, "dp_replicate_size": 2}, 4),
        ("mixtral", {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}, 2),
        ("mixtral", {"fsdp_size": 4, "ep_size": 2}, 4),
    ],
}


def check_equal_to_one_process(family, sizes, shards, folder, *, steps=STEPS, tolerance=1e-5):
    warnings.filterwarnings(
        "ignore", "FSDP2-wrapped module"
    )  # torch's, of an embedding that is sharded twice
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    sharded = load(family, folder / "model", **sizes)
    model, optimizer, losses, norms = train(accelerator, sharded, MICRO_BATCH // shards, steps)
    assert model is sharded
    assert accelerator_shards(accelerator) == shards
    alone, _, expected, expected_norms = train_alone(family, MICRO_BATCH, steps)
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance / 10)
    torch.testing.assert_close(norms, expected_norms, rtol=tolerance, atol=tolerance / 10)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(
                state[name],
                value,
                rtol=10 * tolerance,
                atol=tolerance / 10,
                msg=lambda text, name=name: f"{name}: {text}",
            )
    check_resuming(accelerator, model, optimizer, folder / "state")
    return state


@pytest.mark.parametrize("case", range(len(CASES[2])))
@distributed(world_size=2)
def test_two_ranks_train_as_one_process(case, tmp_path):
    check_equal_to_one_process(*CASES[2][case], tmp_path)


@pytest.mark.parametrize(
    "case", [pytest.param(0, marks=pytest.mark.thorough), 1, 2, pytest.param(3, marks=pytest.mark.thorough)]
)
@distributed(world_size=4)
def test_four_ranks_train_as_one_process(case, tmp_path):
    check_equal_to_one_process(*CASES[4][case], tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("case", [0, 1, 3, 5])  # FSDP and TP of a Llama; a Mixtral without and with ep
@distributed(world_size=2)
def test_twenty_steps_are_those_of_one_process(case, tmp_path):
    check_equal_to_one_process(*CASES[2][case], tmp_path, steps=20, tolerance=1e-4)


@distributed(world_size=2)
def test_a_checkpoint_loads_under_other_sizes(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(load("mixtral", tmp_path / "model", fsdp_size=2, ep_size=2))
    before = accelerator.get_state_dict(model)
    accelerator.save_state(tmp_path / "state", flush=False)
    for sizes in ({"fsdp_size": 2}, {"tp_size": 2}, {"dp_replicate_size": 2}):
        AcceleratorState._reset_state()
        other = Accelerator(cpu=True)
        loaded = load("mixtral", tmp_path / "model", **sizes)
        loaded = other.prepare(loaded)
        with torch.no_grad():
            for parameter in loaded.parameters():
                local(parameter).zero_()
        other.load_state(tmp_path / "state")
        after = other.get_state_dict(loaded)
        assert {name for name in before if not torch.equal(after[name], before[name])} == set(), sizes


def make_by_hand(mesh):
    """A model that the script shards: layers along the second axis, everything along the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


@distributed(world_size=4)
def test_a_model_that_the_script_shards_is_taken_as_it_is():
    accelerator = Accelerator(cpu=True)
    model = make_by_hand(init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp")))
    model.append(nn.Linear(2, 1).double())  # beside what is sharded, with other values on each rank
    nn.init.constant_(model[3].weight, accelerator.process_index)
    nn.init.zeros_(model[3].bias)
    rows = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
    check_mesh(accelerator, {"dp_shard": 2, "tp": 2})
    assert accelerator.data_parallel_shard_rank == dist.get_rank() // 2
    assert accelerator.tensor_parallel_rank == dist.get_rank() % 2
    seen = []
    for batch in loader:
        seen.append(accelerator.gather_for_metrics(batch))
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(torch.cat(seen), rows)
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    alone.append(nn.Linear(2, 1).double())
    nn.init.zeros_(alone[3].weight)
    nn.init.zeros_(alone[3].bias)
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in rows.split(4):
        alone(batch).pow(2).mean().backward()
        sgd.step()
        sgd.zero_grad()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        for value, expected in zip(state.values(), alone.state_dict().values(), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


def check_mesh(accelerator, sizes):
    mesh = accelerator.torch_device_mesh
    assert dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)) == sizes
    assert accelerator.state.device_mesh is mesh


@pytest.mark.parametrize("axis", ["tp", "dp_shard"])
@distributed(world_size=2)
def test_streams_are_sent_to_ranks_as_the_axes_of_the_model_say(axis, tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(8))

    accelerator = Accelerator(cpu=True)
    model = load("llama", tmp_path / "model", **{"fsdp_size" if axis == "dp_shard" else "tp_size": 2})
    _, loader = accelerator.prepare(model, DataLoader(Stream(), batch_size=2))
    check_mesh(accelerator, {axis: 2})
    found = [batch.tolist() for batch in loader]
    rank = dist.get_rank()
    batches = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert found == (batches if axis == "tp" else batches[rank::2])
    everything = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
    assert everything.tolist() == [*range(8)]


@distributed(world_size=2)
def test_contradictions_name_both(tmp_path):
    sharded = load("llama", tmp_path / "model", tp_size=2)
    for options, error, text in (
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}, SettingsError, "shard it again"),
        (
            {"parallelism_config": ParallelismConfig(dp_shard_size=2)},
            SettingsError,
            r"1 ranks read different batches and 2 the same.*ParallelismConfig\(.*dp_shard_size=2",
        ),
        (
            {"parallelism_config": ParallelismConfig(tp_size=2, ep_size=2)},
            SettingsError,
            r"its experts over 1 ranks, and ParallelismConfig\(.*ep_size=2",
        ),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)}, UnsupportedError, "'fsdp1' shards"),
        (
            {"mixed_precision": "fp8", "kwargs_handlers": [AORecipeKwargs()]},
            UnsupportedError,
            "already sharded, but mixed_precision='fp8' replaces layers, which must come first. Use 'bf16'.$",
        ),
    ):
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True, **options)
        with pytest.raises(error, match=text):
            accelerator.prepare(sharded)
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))  # says the same
    assert accelerator.prepare(sharded) is sharded
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(DataLoader(range(4)))
    with pytest.raises(SettingsError, match="before anything else"):
        accelerator.prepare(sharded)


@distributed(world_size=2)
def test_stages_that_pass_no_gradients_are_refused(tmp_path):
    stage = load("llama", tmp_path / "model", pp_size=2)
    with pytest.raises(UnsupportedError, match=r"loaded with pp_size=2.* ParallelismConfig\(pp_size=2\)\.$"):
        Accelerator(cpu=True).prepare(stage)


@distributed(world_size=4)
def test_copies_that_nothing_would_average_are_refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tp"], {"0": ColwiseParallel()})
    with pytest.raises(SettingsError, match=r"over 2 of 4 ranks.*dp_replicate_size"):
        Accelerator(cpu=True).prepare(model)
