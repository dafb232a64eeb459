"""Run a model across devices: `dispatch_model`, `cpu_offload`, `disk_offload`."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_bigmodel.device_map import (
    check_device_map,
    check_tied_parameters_on_same_device,
    flatten_map,
    known_entries,
)
from accel_bigmodel.hooks import (
    AlignDevicesHook,
    CpuOffload,
    M,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook_on_blocks,
    attach_layerwise_casting_hooks,
    default_device,
    hook_of,
)
from accel_bigmodel.offload import (
    OffloadedWeightsLoader,
    collect_weights,
    offload_from_model,
    read_offload_index,
)
from accel_bigmodel.offloaded_block import block_roots, make_blocks
from accel_bigmodel.placement import (
    check_device_same,
    model_tensors,
    set_module_tensor_to_device,
    shared_names,
)
from accel_ops.weights.layout import OFFLOAD_INDEX_NAME
from accel_ops.weights.read import device_of, entry_of
from accel_ops.weights.tensors import find_tied_parameters, named_module_tensors, retie_parameters
from accel_state.device_kinds import PEER_ACCESS_DRIVER, check_cuda_p2p_ib_support
from accel_state.errors import SettingsError, some_of

if TYPE_CHECKING:
    from accel_bigmodel.hooks import TiedMap

    Device = int | str | torch.device

__all__ = [
    "attach_layerwise_casting_hooks",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
]

_STORAGE = ("cpu", "disk")
_log = logging.getLogger(__name__)


def dispatch_model(
    model: M,
    device_map: Mapping[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Mapping[str, Any]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
) -> M:
    """Place a model's blocks on the devices of a map, and attach hooks that run the model across them.

    Blocks on the CPU (if the map has an accelerator) and on the disk are copied to the main device for their
    forward only; the next block is prefetched while the current one computes. Tied weights stay tied. A model
    whose map has a single device is only moved to it.

    Args:
        model: The model; weights for the disk may be on the meta device if they are in `offload_index`.
        device_map: Module or tensor name to an index, `"cpu"` or `"disk"`.
        main_device: The device of offloaded blocks; by default the first accelerator of the map, else the
            CPU.
        state_dict: The weights of the blocks on the CPU; by default taken from the model.
        offload_dir: The folder of weights on the disk, which may be written by this call.
        offload_index: Name to the index entry of a weight on the disk.
        offload_buffers: Whether buffers of offloaded blocks are offloaded too.
        skip_keys: Keyword arguments that are not moved between devices.
        preload_module_classes: Classes whose modules load all of their submodules at once.
        force_hooks: Attach hooks even if all modules are on one device.

    Returns:
        The model, with the map in `hf_device_map`.

    Raises:
        SettingsError: Tensors have no device in the map, or no value, or weights for the disk have no
            folder.

    Example:
        >>> from torch import nn
        >>> model = dispatch_model(nn.Sequential(nn.Linear(2, 2)), {"": "cpu"})
        >>> model.hf_device_map
        {'': 'cpu'}
    """
    check_device_map(model, device_map)
    asked, device_map = dict(device_map), known_entries(model, device_map)
    devices = list(dict.fromkeys(device_map.values()))
    if len(devices) == 1 and devices[0] != "disk" and not force_hooks:
        _require_values(model, device_map)
        target = torch.device(devices[0])
        if any(tensor.device != target for _, tensor in named_module_tensors(model, recurse=True)):
            ties = find_tied_parameters(model)
            model.to(target)
            retie_parameters(model, ties)
        _hook_encoder(model)
        vars(model)["hf_device_map"] = asked
        return model
    accelerators = [device for device in devices if str(device) not in _STORAGE]
    if len(accelerators) > 1:
        _warn_of_peer_access(accelerators)
    if main_device is None:
        main_device = accelerators[0] if accelerators else "cpu"
    main = torch.device(main_device)
    tied = shared_names(model)
    tied_map: TiedMap = {}
    for group in tied:
        first = model_tensors(model)[group[0]]
        if not first.is_meta:
            tied_map[first.data_ptr()] = {}
        sent = {name: device_of(name, device_map) for name in group}
        on_main = [
            device
            for device in sent.values()
            if device is not None and device != "disk" and check_device_same(torch.device(device), main)
        ]
        if on_main:  # a weight that is tied to one on the main device is there
            device_map |= {name: on_main[0] for name, device in sent.items() if str(device) in _STORAGE}
    if tied:
        check_tied_parameters_on_same_device(tied, device_map)
    device_map = flatten_map(model, device_map)
    offloaded: dict[str, Device] = {}
    resident: dict[str, Device] = {}
    for name, device in device_map.items():
        is_offloaded = device == "disk" or (str(device) == "cpu" and main.type != "cpu")
        (offloaded if is_offloaded else resident)[name] = device
    weights = OffloadedWeightsLoader(state_dict={})
    if offloaded:
        weights = collect_weights(
            model,
            offloaded,
            tied,
            state_dict=state_dict,
            offload_dir=offload_dir,
            offload_index=offload_index,
            offload_buffers=offload_buffers,
        )
    _require_values(model, device_map, known=weights)
    _hook(
        model,
        main,
        resident,
        [*offloaded],
        weights,
        preload_module_classes,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        tied_params_map=tied_map,
    )
    for group in tied:  # on different devices they become separate copies
        if len({device_of(name, device_map) for name in group}) == 1:
            retie_parameters(model, [group])
    _hook_encoder(model)
    for name in _accelerate_added_attributes if offloaded else ():
        if hasattr(type(model), name):
            move: Callable[..., Any] = getattr(model, name)
            vars(model)[name] = functools.wraps(move)(functools.partial(_refuse_or_move, model, move))
    vars(model)["hf_device_map"] = asked
    return model


def cpu_offload(
    model: M,
    execution_device: torch.device | int | str | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
) -> M:
    """Keep the weights of a model on the CPU, and copy those of each block to a device for its forward.

    The next block is prefetched while the current one computes. Parameters of modules above blocks stay on
    the device.

    Args:
        model: The model.
        execution_device: The execution device; by default the device of the first parameter.
        offload_buffers: Whether buffers are offloaded too.
        state_dict: The weights on the CPU; by default taken from the model.
        preload_module_classes: Classes whose modules load all of their submodules at once.
    """
    device = _first_device(model) if execution_device is None else execution_device
    state = state_dict or model.state_dict()
    tied = {name: group[0] for group in find_tied_parameters(model) for name in group[1:]}
    weights = {name: tensor.to("cpu") for name, tensor in state.items() if tied.get(name) not in state}
    weights |= {name: weights[first] for name, first in tied.items() if first in state}
    loader = OffloadedWeightsLoader(state_dict=weights)
    del state, weights
    _hook(model, device, {}, [""], loader, preload_module_classes, offload_buffers=offload_buffers)
    return model


def disk_offload(
    model: M,
    offload_dir: str | os.PathLike[str],
    execution_device: torch.device | int | str | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
) -> M:
    """Keep the weights of a model on the disk, and copy those of each block to a device for its forward.

    Apart from the folder, blocks and arguments are as in `cpu_offload`.

    Args:
        model: The model.
        offload_dir: The folder to which weights are written, unless its `index.json` already lists them.
        execution_device: The execution device; by default the device of the first parameter.
        offload_buffers: Whether buffers are offloaded too.
        preload_module_classes: Classes whose modules load all of their submodules at once.

    Raises:
        SettingsError: The folder has the weights of another model.
    """
    device = _first_device(model) if execution_device is None else execution_device
    state = model.state_dict() if offload_buffers else dict(model.named_parameters(remove_duplicate=False))
    values = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    written = (Path(offload_dir) / OFFLOAD_INDEX_NAME).is_file() and read_offload_index(offload_dir)
    if written:
        values = {name: values[name] for name in state if name in values and name in written}
    empty = [name for name in state if name not in values and not written]
    if empty:
        raise SettingsError(
            f"{some_of(empty)} are on the meta device, so that disk_offload() cannot write them. Load "
            "the weights first, or call load_checkpoint_and_dispatch with device_map={'': 'disk'}"
        )
    offload_from_model(offload_dir, values)
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    absent = [name for name in state if name not in weights]
    if absent:
        raise SettingsError(
            f"the folder {str(offload_dir)!r} is that of another model: it has no weights for "
            f"{some_of(absent)}. Choose a folder of its own for each model"
        )
    _hook(model, device, {}, [""], weights, preload_module_classes, offload_buffers=offload_buffers)
    return model


def cpu_offload_with_hook(
    model: M,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[M, UserCpuOffloadHook]:
    """Move a model to a device when its forward is called, and keep it there until it is offloaded.

    Args:
        model: The model.
        execution_device: The execution device; by default the accelerator, if there is one.
        prev_module_hook: The handle of the previous model, which is offloaded before this model is moved.

    Returns:
        The model, and a handle whose `offload()` moves it back to the CPU.

    Example:
        >>> from torch import nn
        >>> first, hook = cpu_offload_with_hook(nn.Linear(1, 1))
        >>> second, _ = cpu_offload_with_hook(nn.Linear(1, 1), prev_module_hook=hook)
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def _hook(
    model: nn.Module,
    main: Device,
    devices: Mapping[str, Device],
    offloaded: Sequence[str],
    weights: OffloadedWeightsLoader,
    preload_module_classes: Sequence[str] | None,
    **options: Any,
) -> None:
    """Move resident entries of a device map to their devices, and stream the others to the main device."""
    roots = block_roots(model, offloaded, preload_module_classes or (), _feature_layer(model))
    entries = set[str]().union(*roots.values())
    devices = dict(devices)
    for name, _ in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        if entry_of(name, entries) is None and entry_of(name, devices) is None:  # of a module above blocks
            devices[name] = main
            if name in weights:
                value = weights[name]
                set_module_tensor_to_device(model, name, main, value=value, dtype=value.dtype)
    attach_align_device_hook_on_blocks(
        model,
        {"": main, **devices, **dict.fromkeys(entries, main)},
        {**dict.fromkeys(devices, False), **dict.fromkeys(entries, True)},
        weights,
        preload_module_classes=preload_module_classes,
        **options,
    )
    if roots:
        make_blocks(model, roots, weights, torch.device(main))


