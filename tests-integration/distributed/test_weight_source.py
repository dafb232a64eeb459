"""Weights out of a training run again and again: specifications, all of them, and only what changed."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.errors import SettingsError, UnsupportedError
from accel_train import Accelerator
from harness import cases, distributed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


FSDP1: dict[str, Any] = {"fsdp_version": 1, "auto_wrap_policy": "size_based_wrap", "min_num_params": 20}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp1": {"plugin": FSDP1},
    "fsdp1, flat": {"plugin": {**FSDP1, "use_orig_params": False}},
    "fsdp2": {"plugin": {"fsdp_version": 2}},
    "fsdp2, offloaded": {"plugin": {"fsdp_version": 2, "cpu_offload": True}},
    "tensor": {"sizes": {"tp_size": 2}},
}
LAYOUTS_OF_FOUR: dict[str, dict[str, Any]] = {
    "hsdp": {"sizes": {"dp_replicate_size": 2, "dp_shard_size": 2}, "plugin": {"fsdp_version": 2}},
    "fsdp2 of tensor": {"sizes": {"dp_shard_size": 2, "tp_size": 2}, "plugin": {"fsdp_version": 2}},
    "replicas of tensor": {"sizes": {"dp_replicate_size": 2, "tp_size": 2}},
}


class Net(nn.Module):
    """Layers for tensor parallelism, a tied weight, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.last = nn.Linear(3, 8), nn.Linear(8, 3), nn.Linear(3, 7)
        self.tied = nn.Linear(7, 3, bias=False)
        self.tied_too = self.tied
        self.tp_plan = {"up": "colwise", "down": "rowwise"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied_too(self.last(self.down(torch.tanh(self.up(x)))))


def prepared(layout: dict[str, Any]) -> tuple[Accelerator, nn.Module, Any]:
    options: dict[str, Any] = {}
    if "plugin" in layout:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(**layout["plugin"])
    if "sizes" in layout:
        options["parallelism_config"] = ParallelismConfig(**layout["sizes"])
    accelerator, model = Accelerator(cpu=True, **options), Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    return accelerator, *accelerator.prepare(model, optimizer)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: NaNs are equal, and -0.0 is not 0.0."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


@dataclass
class Receiver:
    """An engine that gets weights: it needs torch and the standard library alone."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    version: int = 0

    def load(
        self, metadata: Iterable[Any], tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        """Allocate memory for all weights, then fill it."""
        self.weights = {m.name: torch.empty(m.shape, dtype=m.dtype) for m in metadata}
        names = iter(self.weights)
        for name, tensor in tensors:
            assert name == next(names)
            assert (tensor.dtype, tensor.shape) == (self.weights[name].dtype, self.weights[name].shape)
            self.weights[name].copy_(tensor)
        assert next(names, None) is None
        self.version = version

    def apply(self, patches: Iterable[Any]) -> int:
        """Write what changed into the weights; return its size in bytes."""
        checked = []
        for patch in patches:
            if patch.version != self.version + 1:
                raise ValueError(f"{patch.name} has version {patch.version}, after {self.version} here")
            checksum = zlib.crc32(f"{patch.name} {patch.version}".encode())
            for tensor in (patch.indices, patch.values):
                checksum = zlib.crc32(tensor.cpu().view(torch.uint8).numpy(), checksum)
            if checksum != patch.checksum:
                raise ValueError(f"{patch.name} of version {patch.version} is damaged")
            checked.append(patch)
        for patch in checked:
            weight = self.weights[patch.name]
            assert tuple(weight.shape) == patch.full_shape
            weight.view(-1)[patch.indices.long()] = patch.values
        self.version += 1
        return sum(patch.nbytes for patch in checked)


def expect(receiver: Receiver, right: dict[str, torch.Tensor]) -> None:
    assert receiver.weights.keys() == right.keys()
    for name, tensor in right.items():
        assert torch.equal(bits(receiver.weights[name]), bits(tensor)), name


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any, index: int) -> None:
    x = torch.arange(6.0).view(2, 3) + index
    accelerator.backward(model(x).square().sum())
    optimizer.step()
    optimizer.zero_grad()


def check_changes(accelerator: Accelerator, model: nn.Module, optimizer: Any, **options: Any) -> None:
    """Send all weights, then changes after each step: the receiver has the same bits as a full stream."""
    source = accelerator.weight_source(
        model, dtype=torch.bfloat16, bucket_bytes=200, track_changes=True, to_main_only=True, **options
    )
    is_main, receiver = accelerator.is_main_process, Receiver()
    with pytest.raises(SettingsError, match="sent nothing yet"):
        source.changes()
    metadata = source.metadata()
    stream = dict(source)
    if is_main:
        receiver.load(metadata, stream.items(), source.version)
    else:
        assert not stream
    for index in range(3):
        step(accelerator, model, optimizer, index)
        patches = [*source.changes()]
        assert source.version == index + 2
        right = dict(
            accelerator.named_full_parameters(model, dtype=torch.bfloat16, to_main_only=True, **options)
        )
        if is_main:
            receiver.apply(patches)
            expect(receiver, right)
        else:
            assert not patches
    assert not [*source.changes()]  # nothing has changed


@pytest.mark.parametrize("layout", cases(LAYOUTS, always={"ddp", "fsdp2", "tensor"}))
@distributed(world_size=2)
def test_changes_give_the_weights_of_a_full_stream(layout: str) -> None:
    check_changes(*prepared(LAYOUTS[layout]))


@pytest.mark.parametrize("layout", cases(LAYOUTS_OF_FOUR, always={"fsdp2 of tensor"}))
@distributed(world_size=4)
def test_changes_on_two_axes(layout: str) -> None:
    check_changes(*prepared(LAYOUTS_OF_FOUR[layout]))


@distributed(world_size=2)
def test_nans_are_equal_to_themselves_and_zeros_of_two_signs_differ() -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7, bias=False))
    with torch.no_grad():
        model[0].weight[4, 2], model[0].weight[0, 0], model[1].weight[6, 4] = float("nan"), -0.0, -0.0
    model = accelerator.prepare(model)
    source = accelerator.weight_source(model, track_changes=True)
    receiver = Receiver()
    receiver.load(source.metadata(), source, 1)
    assert not [*source.changes()]
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            local[local == 0] = 0.0  # was -0.0 in two places
    found = [(patch.name, patch.indices.tolist()) for patch in source.changes()]
    assert found == [("0.weight", [0]), ("1.weight", [34])]


def test_a_patch_out_of_turn_and_a_damaged_one_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 3))
    source = accelerator.weight_source(model, track_changes=True)
    receiver = Receiver()
    receiver.load(source.metadata(), source, 1)
    with torch.no_grad():
        model.weight[1, 1] = 5
    [patch] = source.changes()
    assert (patch.name, patch.full_shape, patch.version) == ("weight", (3, 2), 2)
    assert (patch.indices.tolist(), patch.values.tolist(), patch.nbytes) == ([3], [5.0], 8)
    receiver.version = 0
    with pytest.raises(ValueError, match="version 2, after 0"):
        receiver.apply([patch])
    receiver.version = 1
    patch.values[0] = 6
    with pytest.raises(ValueError, match="is damaged"):
        receiver.apply([patch])
    patch.values[0] = 5
    assert receiver.apply([patch]) == 8
    expect(receiver, dict(source))


class WeightSourceContract(Protocol):
    """What `vllm.distributed.weight_transfer.WeightSource` declares."""

    def metadata(self) -> list[Any]:
        """Return name, dtype and full shape of every parameter, without transferring anything."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a fresh pass of fully materialised tensors."""
        ...


class SyncClient:
    """The four calls of `VLLMWeightSyncClient`, to an engine in this process."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.receiver, self.info, self.wire = Receiver(), {}, []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append(f"init {sorted(init_info)}")

    def start_weight_update(self) -> None:
        self.calls.append("start")
        self.wire = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        self.info = update_info

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Take what is on the wire as the names, dtypes and shapes of the update say."""
        self.calls.append(f"finish {weight_version}")
        rows = zip(self.info["names"], self.info["dtype_names"], self.info["shapes"], self.wire, strict=True)
        for name, dtype, shape, payload in rows:
            flat = payload.view(getattr(torch, dtype))
            self.receiver.weights[name] = flat.view(shape)


class TrainerEngine:
    """A full-resync engine as in the documentation of vLLM: every rank iterates, rank 0 sends."""

    def __init__(self, client: SyncClient, source: WeightSourceContract, rank: int) -> None:
        self.client, self.source, self.is_sender = client, source, rank == 0
        if self.is_sender:
            client.init_weight_transfer_engine({"packed": False})

    def send_weights(self, version: str) -> None:
        metadata = self.source.metadata()
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        self.client.start_weight_update()
        self.client.update_weights(
            {
                "names": [m.name for m in metadata],
                "dtype_names": [str(m.dtype).removeprefix("torch.") for m in metadata],
                "shapes": [list(m.shape) for m in metadata],
            }
        )
        for meta, (name, tensor) in zip(metadata, self.source, strict=True):
            assert (meta.name, meta.dtype, meta.shape) == (name, tensor.dtype, tuple(tensor.shape))
            self.client.wire.append(tensor.contiguous().view(-1).view(torch.uint8).clone())
        self.client.finish_weight_update(version)


@distributed(world_size=2)
def test_the_contract_of_vllm_is_met() -> None:
    accelerator, model, _ = prepared(LAYOUTS["fsdp2"])
    source = accelerator.weight_source(model, dtype=torch.bfloat16, to_main_only=True)
    client = SyncClient()
    engine = TrainerEngine(client, source, accelerator.process_index)
    for version in ("1", "2"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        engine.send_weights(version)
        right = dict(accelerator.named_full_parameters(model, dtype=torch.bfloat16))
        if accelerator.is_main_process:
            expect(client.receiver, right)
    updates = ["start", "update", "finish 1", "start", "update", "finish 2"]
    assert client.calls == (["init ['packed']", *updates] if accelerator.is_main_process else [])
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, source.metadata())
    assert everywhere[0] == everywhere[1]


@distributed(world_size=2)
def test_metadata_reads_no_weight_and_needs_no_collective() -> None:
    accelerator, model, _ = prepared(LAYOUTS["fsdp2"])
    source = accelerator.weight_source(model, bucket_bytes=1)
    with torch.profiler.profile() as profiler:
        metadata = source.metadata()
    names = {event.key for event in profiler.key_averages()}
    assert not {name for name in names if "gloo" in name or "c10d" in name or "copy" in name}, names
    assert [(m.name, m.shape) for m in metadata] == [
        (name, tuple(parameter.shape)) for name, parameter in model.named_parameters(remove_duplicate=False)
    ]


@distributed(world_size=2)
def test_what_no_rank_has_cannot_be_compared() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    with pytest.raises(UnsupportedError, match=r"merge_adapters=True, track_changes=True"):
        accelerator.weight_source(nn.Linear(2, 2), merge_adapters=True, track_changes=True)
