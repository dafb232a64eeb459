"""Folders that several ranks write and any number of ranks reads; ranks run one by one in this process."""

from __future__ import annotations

import io
import pickle
import pickletools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_plugins.sharding.folder import (
    ShardWriter,
    entries,
    read_all,
    read_index,
    read_into,
    write_index,
)
from accel_plugins.sharding.shards import ShardedStates
from accel_plugins.sharding.state import (
    INDEX_NAME,
    is_sharded_folder,
    local_metadata_file,
    parameter_names,
    shard_file,
    state_by_index,
    state_by_name,
    strip_wrapper_prefixes,
)
from accel_plugins.sharding.wrap import hook_of, load_from_rank0
from accel_state.errors import CheckpointError, CheckpointMismatchError
from accel_state.runtime import current
from accel_state.testing.thread_ranks import ThreadRanks

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def as_rank(rank: int, world_size: int) -> Generator[DeviceMesh]:
    """A block in which this process is one rank of many, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)  # pyright: ignore[reportArgumentType]
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def sharded(whole: torch.Tensor, mesh: DeviceMesh, dim: int | None) -> DTensor:
    """This rank's part of a tensor; its copy for `None`."""
    if dim is None:
        return DTensor.from_local(whole.clone(), mesh, [Replicate()], run_check=False)
    parts = whole.chunk(mesh.size(), dim)  # fewer than ranks, if the dim is short
    rank = mesh.get_local_rank()
    shard = parts[rank].clone() if rank < len(parts) else whole.narrow(dim, 0, 0).clone()
    return DTensor.from_local(
        shard, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def save(folder: Path, world_size: int, make: Callable[[DeviceMesh], Mapping[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    for rank in range(world_size):
        with as_rank(rank, world_size) as mesh:
            writer = ShardWriter(make(mesh), rank)
            with (folder / shard_file(rank)).open("wb") as file:
                writer.write_shards(writer.local_values(), file)
            with (folder / local_metadata_file(rank)).open("wb") as file:
                writer.write_local_metadata([], file)
    write_index(folder, range(world_size))


SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@settings(deadline=None, max_examples=25)
@given(
    shape=SHAPES,
    saved_by=st.integers(1, 4),
    read_by=st.integers(1, 4),
    dims=st.tuples(st.none() | st.integers(0, 2), st.none() | st.integers(0, 2)),
)
def test_what_any_number_of_ranks_saved_any_number_reads(
    tmp_path_factory: pytest.TempPathFactory, shape: Any, saved_by: int, read_by: int, dims: Any
):
    before, after = (None if dim is None else dim % len(shape) for dim in dims)
    folder = tmp_path_factory.mktemp("saved")
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    save(folder, saved_by, lambda mesh: {"a": {"b": sharded(whole, mesh, before)}, "plain": whole + 1})
    assert {path.name for path in folder.iterdir()} == {INDEX_NAME, *map(shard_file, range(saved_by))}
    for rank in range(read_by):
        with as_rank(rank, read_by) as mesh:
            target = sharded(torch.zeros(shape), mesh, after)
            state: Any = {"a": {"b": target}, "plain": torch.zeros(shape)}
            read_into(folder, state)
            assert state["a"]["b"] is target
            assert torch.equal(target.to_local(), sharded(whole, mesh, after).to_local())
            assert torch.equal(state["plain"], whole + 1)


def test_an_index_is_small_and_what_dcp_reads(tmp_path: Path):
    names = [f"layer.{number}.weight" for number in range(20)]
    whole = {name: torch.full((64, 3), number) for number, name in enumerate(names)}
    whole = {name: value + torch.arange(192.0).reshape(64, 3) / 192 for name, value in whole.items()}
    short, scalar = torch.arange(5.0), torch.tensor(7.0)

    def make(mesh: DeviceMesh) -> dict[str, Any]:
        parts = {name: sharded(value, mesh, 0) for name, value in whole.items()}
        return {**parts, "short": sharded(short, mesh, 0), "scalar": scalar, "step": 3}

    save(tmp_path, 64, make)
    text = (tmp_path / INDEX_NAME).read_bytes()
    assert len(text) / (len(names) * 64) < 40  # its place, as two integers; tensors share their chunks
    strings = {argument for _, argument, _ in pickletools.genops(text) if isinstance(argument, str)}
    assert "torch.distributed.checkpoint.metadata" in strings
    assert not [name for name in strings if name.startswith("accel")]  # a module that only this library has
    index = FileSystemReader(tmp_path).read_metadata()
    listed = index.state_dict_metadata["short"]
    assert isinstance(listed, TensorStorageMetadata)
    chunks = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in listed.chunks}
    assert chunks == {((row,), (1,)) for row in range(5)}
    hints = [MetadataIndex("short", [row]) for row in range(5)]
    assert [index.storage_data[hint].relative_path for hint in hints] == [*map(shard_file, range(5))]
    read = {name: torch.zeros(64, 3) for name in names}
    read |= {"short": torch.zeros(5), "scalar": torch.zeros(())}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(read[name], value) for name, value in whole.items())
    assert (read["short"].tolist(), read["scalar"].item()) == ([0, 1, 2, 3, 4], 7)
    with as_rank(1, 3) as mesh:
        wanted = make(mesh)
        state: dict[str, Any] = {
            name: torch.zeros_like(value) for name, value in wanted.items() if name != "step"
        } | {"step": 0}
        read_into(tmp_path, state)
        for name in names:
            assert torch.equal(state[name].to_local(), wanted[name].to_local())


@pytest.mark.parametrize("count", [1, 50])
def test_the_shards_of_tensors_alike_are_planned_once(tmp_path: Path, monkeypatch: Any, count: int):
    placed: list[Any] = []

    def place(*arguments: Any) -> Any:
        placed.append(arguments)
        return compute(*arguments)

    def make(mesh: DeviceMesh) -> dict[str, Any]:
        return {str(number): sharded(torch.ones(4, 2), mesh, 0) for number in range(count)}

    compute = planner_helpers.compute_local_shape_and_global_offset
    monkeypatch.setattr(planner_helpers, "compute_local_shape_and_global_offset", place)
    save(tmp_path, 2, make)
    assert len(placed) == 2  # by each rank
    with as_rank(0, 2) as mesh:
        read_into(tmp_path, make(mesh))
    assert len(placed) == 3


@pytest.mark.parametrize("ranks", [[0, 0], [0], [1, 1]])
def test_shards_that_do_not_fill_their_tensor_are_refused(tmp_path: Path, ranks: list[int]):
    """The ranks of one mesh must have written: two that say they are the same leave a hole."""
    for number, rank in enumerate(ranks):
        with as_rank(rank, 2) as mesh:
            state = {"full": torch.ones(4), "weight": sharded(torch.ones(4, 4), mesh, 1)}
            writer = ShardWriter(state, number)
            writer.write_shards(writer.local_values(), io.BytesIO())
            with (tmp_path / local_metadata_file(number)).open("wb") as file:
                writer.write_local_metadata([], file)
    with pytest.raises(CheckpointError, match=r"do not add up to a full 'weight'\."):
        write_index(tmp_path, range(len(ranks)))


def test_everything_comes_back_in_its_place(tmp_path: Path):
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"model": {"weight": weight}, "groups": [{"lr": 0.5, "names": ["a", "b"]}], "step": 3}
    save(tmp_path / "one", 2, lambda mesh: state)
    assert is_sharded_folder(tmp_path / "one")
    state = read_all(tmp_path / "one", lambda entry: torch.empty(entry.shape or (), dtype=entry.dtype))
    assert torch.equal(state["model"].pop("weight"), weight)
    assert state == {"model": {}, "groups": [{"lr": 0.5, "names": ["a", "b"]}], "step": 3}
    listed = {entry.key: entry for entry in entries(read_index(tmp_path / "one"))}
    assert listed["model.weight"].path == ("model", "weight")
    assert (listed["model.weight"].shape, listed["model.weight"].dtype) == ((2, 3), torch.float32)
    assert listed["step"].shape is None


def test_what_does_not_fit_is_named_with_the_nearest(tmp_path: Path):
    save(tmp_path / "one", 1, lambda mesh: {"weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"has no 'weigth'; did you mean 'weight'"):
        read_into(tmp_path / "one", {"weigth": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"'weight' with shape \(2,\), but this run's has shape \(3,\)"):
        read_into(tmp_path / "one", {"weight": torch.zeros(3)})
    partly = {"weight": torch.zeros(2), "other": torch.full((1,), 7.0)}
    read_into(tmp_path / "one", partly, strict=False)
    assert (partly["weight"].tolist(), partly["other"].tolist()) == ([1.0, 1.0], [7.0])


def test_a_folder_that_was_not_completed_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"has no '\.metadata'"):
        read_index(tmp_path)
    save(tmp_path / "one", 2, lambda mesh: {"weight": sharded(torch.ones(4), mesh, 0)})
    (tmp_path / "one" / shard_file(1)).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_into(tmp_path / "one", {"weight": torch.zeros(4)})


class Trap:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def test_an_index_cannot_run_anything(tmp_path: Path):
    (tmp_path / INDEX_NAME).write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"is not allowed in this file"):
        read_index(tmp_path)
    assert not (tmp_path / "ran").exists()
    for damaged in (b"", b"\x80", pickle.dumps({"a": 1})):
        (tmp_path / INDEX_NAME).write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is not the index of a sharded state"):
            read_index(tmp_path)


@pytest.mark.parametrize("payload", ["code", "nothing", "noise"])
def test_a_shard_cannot_run_anything(tmp_path: Path, payload: str):
    save(tmp_path / "one", 1, lambda mesh: {"weight": torch.ones(2)})
    content = io.BytesIO()
    torch.save(Trap(tmp_path / "ran"), content)
    data = {"code": content.getvalue(), "nothing": b"", "noise": b"x" * 100}[payload]
    index = read_index(tmp_path / "one")
    for place in index.storage_data.values():
        place.offset, place.length = 0, len(data)
    (tmp_path / "one" / INDEX_NAME).write_bytes(pickle.dumps(index))
    (tmp_path / "one" / shard_file(0)).write_bytes(data)
    with pytest.raises(CheckpointError, match="one' cannot be read"):
        read_into(tmp_path / "one", {"weight": torch.zeros(2)})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("elsewhere", ["/etc/passwd", "../other/__0_0.distcp"])
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, elsewhere: str):
    save(tmp_path / "one", 1, lambda mesh: {"weight": torch.ones(2)})
    index = read_index(tmp_path / "one")
    for place in index.storage_data.values():
        place.relative_path = elsewhere
    (tmp_path / "one" / INDEX_NAME).write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"which is not in its folder"):
        read_into(tmp_path / "one", {"weight": torch.zeros(2)})


