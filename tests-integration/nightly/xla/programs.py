"""Programs for any number of ranks: `accel launch --tpu --main_training_function NAME programs.py FOLDER`.

Each raises if something is wrong. At its end every rank leaves a file in the folder: `NAME-RANK-of-RANKS`.
"""

from __future__ import annotations

import functools
import sys
from itertools import pairwise
from pathlib import Path

import torch
import torch_xla
import torch_xla.backends
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accel import Accelerator, FullyShardedDataParallelPlugin
from accel.errors import UnsupportedError
from accel.local_sgd import LocalSGD
from accel.utils import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    set_seed,
    synchronize_rng_states,
)
from accel_state.errors import DistributedOperationException
from nightly.xla.problems import Problem, Tied, counted, loss_of, plain_training, train

NEAR = {"rtol": 0, "atol": 1e-5}
PROGRAMS = {}


def program(function):
    """Enter a function into the table; it gets the folder, and leaves its file there."""

    @functools.wraps(function)
    def run() -> None:
        torch_xla.backends.set_mat_mul_precision("highest")  # a TPU multiplies in bfloat16 otherwise
        folder = Path(sys.argv[1])
        accelerator = function(folder)
        accelerator.wait_for_everyone()
        name = f"{function.__name__}-{accelerator.process_index}-of-{accelerator.num_processes}"
        (folder / name).touch()

    PROGRAMS[function.__name__] = run
    return run


@program
def ranks_and_collectives(folder: Path) -> Accelerator:
    """Every rank has a device of its own; nested tensors and objects travel."""
    accelerator = Accelerator()
    rank, ranks, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    everywhere = gather_object([(rank, ranks, accelerator.local_process_index)])
    assert [found[:2] for found in everywhere] == [(one, ranks) for one in range(ranks)]
    tree = {
        "rows": torch.full((2, 3), float(rank), device=device),
        "flag": torch.tensor([rank % 2 == 0], device=device),
        "number": torch.tensor([rank], device=device),
        "half": torch.full((1,), rank, dtype=torch.bfloat16, device=device),
    }
    found = gather(tree)
    assert found["rows"].device == device
    assert found["rows"][:, 0].tolist() == [float(one) for one in range(ranks) for _ in range(2)]
    assert found["flag"].tolist() == [one % 2 == 0 for one in range(ranks)]
    assert found["number"].tolist() == found["half"].tolist() == [*range(ranks)]
    uneven = [index for one in range(ranks) for index in range(one + 1)]
    assert gather(torch.arange(rank + 1, device=device)).tolist() == uneven
    assert pad_across_processes(torch.ones(rank + 1, device=device)).shape == (ranks,)
    total = sum(range(ranks))
    assert reduce(tree, "sum")["rows"].tolist() == [[float(total)] * 3] * 2
    assert reduce(tree["rows"], "mean").flatten().tolist() == [total / ranks] * 6
    last = ranks - 1
    sent = torch.full((3,), 2.0 if rank == last else float("inf"), device=device)
    assert broadcast(sent, from_process=last).tolist() == [2.0] * 3
    assert broadcast_object_list([f"from {rank}"], from_process=last) == [f"from {last}"]
    if ranks > 1:
        try:
            gather({f"of {rank}": torch.ones(1, device=device)})
        except DistributedOperationException:
            return accelerator
        raise AssertionError("structures that differ were gathered")
    return accelerator


@program
def main_process_first(folder: Path) -> Accelerator:
    """The main process goes first, and inputs are split."""
    accelerator = Accelerator()
    prepared = folder / "prepared"
    with accelerator.main_process_first():
        assert prepared.exists() is not accelerator.is_main_process
        prepared.touch()
    inputs = [*range(2 * accelerator.num_processes + 1)]
    with accelerator.split_between_processes(inputs) as mine:
        assert gather_object(mine) == inputs
    return accelerator


@program
def gradient_reduction(folder: Path) -> Accelerator:
    """Losses and weights are those of one process with the batches of all; so are the first weights."""
    accelerator = None
    for accumulation, max_norm in ((1, None), (2, 0.5)):
        accelerator = Accelerator(gradient_accumulation_steps=accumulation)
        ranks = accelerator.num_processes
        problem = Problem(rows=16 * ranks, batch_size=4)
        if not accelerator.is_main_process:
            for parameter in problem.model.parameters():
                parameter.data.fill_(float("inf"))
        model, optimizer, loader = accelerator.prepare(problem.model, problem.optimizer, problem.loader)
        losses = train(accelerator, model, optimizer, loader, max_norm=max_norm)
        losses = accelerator.reduce(torch.tensor(losses, device=accelerator.device), "mean")
        options = {"rows": 16 * ranks, "batch_size": 4 * ranks}
        expected, weights = plain_training(accumulation=accumulation, max_norm=max_norm, **options)
        torch.testing.assert_close(losses.cpu(), torch.tensor(expected), **NEAR)
        found = {name: tensor.cpu() for name, tensor in accelerator.get_state_dict(model).items()}
        torch.testing.assert_close(found, dict(weights), rtol=0, atol=1e-4)
        accelerator.free_memory()
    return accelerator


