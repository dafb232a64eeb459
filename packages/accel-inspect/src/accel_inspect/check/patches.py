"""Patch communication, storage and data loading for a script that runs as one rank without the others.

Each fake is set into the module that has the real object, before the modules that use it are imported.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from accel_inspect.check.pipeline import patch_pipelines
from accel_inspect.check.recorder import CollectiveRecorder, fake_value, is_fake, nbytes_of
from accel_inspect.estimate.trace import MemoryTracker
from accel_inspect.trial import RankTask, replace_names, wrap_names
from accel_ops.weights.layout import DEFAULT_SHARD_SIZE, convert_file_size_to_int, fill_shards
from accel_state import collectives
from accel_state.libraries import BY_NAME
from accel_state.torch_private import FakeTensor, ShardingPropagator
from accel_train import observing


def install(recorder: CollectiveRecorder, task: RankTask) -> None:
    """Apply all patches."""
    _patch_values()
    _patch_moves(recorder.tracker)
    _patch_conversions()
    _patch_sharding(recorder)
    # As on accelerators, optimizers use foreach kernels.
    wrap_names("torch.optim.optimizer", _get_foreach_kernels_supported_devices=lambda real: [*real(), "cpu"])
    pkgutil.resolve_name("torch.optim.optimizer._foreach_supported_types").append(FakeTensor)
    collectives.in_place_of_group = RankAlone(recorder=recorder, rank=task.rank, world_size=task.world)
    replace_names("accel_plugins.parallelism.experts", exchange_counts=_share_experts_evenly)
    patch_pipelines(recorder)
    _patch_recipes()
    _patch_storage(recorder)
    observing.observer = recorder
    wrap_names("torch.utils.data.DataLoader", __iter__=recorder.iterate)
    wrap_names("accel_train.data.prepare", prepare_data_loader=recorder.prepare_loader)


def _patch_values() -> None:
    """Patch the methods that read a tensor's memory without the dispatcher."""

    def as_list(tensor: Any) -> Any:
        value: Any = fake_value(tensor)
        for length in reversed(tensor.shape):
            value = [value] * length
        return value

    def as_array(tensor: Any) -> Any:
        numpy = sys.modules["numpy"]
        dtype = str(tensor.dtype).removeprefix("torch.").replace("bf", "f")
        return numpy.ones(tuple(tensor.shape), dtype=dtype)

    def made_up(make: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda real, self, *args, **options: (
            make(self) if is_fake(self) else real(self, *args, **options)
        )

    def as_text(real: Any, self: Any, spec: str) -> str:
        is_number = is_fake(self) and not self.dim()
        return format(fake_value(self), spec) if is_number else real(self, spec)

    methods = {"tolist": as_list, "data_ptr": lambda _: 0, "numpy": as_array, "__array__": as_array}
    wrap_names("torch.Tensor", **{name: made_up(make) for name, make in methods.items()}, __format__=as_text)


def _patch_moves(tracker: MemoryTracker) -> None:
    """Patch moves to the host, whose memory is not the device's; in the check, both are the CPU.

    A device that is named by a string is likely the device of the run; `cpu()` always means the host.
    """

    def cpu(real: Any, *args: Any, **options: Any) -> Any:
        moved = real(*args, **options)
        return tracker.move(moved, to_host=True) if is_fake(moved) else moved

    def to(real: Any, *args: Any, **options: Any) -> Any:
        moved = real(*args, **options)
        names_device = any(isinstance(argument, torch.device) for argument in (*args, *options.values()))
        return tracker.move(moved, to_host=False) if names_device and is_fake(moved) else moved

    wrap_names("torch.Tensor", cpu=cpu, to=to)


def _patch_conversions() -> None:
    """Patch `Module.to` and similar methods, which swap fake tensors and fail if others refer to them."""

    def apply(real: Any, self: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        tables = (self._parameters, self._buffers)
        if not all(is_fake(tensor) for table in tables for tensor in table.values() if tensor is not None):
            return real(self, fn, recurse)
        if recurse:
            for child in self.children():
                child._apply(fn)
        with torch.no_grad():
            for table in tables:
                table.update(
                    {name: _convert(value, fn) for name, value in table.items() if value is not None}
                )
        return self

    wrap_names("torch.nn.Module", _apply=apply)


def _convert(tensor: Any, fn: Callable[[Any], Any]) -> Any:
    new, gradient = fn(tensor), tensor.grad
    if not isinstance(tensor, torch.nn.Parameter):
        return new
    if new.device != tensor.device:
        return torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
    tensor.grad = None
    tensor.data = new
    tensor.grad = None if gradient is None else fn(gradient)
    return tensor


def _patch_sharding(recorder: CollectiveRecorder) -> None:
    """Patch sharding: meshes keep real values, and models move to meta parameter by parameter.

    `Module.to` would swap fake tensors in place.
    """

    def on_real(real: Any, *args: Any, **options: Any) -> Any:
        with recorder.on_real_tensors():
            return real(*args, **options)

    def unseen(real: Any, *args: Any, **options: Any) -> Any:
        with recorder.paused():
            return real(*args, **options)

    # The methods of a mesh that read its tensor of ranks; not every torch has all of them.
    reading = ("__init__", "__getitem__", "_concatenate", "_flatten", "_unflatten", "get_coordinate")
    names = [name for name in reading if name in vars(DeviceMesh)]
    wrap_names("torch.distributed.device_mesh.DeviceMesh", **dict.fromkeys(names, on_real))
    # The places of shards are the values of tensors of ranks and indices.
    wrap_names("accel_plugins.optimizers.matrices.ShardLayout", of=on_real)
    for module in ("accel_ops.weights.regions", "torch.distributed.checkpoint.planner_helpers"):
        wrap_names(module, compute_local_shape_and_global_offset=on_real)
    # Positions and masks are made up: they do not say what a batch has.
    replace_names(
        "accel_plugins.parallelism.context",
        packs_samples=lambda _: False,
        has_padding_before_tokens=lambda _: False,
    )
    inferring = ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta")  # each torch has one of them
    name = next(name for name in inferring if name in vars(ShardingPropagator))
    wrap_names("accel_state.torch_private.ShardingPropagator", **{name: unseen})
    # FSDP2 takes one or two of the chunks of a parameter, and makes one for each rank.
    replace_names("torch.distributed.fsdp._fully_shard._fsdp_param", _chunk_with_empty=Chunks)
    # Models that libraries make are not sharded: nothing of DeepSpeed runs here.
    replace_names("accel_plugins.deepspeed.plugin.DeepSpeedPlugin", set_deepspeed_weakref=lambda _: None)


@dataclass(frozen=True)
class Chunks:
    """The chunks of a tensor for the ranks of a mesh, of which each is made when it is asked for."""

    tensor: Tensor
    number: int
    dim: int

    def __getitem__(self, rank: int) -> Tensor:
        size = self.tensor.size(self.dim)
        length = -(-size // self.number)
        start = rank * length
        if start >= size > 0:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(length, size - start))


def _share_experts_evenly(
    experts: Tensor, num_experts: int, group: Any
) -> tuple[list[int], list[int], Tensor]:
    """Replace the exchange of the numbers of tokens, whose experts are not known: all get equally many."""
    ranks = group.size()
    per_rank = experts.numel() // ranks
    send = [experts.numel() - per_rank * (ranks - 1), *[per_rank] * (ranks - 1)]
    return send, [*send], experts.new_empty(ranks, num_experts // ranks)


@dataclass(frozen=True, kw_only=True, eq=False)
class RankAlone(collectives.SingleCollectives):
    """The collectives of a rank without the others, whose data is that of this rank.

    An operation on nested data is recorded as its ranks compare their calls; what it sends belongs to it.
    """

    recorder: CollectiveRecorder

    def all_gather_into(self, out: Tensor, tensor: Tensor) -> None:
        """Do nothing: tensors have no values."""

    def start_scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Callable[[], None]:
        del out, parts, src
        self.recorder.record("scatter")
        return lambda: None

    def all_gather_object(self, obj: Any, *, call: str = "all_gather_object") -> list[Any]:
        self.recorder.record(call.partition("(")[0])
        return [obj] * self.world_size

    def barrier(self) -> None:
        self.recorder.record("wait_for_everyone")


def _patch_recipes() -> None:
    """Count torchao as on a GPU, and TransformerEngine as bfloat16: it stores what that stores."""

    def choose(real: Any, named: str | None, *args: Any, **options: Any) -> Any:
        return BY_NAME[named] if named == "TE" else real(named, *args, **options)

    def without_emulation(real: Any, handler: Any, *args: Any, **options: Any) -> Any:
        config = real(handler, *args, **options)
        return replace(config, emulate=handler.emulate) if hasattr(config, "emulate") else config

    wrap_names("accel_plugins.fp8.build", choose_backend=choose)
    wrap_names("accel_plugins.fp8.ao", config_of=without_emulation)
    replace_names(
        "accel_plugins.fp8.te",
        make_recipe=lambda _: None,
        convert_model=lambda _: {},
        fp8_autocast=lambda _, **__: nullcontext(),
    )


def _patch_storage(recorder: CollectiveRecorder) -> None:
    """Patch what loads checkpoints, and what writes weights and objects: files are recorded instead."""

    def load(*args: Any, **kwargs: Any) -> None:
        del args, kwargs
        recorder.record("load_state")

    def write_weights(parts: Any, folder: Any, **options: Any) -> None:
        limit, nbytes = convert_file_size_to_int(options.get("max_shard_size", DEFAULT_SHARD_SIZE)), 0
        for shard, _ in fill_shards(((part, nbytes_of(part)) for part in parts), limit):
            nbytes += nbytes_of(shard)
            shard.clear()  # The writer, too, holds references to the parts until then.
        recorder.record_file(str(Path(folder) / "model*.safetensors"), nbytes)

    def write_object(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        if not isinstance(f, BytesIO):  # it is a part of a file
            recorder.record_file(str(f), nbytes_of(obj))

    def save_pretrained(self: Any, save_directory: Any, *args: Any, **options: Any) -> None:
        if options.get("is_main_process", args[0] if args else True):
            state = options.get("state_dict", args[1] if len(args) > 1 else None)
            write_weights([self.state_dict() if state is None else state], save_directory)

    if "transformers.modeling_utils" in sys.modules:
        replace_names("transformers.modeling_utils.PreTrainedModel", save_pretrained=save_pretrained)
    replace_names(
        "safetensors.torch", save_file=lambda tensors, filename, *_, **__: write_object(tensors, filename)
    )
    replace_names("accel_train.checkpoint.load", load=load, has_checkpoint=lambda *_: False)
    replace_names("accel_train.checkpoint.context.CheckpointContext", meet=lambda *_: None)
    replace_names("accel_ops.weights.write", save_state_dict=write_weights, save=write_object)
    torch.save = write_object
