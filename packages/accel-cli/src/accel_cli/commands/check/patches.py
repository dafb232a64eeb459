"""Patch communication, storage, data.

Each fake is set into the module that has the real object, before the modules that use it are imported.
"""

from __future__ import annotations

import functools
import itertools
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from accel_cli.commands.check.record import RankTask
from accel_cli.commands.check.recorder import CollectiveRecorder, fake_value, is_without_values, nbytes_of
from accel_cli.commands.check.strategy import FORMS, files_of, loading
from accel_ops.tree import recursively_apply
from accel_ops.weights.layout import DEFAULT_SHARD_SIZE, convert_file_size_to_int, fill_shards
from accel_state.collectives import ReduceOp
from accel_state.libraries import BY_NAME, Fp8Device
from accel_state.torch_private import (
    MESH_METHODS,
    PROPAGATION_METHODS,
    FakeTensor,
    ShardingPropagator,
    buffer_table,
    let_foreach_run_on,
    parameter_table,
    replace_fsdp_chunks,
)
from accel_train.checkpoint.contents import form_of_run


@dataclass(frozen=True, slots=True, eq=False)
class SingleRankCollectives:
    """`accel_state.collectives.Collectives` without other processes."""

    recorder: CollectiveRecorder
    rank: int
    world_size: int
    chunk_bytes: int = 0

    def exchange_chunks(self, chunk: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """Return the same chunk for every rank."""
        self._do("all_gather", meanwhile)
        return chunk.expand(self.world_size, -1)

    def all_gather_into(
        self, out: Tensor, tensor: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Leave `out` unchanged."""
        del out, tensor
        self._do("all_gather", meanwhile)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Leave the tensor unchanged."""
        del tensor, src
        self._do("broadcast")

    def start_scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Callable[[], None]:
        """Leave `out` unchanged."""
        del out, parts, src
        self._do("scatter")
        return _nothing

    def all_reduce(
        self, tensor: Tensor, meanwhile: Callable[[], None] | None = None, *, op: ReduceOp = "sum"
    ) -> None:
        """Leave the tensor unchanged."""
        del tensor, op
        self._do("all_reduce", meanwhile)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the same object for every rank."""
        self._do("all_gather_object")
        return [obj] * self.world_size

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        """Leave the objects unchanged."""
        del objects, src
        self._do("broadcast_object_list")

    def barrier(self) -> None:
        """Return at once."""
        self._do("wait_for_everyone")

    def _do(self, kind: str, meanwhile: Callable[[], None] | None = None) -> None:
        self.recorder.saw(kind)
        if meanwhile is not None:
            meanwhile()


def operations(recorder: CollectiveRecorder, world_size: int) -> dict[str, Callable[..., Any]]:
    """Return replacements of the operations of `accel_ops.collectives` and `accel_ops.pad`."""

    def gather(tensor: Any, *, same_shapes: bool = False) -> Any:
        del same_shapes
        recorder.saw("gather")
        return recursively_apply(_repeated, tensor, error_on_other_type=True)

    def _repeated(leaf: Tensor) -> Tensor:
        return torch.cat([leaf.reshape(1) if leaf.ndim == 0 else leaf] * world_size)

    def gather_object(object: Any) -> Any:  # noqa: A002 - the documented name
        recorder.saw("gather_object")
        return [*object] * world_size

    def broadcast(tensor: Any, from_process: int = 0) -> Any:
        del from_process
        recorder.saw("broadcast")
        return tensor

    def broadcast_object_list(object_list: Any, from_process: int = 0) -> Any:
        del from_process
        recorder.saw("broadcast_object_list")
        return object_list

    def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
        del reduction
        recorder.saw("reduce")
        return recursively_apply(lambda leaf: leaf * scale, tensor, error_on_other_type=True)

    def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        del dim, pad_index, pad_first
        recorder.saw("pad_across_processes")
        return tensor

    made = (gather, gather_object, broadcast, broadcast_object_list, reduce, pad_across_processes)
    return {function.__name__: function for function in made}


def _nothing() -> None:
    pass


_END: Any = object()


def install(recorder: CollectiveRecorder, order: RankTask) -> None:
    """Apply all patches."""
    _values()
    _moves(recorder)
    _conversions()
    _division(recorder)
    _optimizers()
    _communication(recorder, order)
    _recipes(recorder)
    _storage(recorder)
    _data(recorder, order.batches)


def _set(path: str, **patches: Any) -> None:
    owner = pkgutil.resolve_name(path)
    for name, patch in patches.items():
        if not hasattr(owner, name):
            raise AttributeError(f"{path} has no {name} to be replaced")
        setattr(owner, name, patch)


def _values() -> None:
    """Patch the methods that read a tensor's memory without the dispatcher."""
    tensor: Any = torch.Tensor
    for name, make in (("tolist", _list), ("numpy", _array), ("__array__", _array)):
        setattr(tensor, name, _instead(getattr(tensor, name), make))


def _moves(recorder: CollectiveRecorder) -> None:
    """Patch moves to the host, whose memory is not the device's; in the check, both are the CPU.

    A device that is named by a string is likely the device of the run; `cpu()` always means the host.
    """
    tensor: Any = torch.Tensor
    to_cpu, to = tensor.cpu, tensor.to

    def cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = to_cpu(self, *args, **kwargs)
        return recorder.moved(plain, to_host=True) if is_without_values(plain) else plain

    def to_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        moved = to(self, *args, **kwargs)
        names_device = any(isinstance(one, torch.device) for one in (*args, *kwargs.values()))
        return recorder.moved(moved, to_host=False) if names_device and is_without_values(moved) else moved

    tensor.cpu, tensor.to = cpu, to_device


def _conversions() -> None:
    """Patch `Module.to` and similar methods, which swap fake tensors and fail if others refer to them."""
    kind: Any = torch.nn.Module
    real = kind._apply

    def apply(self: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        tensors = [
            one for one in (*parameter_table(self).values(), *buffer_table(self).values()) if one is not None
        ]
        if not all(map(is_without_values, tensors)):
            return real(self, fn, recurse)
        if recurse:
            for child in self.children():
                child._apply(fn)
        with torch.no_grad():
            for name, parameter in parameter_table(self).items():
                if parameter is not None:
                    parameter_table(self)[name] = _converted(parameter, fn)
            for name, buffer in buffer_table(self).items():
                if buffer is not None:
                    buffer_table(self)[name] = fn(buffer)
        return self

    kind._apply = apply


def _converted(parameter: Any, fn: Callable[[Any], Any]) -> Any:
    new, gradient = fn(parameter), parameter.grad
    if new.device != parameter.device:
        return torch.nn.Parameter(new, requires_grad=parameter.requires_grad)
    parameter.grad = None
    parameter.data = new
    if gradient is not None:
        parameter.grad = fn(gradient)
    return parameter


def _division(recorder: CollectiveRecorder) -> None:
    """Patch sharding: meshes keep real values, and models move to meta parameter by parameter.

    `Module.to` would swap fake tensors in place.
    """
    for name in MESH_METHODS:
        if name in vars(DeviceMesh):
            setattr(DeviceMesh, name, _within(recorder.outside, vars(DeviceMesh)[name]))
    shapes: Any = ShardingPropagator
    name = next(one for one in PROPAGATION_METHODS if one in vars(shapes))
    setattr(shapes, name, _within(recorder.uncounted, vars(shapes)[name]))
    replace_fsdp_chunks(Chunks)
    values: Any = import_module("accel_plugins.sharding.wrap")

    def empty(model: Any, replaced: Any) -> None:
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        for first, names in replaced.names.items():
            old = tensors[first]
            # `to` keeps the type that a library has given the weight
            new: Any = old.detach().to("meta", replaced.dtypes[first])
            if isinstance(old, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
            for name in names:
                values.put_tensor(model, name, new)

    values._move_to_meta = empty
    # Models that libraries make are not sharded: nothing of DeepSpeed runs here.
    _set("accel_plugins.deepspeed.plugin.DeepSpeedPlugin", set_deepspeed_weakref=lambda _: None)


class Chunks:
    """Lazy chunks of a tensor: FSDP needs two of them, and making all is slow in a large world."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor = tensor
        self._dim = dim
        self._length = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self._length
        length = min(self._length, self._tensor.size(self._dim) - start)
        return self._tensor.narrow(self._dim, start, length) if length > 0 else self._tensor.new_empty(0)


def _optimizers() -> None:
    """Let optimizers use their foreach implementation, as on accelerators."""
    let_foreach_run_on("cpu", FakeTensor)


def _within(context: Callable[[], AbstractContextManager[None]], method: Any) -> Any:
    real: Callable[..., Any] = getattr(method, "__func__", method)

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context():
            return real(*args, **kwargs)

    return type(method)(call) if isinstance(method, (staticmethod, classmethod)) else call


def _instead(real: Callable[..., Any], make: Callable[[Any], Any]) -> Callable[..., Any]:
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        return make(self) if is_without_values(self) else real(self, *args, **kwargs)

    return read


def _list(tensor: Any) -> Any:
    value: Any = fake_value(tensor)
    for length in reversed(tensor.shape):
        value = [value] * length
    return value


def _array(tensor: Any) -> Any:
    numpy: Any = import_module("numpy")
    return numpy.ones(tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch.").replace("bf", "f"))


def _recipes(recorder: CollectiveRecorder) -> None:
    """Count torchao as on a GPU, and TransformerEngine as bfloat16: it stores what that stores."""
    choose: Any = pkgutil.resolve_name("accel_plugins.fp8.build.choose_backend")

    def chosen(named: str | None, device: Any, **options: Any) -> Any:
        if named == "MSAMP":  # refused where it is not installed, and not because the check is on the CPU
            device = Fp8Device(type="cuda")
        found = BY_NAME[named] if named == "TE" else choose(named, device, **options)
        recorder.fp8 = found.title
        return found

    _set("accel_plugins.fp8.build", choose_backend=chosen)
    _set(
        "accel_plugins.fp8.te",
        make_recipe=lambda _: None,
        convert_model=lambda _: {},
        fp8_autocast=lambda _, **__: nullcontext(),
    )
    torchao: Any = import_module("accel_plugins.fp8.ao")
    config_of, convert = torchao._config, torchao._convert

    def not_emulated(handler: Any, device: Any) -> Any:
        config = config_of(handler, device)
        return replace(config, emulate=handler.emulate) if hasattr(config, "emulate") else config

    def in_low_precision(model: Any, *arguments: Any, **options: Any) -> set[str]:
        names = convert(model, *arguments, **options)
        for layer in map(model.get_submodule, names):
            layer.register_forward_pre_hook(_cast_inputs)
        return names

    _set("accel_plugins.fp8.ao", _config=not_emulated, _convert=in_low_precision)


def _cast_inputs(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Do what torchao's layers do with CUDA's autocast, and with no other one."""
    inputs, *rest = args
    low = torch.is_autocast_enabled("cpu")
    return (inputs.to(torch.get_autocast_dtype("cpu")) if low else inputs, *rest)


def _communication(recorder: CollectiveRecorder, order: RankTask) -> None:
    _set(
        "accel_state.runtime",
        TorchCollectives=lambda _: SingleRankCollectives(recorder, order.rank, order.world),
    )
    made = operations(recorder, order.world)
    _set("accel_ops.pad", pad_across_processes=made.pop("pad_across_processes"))
    _set("accel_ops.collectives", **made)
    registry: Any = import_module("accel_plugins.registry")
    registry.load = loading(recorder, registry.load)


class Planned:
    """Fake of a background save, which is complete at once."""

    done = True

    def __init__(self, path: str) -> None:
        self.path = path

    def wait(self) -> str:
        """Return the folder."""
        return self.path


def _storage(recorder: CollectiveRecorder) -> None:
    saving: Any = import_module("accel_train.checkpoint.save")

    def save(run: Any, output_dir: Any, *, safe: bool, blocking: bool, to_disk: bool) -> Planned:
        del blocking, to_disk
        recorder.saw("save_state")
        folder = saving.target_of(run, output_dir)
        if run.is_automatic:
            run.project.iteration += 1
        with recorder.silence():
            form = FORMS[form_of_run(run)]
            files = [*files_of(run, safe=safe)]
        for name, nbytes, full_nbytes in files:
            recorder.wrote(str(folder / name), nbytes, form=form, full_nbytes=full_nbytes)
        if form == "whole" and recorder.meter is not None:  # gathered before it is written
            recorder.holds_on_host(sum(nbytes for _, nbytes, _ in files))
        return Planned(str(folder))

    def load(*args: Any, **kwargs: Any) -> None:
        del args, kwargs
        recorder.saw("load_state")

    def write_weights(parts: Any, folder: Any, **kwargs: Any) -> None:
        recorder.wrote(str(Path(folder) / "model*.safetensors"), sum(map(nbytes_of, held(parts, kwargs))))

    def held(parts: Any, options: Any) -> Iterator[Any]:
        """Hold references to the parts as long as the writer would."""
        limit = convert_file_size_to_int(options.get("max_shard_size", DEFAULT_SHARD_SIZE))
        shards = fill_shards(((part, nbytes_of(part)) for part in parts), limit)
        for shard, _ in shards:
            yield [*shard]
            shard.clear()

    def write_object(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        recorder.wrote(str(f), nbytes_of(obj))

    def save_pretrained(self: Any, save_directory: Any, *args: Any, **options: Any) -> None:
        if options.get("is_main_process", args[0] if args else True):
            state = options.get("state_dict", args[1] if len(args) > 1 else None)
            write_weights([self.state_dict() if state is None else state], save_directory)

    saving.save = save
    if "transformers.modeling_utils" in sys.modules:
        _set("transformers.modeling_utils.PreTrainedModel", save_pretrained=save_pretrained)
    _set("safetensors.torch", save_file=lambda tensors, filename, *_, **__: write_object(tensors, filename))
    _set("accel_train.checkpoint.load", load=load, has_checkpoint=lambda *_: False)
    _set("accel_ops.weights.write", save_state_parts=write_weights, save=write_object)
    torch.save = write_object


def _data(recorder: CollectiveRecorder, batches: int) -> None:
    prepared: Any = import_module("accel_train.data.adapter")
    preparing: Any = import_module("accel_train.data.prepare")
    real_pass, real_iter = prepared.PreparedLoader._pass, DataLoader.__iter__

    def limited(make: Callable[[], Iterator[Any]], loader: Any) -> Iterator[Any]:
        """Yield the first batches as fake tensors, read outside of fake mode; mark the last one."""
        vars(loader).update(num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False)
        with recorder.outside():
            batches_there = make()
            upcoming = next(batches_there, _END)
            recorder.read_batch(loader, upcoming)
        for number in itertools.count(1):
            if upcoming is _END:
                return
            current = recorder.without_values(upcoming)
            if number == batches:
                vars(loader)["end_of_dataloader"] = True
            yield current
            if number == batches:
                break
            with recorder.outside():
                upcoming = next(batches_there, _END)
                recorder.read_batch(loader, upcoming)
        with recorder.outside():
            del batches_there

    def one_pass(self: Any, batch_transfer: Any = None, *, before: Any = None) -> Iterator[Any]:
        del batch_transfer
        return limited(lambda: real_pass(self, None, before=before), self)

    def iterate(self: Any) -> Iterator[Any]:
        return real_iter(self) if recorder.is_outside else limited(lambda: real_iter(self), self)

    prepared.PreparedLoader._pass = one_pass
    setattr(DataLoader, "__iter__", iterate)  # noqa: B010 - its declared type is not this one's
    real_prepare = preparing.prepare_data_loader

    def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
        with recorder.outside():
            loader = real_prepare(*args, **{**kwargs, "dispatch_batches": False})
            recorder.made_loader(loader, kwargs.get("process_index") or 0)
        return loader

    preparing.prepare_data_loader = prepare_data_loader