def _hook_encoder(model: nn.Module) -> None:
    """Make an encoder return its output on the device of its input.

    `generate` calls the encoder on its own; if the encoder of a dispatched model has no hook, it creates one
    of another package, which may not be installed.
    """
    encode = getattr(model, "get_encoder", None)
    if not _is_encoder_decoder(model) or not callable(encode):
        return
    encoder = encode()
    if isinstance(encoder, torch.nn.Module) and encoder is not model and hook_of(encoder) is None:
        first = next((parameter.device for parameter in encoder.parameters() if not parameter.is_meta), None)
        add_hook_to_module(encoder, AlignDevicesHook(first, io_same_device=True, only=()))


def _feature_layer(model: nn.Module) -> str | None:
    """Return the name of the first layer of a transformers model that converts features (audio) into text.

    `model.device` is the device of the first parameter, and Whisper's `generate` creates tokens there. This
    layer is small. An embedding is not, but models that begin with one use the device of their inputs.
    """
    if not _is_encoder_decoder(model) or getattr(model, "main_input_name", "input_ids") == "input_ids":
        return None
    first = next((name.rpartition(".")[0] for name, _ in model.named_parameters()), "")
    return None if isinstance(model.get_submodule(first), torch.nn.Embedding) else first


def _is_encoder_decoder(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def _require_values(model: nn.Module, device_map: Mapping[str, Device], known: Container[str] = ()) -> None:
    """Raise if meta tensors have no weights to load: they would get uninitialised memory."""
    empty = [
        name
        for name, tensor in model.named_parameters()
        if tensor.is_meta and name not in known and device_of(name, device_map) != torch.device("meta")
    ]
    if empty:
        raise SettingsError(
            f"{some_of(empty)} have no values: no checkpoint gave any. If they are tied to others, tie them "
            "(model.tie_weights()) before loading"
        )


def _warn_of_peer_access(gpus: Sequence[Device]) -> None:
    """Warn if activations are copied between consumer GPUs whose driver corrupts peer-to-peer copies."""
    if torch.cuda.is_available() and not check_cuda_p2p_ib_support():
        _log.warning(
            "The device map uses %s, and the driver of these cards has faulty peer-to-peer copies, "
            "which may produce wrong outputs. Update it to version %s or newer.",
            some_of(map(str, gpus)),
            PEER_ACCESS_DRIVER,
        )


def _first_device(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return default_device() if first is None or first.is_meta else first.device


def _refuse_or_move(model: nn.Module, move: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Move a model, unless it has offloaded weights, which its hooks would move to the old devices."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise RuntimeError(
            "this model cannot be moved: some of its modules are offloaded to the CPU or the disk. "
            "Call remove_hook_from_submodules(model) first, which loads their weights"
        )
    return move(*args, **kwargs)


_accelerate_added_attributes = ["to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"]
"""The methods that programs look up in the attributes of a dispatched model to remove them."""