def test_what_several_ranks_wrote_is_listed_once(tmp_path: Path):
    whole = torch.arange(12.0).view(6, 2)

    def make(mesh: DeviceMesh) -> dict[str, Any]:
        """Experts, say, of a mesh that other ranks have, too."""
        pairs = init_device_mesh("cpu", (mesh.size() // 2, 2), mesh_dim_names=("others", "own"))
        return {
            "plain": whole,
            "number": DTensor.from_local(torch.ones(()), pairs["own"], [Replicate()], run_check=False),
            "cut": sharded(whole, pairs["own"], 0),
        }

    save(tmp_path / "one", 4, make)
    index = read_index(tmp_path / "one")
    listed: dict[str, Any] = {**index.state_dict_metadata}
    assert {name: len(entry.chunks) for name, entry in listed.items()} == {"plain": 1, "number": 1, "cut": 2}
    assert len(index.storage_data) == 4
    state = {"plain": torch.zeros(6, 2), "number": torch.zeros(()), "cut": torch.zeros(6, 2)}
    read_into(tmp_path / "one", state)
    assert torch.equal(state["plain"], whole)
    assert torch.equal(state["cut"], whole)
    assert state["number"] == 1


def test_every_rank_hears_of_weights_that_rank_0_lacks():
    models = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    state = {name: torch.ones_like(value) for name, value in models[0].state_dict().items()}
    ranks = ThreadRanks(size=2)

    def load(rank: int) -> None:
        load_from_rank0(models[rank], state if rank == 0 else {}, current(), on_cpu=False)

    handle = models[1][0].weight.register_hook(torch.neg)
    assert ranks.run(load) == [None, None]
    assert [model[0].weight.sum().item() for model in models] == [4, 4]
    assert hook_of(models[1][0].weight) == "register_hook"  # hooks on gradients stay
    handle.remove()
    assert hook_of(models[1][0].weight) is None
    del state["0.bias"]
    for error in ranks.run(load):
        assert isinstance(error, CheckpointMismatchError)
        assert "has no '0.bias'" in str(error)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("_fsdp_wrapped_module.layer._checkpoint_wrapped_module.weight", "layer.weight"),
        ("_orig_mod.0._fsdp_wrapped_module.1.bias", "0.1.bias"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("module.weight", "module.weight"),
    ],
)
def test_names_are_those_of_the_model_itself(name: str, plain: str):
    assert strip_wrapper_prefixes(name) == plain


def test_parameters_of_several_models_carry_the_number_of_theirs():
    first, second, unowned = nn.Linear(1, 1), nn.Linear(1, 1, bias=False), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [first.bias, second.weight]}, {"params": [unowned]}], lr=0.1)
    assert parameter_names(optimizer, [first, second]) == [["0.bias", "1.weight"], ["param_groups.1.0"]]


