"""What takes the place of communication, storage and data in a process that plays one rank of many.

Each stand-in is set into the module that has the real one, before the modules that use it are imported.
"""

from __future__ import annotations

import itertools
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from accel_cli.commands.check.collectives import AloneCollectives, operations
from accel_cli.commands.check.observer import is_without_values, made_up, nbytes_of
from accel_cli.commands.check.strategy import loading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accel_cli.commands.check.observer import Observer
    from accel_cli.commands.check.record import Order

_END: Any = object()


def install(observer: Observer, order: Order) -> None:
    """Set all stand-ins.

    Args:
        observer: Who is told what happens.
        order: Which rank is played.
    """
    _values()
    _communication(observer, order)
    _storage(observer, order)
    _data(observer, order.batches)


def _set(module: str, **stand_ins: Any) -> None:
    place = import_module(module)
    for name, stand_in in stand_ins.items():
        if not hasattr(place, name):
            raise AttributeError(f"{module} has no {name} to be replaced")
        setattr(place, name, stand_in)


def _values() -> None:
    """What reads a tensor's memory without asking the dispatcher."""
    tensor: Any = torch.Tensor
    for name, make in (("tolist", _list), ("numpy", _array), ("__array__", _array)):
        setattr(tensor, name, _instead(getattr(tensor, name), make))


def _instead(real: Callable[..., Any], make: Callable[[Any], Any]) -> Callable[..., Any]:
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        return make(self) if is_without_values(self) else real(self, *args, **kwargs)

    return read


def _list(tensor: Any) -> Any:
    value: Any = made_up(tensor)
    for length in reversed(tensor.shape):
        value = [value] * length
    return value


def _array(tensor: Any) -> Any:
    numpy: Any = import_module("numpy")
    return numpy.ones(tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch.").replace("bf", "f"))


def _communication(observer: Observer, order: Order) -> None:
    _set(
        "accel_state.runtime", TorchCollectives=lambda _: AloneCollectives(observer, order.rank, order.world)
    )
    made = operations(observer, order.world)
    _set("accel_ops.pad", pad_across_processes=made.pop("pad_across_processes"))
    _set("accel_ops.collect", **made)
    _set("accel_plugins.registry", load=loading(observer))


class Planned:
    """A checkpoint that is only planned; it is done at once.

    Args:
        path: The folder.
    """

    done = True

    def __init__(self, path: str) -> None:
        self.path = path

    def wait(self) -> str:
        """Wait for nothing."""
        return self.path


def _storage(observer: Observer, order: Order) -> None:
    layout: Any = import_module("accel_train.checkpoint.layout")
    saving: Any = import_module("accel_train.checkpoint.save")

    def save(run: Any, output_dir: Any, *, safe: bool, blocking: bool, to_disk: bool) -> Planned:
        del blocking, to_disk
        observer.saw("save_state")
        folder = saving.target_of(run, output_dir)
        if run.is_automatic:
            run.project.iteration += 1
        if run.commits:
            for index, model in enumerate(run.prepared.models):
                observer.wrote(
                    str(folder / layout.weights_name(index, safe=safe)), nbytes_of(model.state_dict())
                )
            for index, optimizer in enumerate(run.prepared.optimizers):
                size = nbytes_of(list(optimizer.state.values()))
                observer.wrote(str(folder / layout.optimizer_name(index)), size)
        observer.wrote(str(folder / layout.rng_name(order.rank)), 0)
        return Planned(str(folder))

    def load(*args: Any, **kwargs: Any) -> None:
        del args, kwargs
        observer.saw("load_state")

    def write_weights(state_dict: Any, folder: Any, **kwargs: Any) -> None:
        del kwargs
        observer.wrote(str(Path(folder) / "model*.safetensors"), nbytes_of(state_dict))

    def write_object(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        observer.wrote(str(f), nbytes_of(obj))

    saving.save = save
    _set("accel_train.checkpoint.load", load=load, has_checkpoint=lambda *_: False)
    _set("accel_ops.weights.write", save_state_dict=write_weights, save=write_object)
    torch.save = write_object


def _data(observer: Observer, batches: int) -> None:
    prepared: Any = import_module("accel_train.data.prepared")
    preparing: Any = import_module("accel_train.data.prepare")
    real_pass, real_iter = prepared.PreparedLoader._pass, DataLoader.__iter__

    def limited(make: Callable[[], Iterator[Any]], loader: Any) -> Iterator[Any]:
        """The first batches without values, read where tensors have them; the last one is told as such."""
        vars(loader).update(num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False)
        with observer.outside():
            batches_there = make()
            upcoming = next(batches_there, _END)
        for number in itertools.count(1):
            if upcoming is _END:
                return
            current = observer.without_values(upcoming)
            if number == batches:
                vars(loader)["end_of_dataloader"] = True
            yield current
            if number == batches:
                break
            with observer.outside():
                upcoming = next(batches_there, _END)
        with observer.outside():
            del batches_there

    def one_pass(self: Any, placing: Any = None, *, before: Any = None) -> Iterator[Any]:
        del placing
        return limited(lambda: real_pass(self, None, before=before), self)

    def iterate(self: Any) -> Iterator[Any]:
        return real_iter(self) if observer.is_outside else limited(lambda: real_iter(self), self)

    prepared.PreparedLoader._pass = one_pass
    setattr(DataLoader, "__iter__", iterate)  # noqa: B010 - its declared type is not this one's
    real_prepare = preparing.prepare_data_loader

    def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
        with observer.outside():
            return real_prepare(*args, **{**kwargs, "dispatch_batches": False})

    preparing.prepare_data_loader = prepare_data_loader
