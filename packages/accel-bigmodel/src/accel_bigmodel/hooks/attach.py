"""Attach placement hooks over a whole model, by module name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.base import add_hook_to_module, hook_of
from accel_bigmodel.offload import PrefixedDataset
from accel_ops.weights.tensors import named_module_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor, nn

    from accel_bigmodel.hooks.align import TiedMap

    Device = int | str | torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attachment:
    """The common arguments of all hooks of one call."""

    weights_map: Mapping[str, Tensor] | None = None
    offload_buffers: bool = False
    skip_keys: str | list[str] | None = None
    preload: frozenset[str] = frozenset()
    tied: TiedMap | None = None

    def hook(self, device: Device | None, name: str = "", **options: Any) -> AlignDevicesHook:
        weights = self.weights_map if options.get("offload") else None
        prefix = f"{name}." if name else ""
        return AlignDevicesHook(
            execution_device=device,
            weights_map=None if weights is None else PrefixedDataset(weights, prefix),
            offload_buffers=self.offload_buffers,
            skip_keys=self.skip_keys,
            tied_params_map=self.tied,
            **options,
        )


def attach_align_device_hook(
    module: nn.Module,
    execution_device: torch.device | int | str | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Attach an `AlignDevicesHook` to every module below that has tensors of its own.

    Args:
        module: The top.
        execution_device: Where the modules run.
        offload: Whether their weights are offloaded between forwards.
        weights_map: Where offloaded weights come from, by name in the whole model.
        offload_buffers: Whether buffers are offloaded too.
        module_name: The name of `module` in `weights_map`.
        skip_keys: Keyword arguments that are not moved.
        preload_module_classes: Classes whose modules load everything below them at once, since their forward
            uses the weights of submodules without calling these.
        tied_params_map: Address of a tensor to its copies by device.
    """
    common = _Attachment(
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload=frozenset(preload_module_classes or ()),
        tied=tied_params_map,
    )
    _align(module, module_name, execution_device, offload, common)


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: torch.device | int | str,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Let every module below that has a state run its forward on one device, without moving weights.

    No hook is attached below modules of the classes in `preload_module_classes`; the other arguments are
    those of `attach_align_device_hook`.
    """
    common = _Attachment(
        skip_keys=skip_keys, preload=frozenset(preload_module_classes or ()), tied=tied_params_map
    )
    _execute(module, execution_device, common)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: torch.device | int | str | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Attach hooks to the blocks of a device map.

    `execution_device` and `offload` may be mappings from names of blocks (or single tensors); the other
    arguments are those of `attach_align_device_hook`.
    """
    common = _Attachment(
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload=frozenset(preload_module_classes or ()),
        tied=tied_params_map,
    )
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        _block(module, module_name, execution_device, offload, common, outermost=True)
        return
    names = {*(execution_device if isinstance(execution_device, Mapping) else ())} or {
        *(offload if isinstance(offload, Mapping) else ())
    }
    devices = (
        execution_device if isinstance(execution_device, Mapping) else dict.fromkeys(names, execution_device)
    )
    is_off_device = offload if isinstance(offload, Mapping) else dict.fromkeys(names, offload)
    _blocks(module, module_name, devices, is_off_device, common)


def _blocks(
    module: nn.Module,
    name: str,
    devices: Mapping[str, Device | None],
    is_off_device: Mapping[str, bool],
    common: _Attachment,
) -> None:
    prefix = f"{name}." if name else ""
    direct = {leaf for leaf, _ in named_module_tensors(module) if prefix + leaf in is_off_device}
    if name in devices and name in is_off_device:
        _block(module, name, devices[name], is_off_device[name], common, outermost=not name)
    elif not name:
        add_hook_to_module(
            module,
            replace(common, weights_map=None).hook(devices.get(""), io_same_device=True, only=()),
            append=True,
        )
    for device, offloaded in {(devices.get(prefix + leaf), is_off_device[prefix + leaf]) for leaf in direct}:
        only = {
            leaf
            for leaf in direct
            if (devices.get(prefix + leaf), is_off_device[prefix + leaf]) == (device, offloaded)
        }
        add_hook_to_module(module, common.hook(device, name, offload=offloaded, only=only), append=True)
    for leaf, child in module.named_children():
        _blocks(child, prefix + leaf, devices, is_off_device, common)


def _block(
    module: nn.Module,
    name: str,
    device: Device | None,
    offload: bool,
    common: _Attachment,
    *,
    outermost: bool,
) -> None:
    if not offload:
        hook = common.hook(device, io_same_device=outermost, place_submodules=True)
        add_hook_to_module(module, hook, append=True)
        if device is not None:
            _execute(module, device, common)
        return
    _align(module, name, device, offload, common)
    if hook_of(module) is None:
        hook = common.hook(device, io_same_device=outermost, only=())
        add_hook_to_module(module, hook, append=True)
    if device is not None:
        _execute(module, device, common)


def _align(module: nn.Module, name: str, device: Device | None, offload: bool, common: _Attachment) -> None:
    preload = offload and type(module).__name__ in common.preload
    if preload or any(True for _ in named_module_tensors(module)):
        hook = common.hook(device, name, offload=offload, place_submodules=preload)
        add_hook_to_module(module, hook, append=True)
    if preload:
        return
    for leaf, child in module.named_children():
        _align(child, f"{name}.{leaf}" if name else leaf, device, offload, common)


def _execute(module: nn.Module, device: Device, common: _Attachment) -> None:
    if hook_of(module) is None and any(True for _ in named_module_tensors(module, recurse=True)):
        add_hook_to_module(module, common.hook(device, only=()))
    if type(module).__name__ in common.preload:
        return
    for child in module.children():
        _execute(child, device, common)