@given(st.permutations(range(4)), st.integers(1, 3))
def test_names_and_numbers_of_an_optimizer_are_inverse(order: list[int], first: int):
    """Also where the optimizer that takes the state has its parameters in another order."""
    names = [f"p{number}" for number in range(4)]
    groups = [names[:first], names[first:]]
    state = {
        "state": {number: {"step": number} for number in range(4)},
        "param_groups": [{"lr": 0.1, "params": [*range(first)]}, {"lr": 0.2, "params": [*range(first, 4)]}],
    }
    named = state_by_name(state, groups)
    assert named["state"] == {name: {"step": number} for number, name in enumerate(names)}
    assert state_by_index(named, groups) == state
    shuffled = [sorted(group, key=lambda name: order[int(name[1])]) for group in groups]
    again = state_by_name(state_by_index(named, shuffled), shuffled)
    assert again["state"] == named["state"]


def test_the_state_of_other_parameters_is_refused():
    state = {"state": {}, "param_groups": [{"params": ["a", "b"]}]}
    with pytest.raises(CheckpointError, match=r"only in the checkpoint \['b'\]"):
        state_by_index(state, [["a", "c"]])
    with pytest.raises(CheckpointError, match=r"1 parameter group\(s\), this run's has 2"):
        state_by_index(state, [["a"], ["b"]])


def test_an_optimizer_goes_on_from_what_its_tensors_were():
    def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    (model, optimizer), (fresh, other), shards = trained(), trained(), ShardedStates(torch.device("cpu"))
    state = shards.optimizer_tensors(optimizer, [model])
    assert {*state["state"]} == {"weight", "bias"}
    room = shards.state_allocator(optimizer, [model])
    assert room("weight", "exp_avg", torch.Size([2, 3]), torch.float64).dtype is torch.float64
    moment = optimizer.state[model.weight]["exp_avg"]
    assert room("weight", "exp_avg", torch.Size([2, 3]), torch.float32).data_ptr() == moment.data_ptr()
    for values in other.state.values():
        values["exp_avg"].zero_()
    shards.load_optimizer(other, [fresh], state)
    for loaded, original in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(other.state[loaded]["exp_avg"], optimizer.state[original]["exp_avg"])