@program
def one_execution_per_step(folder: Path) -> Accelerator:
    """Nothing is compiled after the second step, and a step is one execution, with its collective."""
    accelerator = Accelerator()
    problem = Problem(rows=32 * accelerator.num_processes, batch_size=4)
    model, optimizer, loader = accelerator.prepare(problem.model, problem.optimizer, problem.loader)
    seen = []
    for (tokens,) in loader:
        seen.append(counted("CompileTime", "ExecuteTime"))
        accelerator.backward(loss_of(model, tokens))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    steps = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(seen[3:])]
    assert {*steps} == {(0, 1)}, seen
    return accelerator


class Stream(IterableDataset):
    """Numbers, which the main process reads for all."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


@program
def gather_for_metrics(folder: Path) -> Accelerator:
    """Batches have one shape on all ranks, and metrics count every sample once."""
    accelerator = Accelerator()
    size = 8 * accelerator.num_processes + 3
    for dataset in (torch.arange(size), Stream(size)):
        loader = accelerator.prepare(DataLoader(dataset, batch_size=4))
        found, objects = [], []
        for batch in loader:
            assert batch.shape == (4,)
            found += accelerator.gather_for_metrics(batch).tolist()
            objects += accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)
        assert sorted(found) == sorted(objects) == [*range(size)]
    if accelerator.num_processes > 1:
        try:
            with accelerator.join_uneven_inputs([nn.Linear(1, 1)]):
                raise AssertionError("ranks may have different numbers of batches")
        except UnsupportedError:
            pass
    return accelerator


@program
def local_sgd(folder: Path) -> Accelerator:
    """Ranks that average their models every two steps have the models of replicas that do so."""
    accelerator = Accelerator()
    ranks = accelerator.num_processes
    problem = Problem(rows=16 * ranks, batch_size=4)
    batches = [tokens for (tokens,) in problem.loader]
    model, optimizer, loader = accelerator.prepare(problem.model, problem.optimizer, problem.loader)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as averaging:
        train(accelerator, model, optimizer, loader, epochs=1, each=averaging.step)
    replicas = [Problem(rows=16 * ranks, batch_size=4) for _ in range(ranks)]
    for step in range(4):
        for rank, replica in enumerate(replicas):
            loss_of(replica.model, batches[step * ranks + rank]).backward()
            replica.optimizer.step()
            replica.optimizer.zero_grad()
        if step % 2:
            for same in zip(*(replica.model.parameters() for replica in replicas), strict=True):
                average = torch.stack([one.detach() for one in same]).mean(0)
                for one in same:
                    one.data.copy_(average)
    found = {name: tensor.cpu() for name, tensor in accelerator.get_state_dict(model).items()}
    torch.testing.assert_close(found, dict(replicas[0].model.state_dict()), rtol=0, atol=1e-4)
    return accelerator


@program
def save_and_load(folder: Path) -> Accelerator:
    """What is saved is resumed, and read without XLA."""
    accelerator = Accelerator(project_dir=str(folder))
    problem = Problem(rows=16 * accelerator.num_processes, batch_size=4)
    objects = accelerator.prepare(problem.model, problem.optimizer, problem.loader)
    train(accelerator, *objects, epochs=1)
    accelerator.save_state(str(folder / "state"))
    later = train(accelerator, *objects, epochs=1)
    accelerator.load_state(str(folder / "state"))
    assert train(accelerator, *objects, epochs=1) == later
    model = objects[0]
    total = accelerator.reduce(model.embed.weight.detach(), "sum")  # not executed before it is saved
    accelerator.save({"total": total, **model.state_dict()}, str(folder / "weights.bin"))
    accelerator.save_model(model, str(folder / "model"))
    accelerator.wait_for_everyone()
    read = torch.load(folder / "weights.bin", weights_only=True)
    assert {tensor.device.type for tensor in read.values()} == {"cpu"}
    expected = read["embed.weight"] * accelerator.num_processes
    torch.testing.assert_close(read.pop("total"), expected, **NEAR)
    Tied().load_state_dict(read)
    for name, tensor in load_file(folder / "model" / "model.safetensors").items():
        torch.testing.assert_close(tensor, read[name], rtol=0, atol=0)
    state = torch.load(folder / "state" / "optimizer.bin", weights_only=True)["state"][0]
    assert {tensor.device.type for tensor in state.values()} == {"cpu"}
    return accelerator


@program
def seeds(folder: Path) -> Accelerator:
    """Generators of the devices are seeded alike, apart, and synchronised."""
    accelerator = Accelerator()

    def drawn() -> torch.Tensor:
        return accelerator.gather(torch.rand(1, device=accelerator.device)).cpu()

    set_seed(7)
    assert len({*drawn().tolist()}) == 1
    set_seed(7, device_specific=True)
    assert len({*drawn().tolist()}) == accelerator.num_processes
    synchronize_rng_states(["torch", "xla"])
    assert len({*drawn().tolist()}) == 1
    return accelerator


@program
def sharded_by_the_compiler(folder: Path) -> Accelerator:
    """One process drives all devices, over which parameters and batches are sharded."""
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(xla=True, xla_fsdp_v2=True))
    problem = Problem(rows=64, batch_size=16)
    model, optimizer, loader = accelerator.prepare(problem.model, problem.optimizer, problem.loader)
    losses = train(accelerator, model, optimizer, loader)
    expected, _ = plain_training(rows=64, batch_size=16)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), **NEAR)
    devices = torch_xla.runtime.global_runtime_device_count()
    if devices > 1:
        assert f"devices=[{devices}," in torch_xla._XLAC._get_xla_sharding_spec(model.embed.weight)
    return accelerator
