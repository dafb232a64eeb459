"""Copy state trees to host memory; write and read objects as `torch.save` does."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage

from accel_ops.weights.safetensors_io import clean_state_dict_for_safetensors, write_safetensors
from accel_state.device_kinds import WITHOUT_STORAGE
from accel_state.errors import CheckpointError
from accel_state.remote import AnyPath
from accel_state.unpickling import load_safely
from accel_train.checkpoint.stores import on_disk

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

logger = logging.getLogger(__name__)


class HostStaging:
    """Copy state trees to host memory, which for storages of devices that live on is that of the copy before.

    A copy is serialised to the same bytes as its original, and views share memory where the originals do. It
    is valid until the next one of the same storage.
    """

    _cannot_pin = False

    @cached_property
    def _stager(self) -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        return DefaultStager(
            StagingOptions(
                use_pinned_memory=torch.cuda.is_available(),  # the stager pins with its runtime
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,  # the stager would wait for the current device alone
            )
        )

    def copy(self, tree: Any) -> Any:
        """Copy a tree; what is on a device has been copied when this returns."""
        return copied_tree(tree, self._copy_of)

    def _copy_of(self, storage: UntypedStorage) -> UntypedStorage:
        if not self._cannot_pin:
            values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            try:
                staged: Tensor = self._stager.stage({"": values})[""]
                return staged.untyped_storage()
            except AssertionError:  # a storage has been resized since its last copy
                del self._stager
                return self._copy_of(storage)
            except RuntimeError as error:  # WSL2 and containers limit pinned memory
                self._cannot_pin = True
                reason = str(error).splitlines()[0]
                logger.warning("Host memory could not be pinned (%s): copies are slower.", reason)
        return storage.cpu()


def copied_tree(
    tree: Any, copy_storage: Callable[[UntypedStorage], UntypedStorage], *, keeps_host: bool = False
) -> Any:
    """Copy a tree as `copy.deepcopy` does, and the storages of tensors on a device with a function.

    Args:
        tree: Nested containers of tensors and other objects. An object that the tree contains several times
            is copied once.
        copy_storage: Called once for every storage that has memory; returns a CPU storage of the same size.
        keeps_host: Whether tensors on the CPU are not copied.
    """
    memo: dict[int, Any] = {}
    storages: dict[Any, Any] = {}
    for tensor in tensors_in(tree, set()):
        if tensor.device.type in {"cpu", "meta"}:
            if keeps_host:
                memo[id(tensor)] = tensor
            elif not tensor.is_leaf:  # which `copy.deepcopy` refuses
                memo[id(tensor)] = copy.deepcopy(tensor.detach(), memo).requires_grad_()
        elif id(tensor) not in memo and _is_plain(tensor):
            memo[id(tensor)] = result = _copied(tensor, copy_storage, storages)
            vars(result).update(copy.deepcopy(vars(tensor), memo))  # `torch.save` writes attributes, too
    return copy.deepcopy(tree, memo)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is only a view of a storage; `copy.deepcopy` copies other tensors."""
    is_dense = tensor.layout == torch.strided and not tensor.is_quantized
    return is_dense and type(tensor) in {Tensor, torch.nn.Parameter} and not tensor.is_neg()


def _copied(
    tensor: Tensor, copy_storage: Callable[[UntypedStorage], UntypedStorage], storages: dict[Any, Any]
) -> Tensor:
    source = tensor.untyped_storage()
    if tensor.device.type in WITHOUT_STORAGE:  # equal views of one tensor share memory again
        key = source._cdata, tensor.storage_offset(), tuple(tensor.size()), tensor.stride(), tensor.dtype
        if key not in storages:
            storages[key] = tensor.detach().cpu()
        result = storages[key].detach()
    else:
        if source._cdata not in storages:
            storages[source._cdata] = copy_storage(source) if source.nbytes() else UntypedStorage(0)
        result = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
            storages[source._cdata], tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        result = result.conj() if tensor.is_conj() else result
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(result, tensor.requires_grad)
    return result.requires_grad_(tensor.requires_grad)


def tensors_in(tree: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in the dictionaries, lists and tuples of a tree, not those inside other objects."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (dict, list, tuple)) and id(tree) not in seen:  # pyright: ignore[reportUnknownArgumentType]
        seen.add(id(tree))  # pyright: ignore[reportUnknownArgumentType]
        values: Any = tree.values() if isinstance(tree, dict) else tree
        for value in values:
            if isinstance(value, (Tensor, dict, list, tuple)):  # random states are hundreds of numbers
                yield from tensors_in(value, seen)


def write_weights(state: Mapping[str, Any], sink: SupportsWrite[Any], *, safe: bool) -> None:
    """Write the state dict of a model."""
    if safe:
        write_safetensors(clean_state_dict_for_safetensors(state), sink)
    else:
        write_object(dict(state), sink)


_IS_PER_THREAD = torch.__version__ >= "2.15"  # compared as a version


def write_object(obj: Any, sink: Any) -> None:
    """Write an object as `torch.save` does, with all tensors on the CPU."""
    # The manifest has better checksums than `torch.save`. Before torch 2.15 the option may belong to all
    # threads, the user's among them, and is left unchanged.
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(before and not _IS_PER_THREAD)
    try:
        torch.save(on_host(obj), sink)
    finally:
        torch.serialization.set_crc32_options(before)


def on_host(tree: Any) -> Any:
    """Copy the tensors of a tree that are not on the CPU; return the tree itself if there are none."""
    if all(tensor.device.type in {"cpu", "meta"} for tensor in tensors_in(tree, set())):
        return tree
    return copied_tree(tree, UntypedStorage.cpu, keeps_host=True)


def location_of(value: Any, device: torch.device) -> torch.device:
    """Return the device that a `map_location` means."""
    try:
        return device if value == "on_device" else torch.device("cpu" if value is None else value)
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f"load_state(map_location={value!r}): pass None, 'cpu', 'on_device' or a device."
        ) from error


def read_object(path: AnyPath, **kwargs: Any) -> Any:
    """Read a file of `torch.save`: tensors, arrays of numbers and plain containers.

    Args:
        path: The file.
        **kwargs: As for `torch.load`. `weights_only=False` reads any object, and runs whatever its author put
            into the file.

    Raises:
        CheckpointError: The file holds other objects, or is damaged.
    """
    try:
        with on_disk(path) as local:
            return load_safely(str(local), **kwargs)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{str(path)!r} contains objects that can only be read by running code from the file. If "
            "you trust its author, pass"
            " load_kwargs={'weights_only': False}, or name the classes with "
            f"torch.serialization.add_safe_globals. ({next((x for x in reason if 'GLOBAL' in x), reason[0])})"
        ) from error
    except (EOFError, RuntimeError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {str(error).splitlines()[0]}") from error
