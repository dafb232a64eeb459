"""Patch communication, storage and data loading for a script that runs as one rank without the others.

Each fake is set into the module that has the real object, before the modules that use it are imported.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from accel_inspect.check.pipeline import patch_pipelines
from accel_inspect.check.recorder import CollectiveRecorder, fake_value, is_fake, nbytes_of
from accel_inspect.check.strategy import CheckObserver
from accel_inspect.trial import RankTask, replace_names
from accel_ops.weights.layout import DEFAULT_SHARD_SIZE, convert_file_size_to_int, fill_shards
from accel_plugins.optimizers.matrices import ShardLayout
from accel_state import collectives
from accel_state.libraries import BY_NAME
from accel_state.torch_private import FakeTensor, ShardingPropagator, compute_local_shape_and_global_offset
from accel_train import observing


def install(recorder: CollectiveRecorder, task: RankTask) -> None:
    """Apply all patches."""
    _patch_values()
    _patch_moves(recorder)
    _patch_conversions()
    _patch_sharding(recorder)
    optimizer: Any = import_module("torch.optim.optimizer")  # which uses foreach kernels on accelerators
    real_devices = optimizer._get_foreach_kernels_supported_devices
    optimizer._get_foreach_kernels_supported_devices = lambda: [*real_devices(), "cpu"]
    optimizer._foreach_supported_types.append(FakeTensor)
    collectives.in_place_of_group = RankAlone(recorder=recorder, rank=task.rank, world_size=task.world)
    replace_names("accel_plugins.parallelism.experts", exchange_counts=_share_experts_evenly)
    patch_pipelines(recorder)
    _patch_recipes()
    _patch_storage(recorder)
    observing.observer = observer = CheckObserver(recorder, task.batches)
    _patch_loaders(recorder, observer)


def _patch_values() -> None:
    """Patch the methods that read a tensor's memory without the dispatcher."""

    def as_list(tensor: Any) -> Any:
        value: Any = fake_value(tensor)
        for length in reversed(tensor.shape):
            value = [value] * length
        return value

    def as_array(tensor: Any) -> Any:
        numpy: Any = import_module("numpy")
        dtype = str(tensor.dtype).removeprefix("torch.").replace("bf", "f")
        return numpy.ones(tuple(tensor.shape), dtype=dtype)

    def replaced(method: Callable[..., Any], make: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda self, *args, **options: make(self) if is_fake(self) else method(self, *args, **options)

    tensor: Any = torch.Tensor
    methods = {"tolist": as_list, "data_ptr": lambda _: 0, "numpy": as_array, "__array__": as_array}
    for name, make in methods.items():
        setattr(tensor, name, replaced(getattr(tensor, name), make))


def _patch_moves(recorder: CollectiveRecorder) -> None:
    """Patch moves to the host, whose memory is not the device's; in the check, both are the CPU.

    A device that is named by a string is likely the device of the run; `cpu()` always means the host.
    """
    tensor: Any = torch.Tensor
    to_cpu, to = tensor.cpu, tensor.to

    def cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        moved = to_cpu(self, *args, **kwargs)
        return recorder.move(moved, to_host=True) if is_fake(moved) else moved

    def to_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        moved = to(self, *args, **kwargs)
        names_device = any(isinstance(argument, torch.device) for argument in (*args, *kwargs.values()))
        return recorder.move(moved, to_host=False) if names_device and is_fake(moved) else moved

    tensor.cpu, tensor.to = cpu, to_device


def _patch_conversions() -> None:
    """Patch `Module.to` and similar methods, which swap fake tensors and fail if others refer to them."""
    module: Any = torch.nn.Module
    real = module._apply

    def apply(self: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
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

    module._apply = apply


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
    # The methods of a mesh that read its tensor of ranks; not every torch has all of them.
    for name in ("__init__", "__getitem__", "_concatenate", "_flatten", "_unflatten", "get_coordinate"):
        if name in vars(DeviceMesh):
            setattr(DeviceMesh, name, _run_within(recorder.on_real_tensors, vars(DeviceMesh)[name]))
    # The places of shards are the values of tensors of ranks and indices.
    layout_of = _run_within(recorder.on_real_tensors, vars(ShardLayout)["of"])
    replace_names("accel_plugins.optimizers.matrices.ShardLayout", of=layout_of)
    on_real = _run_within(recorder.on_real_tensors, compute_local_shape_and_global_offset)
    replace_names("accel_plugins.sharding.shards", compute_local_shape_and_global_offset=on_real)
    # Positions and masks are made up: they do not say what a batch has.
    replace_names(
        "accel_plugins.parallelism.context",
        packs_samples=lambda _: False,
        has_padding_before_tokens=lambda _: False,
    )
    propagator: Any = ShardingPropagator
    inferring = ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta")  # each torch has one of them
    name = next(name for name in inferring if name in vars(propagator))
    setattr(propagator, name, _run_within(recorder.paused, vars(propagator)[name]))
    # Models that libraries make are not sharded: nothing of DeepSpeed runs here.
    replace_names("accel_plugins.deepspeed.plugin.DeepSpeedPlugin", set_deepspeed_weakref=lambda _: None)


def _run_within(context: Callable[[], AbstractContextManager[None]], method: Any) -> Any:
    real: Callable[..., Any] = getattr(method, "__func__", method)

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context():
            return real(*args, **kwargs)

    return type(method)(call) if isinstance(method, (staticmethod, classmethod)) else call


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
    choose: Any = pkgutil.resolve_name("accel_plugins.fp8.build.choose_backend")
    config_of: Any = pkgutil.resolve_name("accel_plugins.fp8.ao.config_of")

    def choose_backend(named: str | None, device: Any, **options: Any) -> Any:
        return BY_NAME[named] if named == "TE" else choose(named, device, **options)

    def config_without_emulation(handler: Any, *args: Any, **options: Any) -> Any:
        config = config_of(handler, *args, **options)
        return replace(config, emulate=handler.emulate) if hasattr(config, "emulate") else config

    replace_names("accel_plugins.fp8.build", choose_backend=choose_backend)
    replace_names("accel_plugins.fp8.ao", config_of=config_without_emulation)
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


def _patch_loaders(recorder: CollectiveRecorder, observer: CheckObserver) -> None:
    """Patch loaders: those that are not prepared are read as prepared ones, and all outside of fake mode."""
    preparing: Any = import_module("accel_train.data.prepare")
    real_iter, real_prepare = DataLoader.__iter__, preparing.prepare_data_loader

    def iterate(self: Any) -> Iterator[Any]:
        if recorder.is_on_real_tensors:
            return real_iter(self)
        return observer.batches(self, lambda: real_iter(self))

    setattr(DataLoader, "__iter__", iterate)  # noqa: B010 - its declared type is another

    def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
        with recorder.on_real_tensors():
            loader = real_prepare(*args, **{**kwargs, "dispatch_batches": False})
            recorder.record_loader(loader, kwargs.get("process_index") or 0)
        return loader

    preparing.prepare_data_loader = prepare_data_loader
