"""Run a module on one device: its weights are there, or are offloaded and come for the forward only."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_bigmodel.hooks.base import ModelHook, SequentialHook, hook_of
from accel_bigmodel.hooks.slot import slot_of
from accel_bigmodel.placement import as_parameter, set_module_tensor_to_device
from accel_ops.move import send_to_device
from accel_ops.tree import find_device
from accel_ops.weights.tensors import (
    buffer_table,
    named_module_tensors,
    non_persistent_buffers,
    parameter_table,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping, MutableMapping

    from accel_bigmodel.hooks.slot import Slot
    from accel_bigmodel.offloaded_block import OffloadedBlock

    Device = int | str | torch.device
    TiedMap = MutableMapping[int, MutableMapping[torch.device, Tensor]]

_META = torch.device("meta")


class AlignDevicesHook(ModelHook):
    """Run a module on one device: inputs follow, weights are there or come for the forward only.

    Args:
        execution_device: Where weights and inputs are during the forward.
        offload: Keep the weights elsewhere between forwards: the module then holds meta tensors.
        io_same_device: Give the output back on the device where the input was.
        weights_map: Where offloaded weights come from, by their name in the module; by default they are kept
            on the CPU.
        offload_buffers: Offload buffers too; else they stay on `execution_device`.
        place_submodules: Treat the weights of submodules with those of the module.
        skip_keys: Keyword arguments, and keys of mappings, that are not moved.
        tied_params_map: Address of a tensor to its copies by device: a tied weight comes once.
        only: Restrict the hook to these tensors of the module.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedMap | None = None,
        *,
        only: Collection[str] | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.only = only
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self.slots: list[Slot] = []
        self.block: OffloadedBlock | None = None

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the weights to the execution device, or replace them by meta tensors when offloading."""
        tensors = {
            name: tensor
            for name, tensor in named_module_tensors(module, recurse=self.place_submodules)
            if self.only is None or name in self.only
        }
        if not self.offload:
            if self.execution_device is not None:
                for name in tensors:
                    self._move(module, name)
            return module
        stay = non_persistent_buffers(module, recurse=self.place_submodules)
        buffers = {name for name, _ in module.named_buffers(recurse=self.place_submodules)}
        stay = stay if self.offload_buffers else buffers | stay
        offloaded = {name: tensor for name, tensor in tensors.items() if name not in stay}
        self.original_devices = {name: tensor.device for name, tensor in offloaded.items()}
        if self.weights_map is None:
            self.weights_map = {name: tensor.data.to("cpu") for name, tensor in offloaded.items()}
        self.slots = [slot_of(tensor, module, name) for name, tensor in offloaded.items()]
        for slot in self.slots:
            slot.leave()
        if self.execution_device is not None:
            for name in stay & tensors.keys():
                if not tensors[name].is_meta:
                    self._move(module, name)
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the inputs, and acquire the weights.

        Raises:
            NotImplementedError: An input has no values.
        """
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.execution_device is not None:
            try:
                args = send_to_device(args, self.execution_device)
                kwargs = send_to_device(kwargs, self.execution_device, skip_keys=self.skip_keys)
            except NotImplementedError as error:
                raise NotImplementedError(
                    f"an input of {type(module).__name__} does not move to {self.execution_device}: {error} "
                    "If it was made on the device of the model's first parameter, which is the meta device "
                    "while that parameter is offloaded, give that one's module a device in the device_map."
                ) from error
        block = self._used_block()
        if block is not None:
            block.acquire()
        elif self.offload:
            self._load()
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:  # noqa: ARG002 - the seam's signature
        """Release the weights, and move the output to where the input was."""
        self._release()
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def forward_failed(self, module: nn.Module) -> None:  # noqa: ARG002 - the seam's signature
        """Release the weights."""
        self._release()

    def keep_resident(self) -> None:
        """Leave the weights that the module holds now where they are."""
        self.offload = False
        self.slots = []

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Put offloaded weights back where they were."""
        if self.block is not None:
            self.block.discard(self)
            self.block = None
        if self.offload and self.weights_map is not None:
            for slot in self.slots:
                device = self.original_devices[slot.name]
                if device != _META:
                    slot.enter(self.weights_map[slot.name].to(device))
        return module

    def _move(self, module: nn.Module, name: str) -> None:
        device = self.execution_device
        if device is not None:
            set_module_tensor_to_device(module, name, device, tied_params_map=self.tied_params_map)

    def _used_block(self) -> OffloadedBlock | None:
        """Return the block that gives the weights; none if they are asked for on another device."""
        block = self.block
        if block is None:
            return None
        if self.execution_device is not None and torch.device(self.execution_device) == block.device:
            return block
        if block.is_held:
            raise RuntimeError(
                f"the weights of block {block.name!r} are in use on {block.device}: they cannot be on "
                f"{self.execution_device} too before its forward has ended"
            )
        return None

    def _release(self) -> None:
        block = self._used_block()
        if block is not None:
            block.release()
        elif self.offload:
            for slot in self.slots:
                slot.leave()

    def _load(self) -> None:
        device = torch.device("cpu" if self.execution_device is None else self.execution_device)
        weights, tied = self.weights_map or {}, self.tied_params_map
        for slot in self.slots:
            value = weights[slot.name]
            if value.device != device:
                shared = tied.get(value.data_ptr(), {}).get(device) if tied else None
                value = value.to(device) if shared is None else shared
            slot.enter(value)


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether a module's weights are offloaded between forwards.

    Example:
        >>> has_offloaded_params(nn.Linear(1, 1))
        False
    """
    return align_hook_of(module) is not None


@contextmanager
def align_module_device(
    module: nn.Module, execution_device: torch.device | None = None
) -> Generator[None, None, None]:
    """Have a module's weights on a device for a while, wherever they are otherwise.

    Args:
        module: The module; what is below it is left alone if it is offloaded.
        execution_device: Where; by default the device of its hook. Without both, nothing happens.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> with align_module_device(layer, torch.device("meta")):
        ...     layer.weight.device
        device(type='meta')
    """
    hook = align_hook_of(module)
    if hook is not None:
        before = hook.execution_device
        if execution_device is not None:
            hook.execution_device = execution_device
        try:
            hook.pre_forward(module)
            yield
        finally:
            hook.post_forward(module, None)
            hook.execution_device = before
        return
    held = dict(named_module_tensors(module, recurse=False)) if execution_device is not None else {}
    tables: list[dict[str, Any]] = [parameter_table(module), buffer_table(module)]
    try:
        for name, tensor in held.items():
            moved = tensor.detach().to(execution_device)
            parameter = name in tables[0]
            tables[not parameter][name] = as_parameter(moved, tensor) if parameter else moved
        yield
    finally:
        for name, tensor in held.items():
            table = tables[name not in tables[0]]
            if not table[name].is_meta and table[name].device != tensor.device:
                tensor.data.copy_(table[name])
            table[name] = tensor


def align_hook_of(module: nn.Module) -> AlignDevicesHook | None:
    """Find the hook that offloads a module's weights, also in a chain of hooks."""
    return next((hook for hook in align_hooks_of(module) if hook.offload), None)


def align_hooks_of(module: nn.Module) -> list[AlignDevicesHook]:
    """Find all placement hooks of a module, also in chains of chains."""
    pending: list[ModelHook | None] = [hook_of(module)]
    found: list[AlignDevicesHook] = []
    while pending:
        hook = pending.pop(0)
        if isinstance(hook, SequentialHook):
            pending[:0] = hook.hooks
        elif isinstance(hook, AlignDevicesHook):
            found.append(hook)
    return found
