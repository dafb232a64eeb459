"""Hooks around the forward of a module: they place its tensors, offload a model, or cast weights."""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from accel_bigmodel.offload import PrefixedDataset
from accel_bigmodel.placement import OffloadedParameter, as_parameter, owner_of, set_module_tensor_to_device
from accel_ops.tree import find_device, send_to_device
from accel_ops.weights.tensors import get_non_persistent_buffers, named_module_tensors

if TYPE_CHECKING:
    from accel_bigmodel.offloaded_block import OffloadedBlock, StreamedBlocks

    Device = int | str | torch.device
    TiedMap = MutableMapping[int, MutableMapping[torch.device, Tensor]]

M = TypeVar("M", bound=nn.Module)
F = TypeVar("F", bound=Callable[..., Any])


class ModelHook:
    """Base class of hooks around a module's forward. Unlike PyTorch's hooks they receive keyword arguments.

    Attributes:
        no_grad: Whether the forward runs under `torch.no_grad`.
    """

    no_grad: bool = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare the module when the hook is attached, and return it."""
        return module

    def pre_forward(
        self,
        module: nn.Module,  # noqa: ARG002 - for those that override
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run before the forward, and return its arguments, possibly changed."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:  # noqa: ARG002 - for those that override
        """Run after the forward, and return its output, possibly changed."""
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Undo `pre_forward` after the forward, or the `pre_forward` of a later hook, raised."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo `init_hook` when the hook is removed, and return the module."""
        return module


class SequentialHook(ModelHook):
    """Chain several hooks: each event is passed to them in order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.no_grad = any(hook.no_grad for hook in hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for index, hook in enumerate(self.hooks):
            try:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
            except BaseException:
                for before in self.hooks[:index]:
                    before.forward_failed(module)
                raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        for hook in self.hooks:
            hook.forward_failed(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: M, hook: ModelHook, append: bool = False) -> M:
    """Wrap a module's forward in a hook.

    Args:
        module: The module; it is changed in place.
        hook: The hook.
        append: Chain the hook after the module's existing hook; otherwise replace that hook.

    Example:
        >>> class Double(ModelHook):
        ...     def post_forward(self, module, output):
        ...         return 2 * output
        >>> add_hook_to_module(nn.Identity(), Double())(torch.ones(1))
        tensor([2.])
    """
    present = hook_of(module)
    if append and present is not None:
        # Keep the existing chain: its hooks are initialised already.
        prepared = hook.init_hook(module)
        chain = [*(present.hooks if type(present) is SequentialHook else [present]), hook]
        # Weights are cast after they are loaded, regardless of the order of attachment.
        chain.sort(key=lambda hook: isinstance(hook, LayerwiseCastingHook))
        _wrap(prepared, SequentialHook(*chain))
        return cast("M", prepared)
    if present is not None:
        remove_hook_from_module(module)
    prepared = hook.init_hook(module)
    _wrap(prepared, hook)
    return cast("M", prepared)


def remove_hook_from_module(module: M, recurse: bool = False) -> M:
    """Remove a module's hook, and restore its original forward."""
    hook = hook_of(module)
    if hook is not None:
        hook.detach_hook(module)
        del vars(module)["_hf_hook"]
    table = vars(module)
    if "_old_forward" in table:
        original = table.pop("_old_forward")
        # The forward of the class needs no restoring; only a patched one does.
        if getattr(original, "__func__", None) is getattr(type(module), "forward", None):
            table.pop("forward", None)
        else:
            table["forward"] = original
    if recurse:
        remove_hook_from_submodules(module)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of all its submodules."""
    for part in list(module.modules()):
        remove_hook_from_module(part)


def hook_of(module: nn.Module) -> ModelHook | None:
    """Return the hook of a module, if it has one."""
    return vars(module).get("_hf_hook")


def _wrap(module: nn.Module, hook: ModelHook) -> None:
    table = vars(module)
    table["_hf_hook"] = hook  # names that other libraries look up
    if "_old_forward" not in table:
        table["_old_forward"] = module.forward
    # A partial, not a closure: a deep copy of the module then calls the copy.
    table["forward"] = functools.update_wrapper(
        functools.partial(_hooked_forward, module), table["_old_forward"]
    )


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook: ModelHook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    try:
        if hook.no_grad:
            with torch.no_grad():
                output = module._old_forward(*args, **kwargs)
        else:
            output = module._old_forward(*args, **kwargs)
    except BaseException:
        hook.forward_failed(module)
        raise
    return hook.post_forward(module, output)


def run_uncompiled(function: F) -> F:
    """Exclude a function and its callees from compilation.

    `torch.compiler.disable` does the same, but imports the compiler, which takes seconds.
    """
    uncompiled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (uncompiled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return cast("F", call)


class OffloadedTensor:
    """One offloaded parameter or buffer of a hooked module.

    A tensor that the program assigns to the module, or `None`, replaces the offloaded one for good.

    Attributes:
        name: Its name in the hooked module.
        is_view: Whether its value is a view of memory that stays: the parameter is then made once.
    """

    is_view = False

    def __init__(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        owner, self._leaf = owner_of(module, name)
        self.name = name
        self._is_parameter = self._leaf in owner._parameters
        self._table: dict[str, Any] = owner._parameters if self._is_parameter else owner._buffers
        empty = tensor.detach().to("meta")
        self._meta = (
            tensor if tensor.is_meta else as_parameter(empty, tensor) if self._is_parameter else empty
        )
        if type(self._meta) is nn.Parameter:  # in place: a meta parameter may be tied, or in an optimizer
            self._meta.__class__ = OffloadedParameter
            vars(self._meta)["offloaded_name"] = f"{name!r} of {type(module).__name__}"
        self._live = self._value = tensor

    def enter(self, value: Tensor, *, keep: bool = False) -> None:
        """Set the module's tensor to a value on the execution device; with `keep`, for good."""
        current = self._table.get(self._leaf)
        is_own = current is self._meta or current is self._live
        if not is_own and (current is None or not current.is_meta):
            if current is not None and current.device != value.device:
                moved = current.detach().to(value.device)
                self._table[self._leaf] = as_parameter(moved, current) if self._is_parameter else moved
            return
        if keep or value is not self._value or self._live.requires_grad != self._meta.requires_grad:
            self._live = self._value = value
            if self._is_parameter:
                with torch.inference_mode(mode=value.is_inference()):
                    self._live = as_parameter(value, self._meta)
                if self._live.requires_grad and not keep:
                    name = vars(self._meta).get("offloaded_name", self.name)
                    self._live.register_hook(functools.partial(_refuse_gradient, name))
        self._table[self._leaf] = self._live

    def leave(self) -> None:
        """Set the module's tensor to a meta tensor; keep no reference to device memory."""
        if self._table.get(self._leaf) is self._live:
            self._table[self._leaf] = self._meta
        if not self.is_view:
            self._live = self._value = self._meta

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle no view that waits for the next forward."""
        is_used = self._table.get(self._leaf) is self._live
        return vars(self) if is_used else {**vars(self), "_live": self._meta, "_value": self._meta}


def _refuse_gradient(name: str, gradient: Tensor) -> None:
    raise RuntimeError(
        f"{name} is offloaded, and its gradient of shape {list(gradient.shape)} would be lost: offloaded "
        "weights cannot be trained. Give its module a device in the device_map, or call "
        "requires_grad_(False) on the parameters that are not trained"
    )


@functools.singledispatch
def slot_of(tensor: Tensor, module: nn.Module, name: str) -> OffloadedTensor:
    """Create the slot of a tensor.

    A package with its own parameter class registers a slot for it.
    """
    return OffloadedTensor(module, name, tensor)


class AlignDevicesHook(ModelHook):
    """Run a module on one device: move its inputs there; keep its weights there or load them per forward.

    Args:
        execution_device: The device of weights and inputs during the forward.
        offload: Offload the weights between forwards; the module then holds meta tensors.
        io_same_device: Return the output on the device of the input.
        weights_map: The offloaded weights, by their name in the module; by default they are kept on the
            CPU.
        offload_buffers: Also offload buffers; else they stay on `execution_device`.
        place_submodules: Also place the weights of submodules.
        skip_keys: Keyword arguments, and keys of mappings, that are not moved.
        tied_params_map: Address of a tensor to its copies by device: a tied weight is copied once.
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
        self.param_original_devices: dict[str, torch.device] = {}  # empty, as in Accelerate
        self.buffer_original_devices: dict[str, torch.device] = {}
        self.slots: list[OffloadedTensor] = []
        self.block: OffloadedBlock | None = None
        self.streamed: StreamedBlocks | None = None

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def _maybe_get_fp16_statistics(self, name: str, value: Tensor) -> Tensor | None:
        """Return the scales of an 8-bit bitsandbytes weight, which are offloaded with it."""
        scales = name.replace("weight", "SCB")
        if "weight" not in name or value.dtype != torch.int8 or scales not in (self.weights_map or ()):
            return None
        return self.weights_map[scales]  # pyright: ignore[reportOptionalSubscript] - it has the scales

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the weights to the execution device, or replace them by meta tensors if they are offloaded."""
        options: dict[str, Any] = {"recurse": self.place_submodules, "remove_duplicate": False}
        buffers = dict(module.named_buffers(**options))
        tensors: dict[str, Tensor] = {
            name: tensor
            for name, tensor in (*module.named_parameters(**options), *buffers.items())
            if self.only is None or name in self.only
        }
        if not self.offload:
            for name in tensors:
                self._move(module, name)
            return module
        stay = get_non_persistent_buffers(module, self.place_submodules, fqns=True)
        stay = stay if self.offload_buffers else buffers.keys() | stay
        weights: dict[str, Tensor] = {}
        self.original_devices, self.slots = {}, []
        for name, tensor in tensors.items():
            if name not in stay:
                self.original_devices[name] = tensor.device
                if self.weights_map is None:
                    weights[name] = tensor.data.to("cpu")
                self.slots.append(slot_of(tensor, module, name))
        self.weights_map = weights if self.weights_map is None else self.weights_map
        for slot in self.slots:
            slot.leave()
        for name in stay & tensors.keys():
            if not tensors[name].is_meta:
                self._move(module, name)
        return module

    @run_uncompiled
    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the inputs, and acquire the weights.

        Raises:
            NotImplementedError: An input is on the meta device.
        """
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.execution_device is not None:
            try:
                args = send_to_device(args, self.execution_device, reuse_containers=True)
                kwargs = send_to_device(
                    kwargs, self.execution_device, skip_keys=self.skip_keys, reuse_containers=True
                )
            except NotImplementedError as error:
                raise NotImplementedError(
                    f"an input of {type(module).__name__} does not move to {self.execution_device}: {error} "
                    "If it was made on the device of the model's first parameter, which is the meta device "
                    "while that parameter is offloaded, give that one's module a device in the device_map."
                ) from error
        if self.streamed is not None:
            self.streamed.begin_pass()
        block = self._used_block()
        if block is not None:
            block.acquire()
        elif self.offload:
            with torch.inference_mode(mode=False):
                self._load()
        return args, kwargs

    @run_uncompiled
    def post_forward(self, module: nn.Module, output: Any) -> Any:  # noqa: ARG002 - the seam's signature
        """Release the weights, and move the output to the device of the input."""
        self._release()
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(
                output, self.input_device, skip_keys=self.skip_keys, reuse_containers=True
            )
        return output

    @run_uncompiled
    def forward_failed(self, module: nn.Module) -> None:  # noqa: ARG002 - the seam's signature
        """Release the weights."""
        self._release()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Move offloaded weights back to their original device; those without one stay on the host."""
        if self.block is not None:
            self.block.discard(self)
            self.block = None
        if self.offload and self.weights_map is not None:
            for slot in self.slots:
                device = self.original_devices[slot.name]
                value = self.weights_map[slot.name]
                slot.enter(value if device.type == "meta" else value.to(device), keep=True)
        return module

    def _move(self, module: nn.Module, name: str) -> None:
        device = self.execution_device
        if device is not None:
            set_module_tensor_to_device(module, name, device, tied_params_map=self.tied_params_map)

    def _used_block(self) -> OffloadedBlock | None:
        """Return the block that provides the weights; `None` if they are requested on another device."""
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
        if self.streamed is not None:
            self.streamed.end_pass()

    def _load(self) -> None:
        device = torch.device("cpu" if self.execution_device is None else self.execution_device)
        weights, tied = {} if self.weights_map is None else self.weights_map, self.tied_params_map
        try:
            for slot in self.slots:
                value = weights[slot.name]
                if value.device != device:
                    shared = tied.get(value.data_ptr(), {}).get(device) if tied else None
                    value = value.to(device) if shared is None else shared
                slot.enter(value)
        except BaseException:
            for slot in self.slots:
                slot.leave()
            raise


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
    """Move a module's weights to a device within the block.

    Args:
        module: The module; offloaded submodules are not changed.
        execution_device: The target device; by default the device of its hook. Without both, do nothing.

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
            try:
                yield
            finally:
                hook.post_forward(module, None)
        finally:
            hook.execution_device = before
        return
    held = dict(named_module_tensors(module, recurse=False)) if execution_device is not None else {}
    tables: list[dict[str, Any]] = [module._parameters, module._buffers]
    try:
        for name, tensor in held.items():
            moved = tensor.detach().to(execution_device)
            parameter = name in tables[0]
            tables[not parameter][name] = as_parameter(moved, tensor) if parameter else moved
        yield
    finally:
        for name, tensor in held.items():
            table = tables[name not in tables[0]]
            if not table[name].is_meta and table[name].data_ptr() != tensor.data_ptr():
                tensor.data.copy_(table[name])  # on another device, or assigned within the block
            table[name] = tensor


def align_hook_of(module: nn.Module) -> AlignDevicesHook | None:
    """Return the hook that offloads a module's weights, including one in a chain of hooks."""
    return next((hook for hook in align_hooks_of(module) if hook.offload), None)


def align_hooks_of(module: nn.Module) -> list[AlignDevicesHook]:
    """Return all placement hooks of a module, including those in nested chains."""
    pending: list[ModelHook | None] = [hook_of(module)]
    hooks: list[AlignDevicesHook] = []
    while pending:
        hook = pending.pop(0)
        if isinstance(hook, SequentialHook):
            pending[:0] = hook.hooks
        elif isinstance(hook, AlignDevicesHook):
            hooks.append(hook)
    return hooks


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
    """Attach an `AlignDevicesHook` to `module` and every submodule that has direct tensors.

    Args:
        module: The root module.
        execution_device: The device on which the modules run.
        offload: Whether their weights are offloaded between forwards.
        weights_map: The offloaded weights, by their name in the model.
        offload_buffers: Whether buffers are offloaded too.
        module_name: The name of `module` in `weights_map`.
        skip_keys: Keyword arguments that are not moved.
        preload_module_classes: Classes whose modules load all of their submodules at once, because their
            forward uses the weights of submodules without calling them.
        tied_params_map: Address of a tensor to its copies by device.
    """
    prefix = f"{module_name}." if module_name else ""
    is_loaded_together = offload and type(module).__name__ in (preload_module_classes or ())
    options: dict[str, Any] = {
        "offload_buffers": offload_buffers,
        "skip_keys": skip_keys,
        "tied_params_map": tied_params_map,
    }
    if is_loaded_together or next(named_module_tensors(module), None) is not None:
        weights = PrefixedDataset(weights_map, prefix) if offload and weights_map is not None else None
        hook = AlignDevicesHook(
            execution_device, offload, weights_map=weights, place_submodules=is_loaded_together, **options
        )
        add_hook_to_module(module, hook, append=True)
    for leaf, child in () if is_loaded_together else module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            module_name=prefix + leaf,
            preload_module_classes=preload_module_classes,
            **options,
        )


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: torch.device | int | str,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Make `module` and every submodule with a state run on one device, without moving weights.

    No hook is attached to submodules of classes in `preload_module_classes`; the other arguments are as in
    `attach_align_device_hook`.
    """
    if hook_of(module) is None and next(named_module_tensors(module, recurse=True), None) is not None:
        hook = AlignDevicesHook(
            execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map, only=()
        )
        add_hook_to_module(module, hook)
    for child in () if type(module).__name__ in (preload_module_classes or ()) else module.children():
        attach_execution_device_hook(
            child, execution_device, skip_keys, preload_module_classes, tied_params_map
        )


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
    """Attach an `AlignDevicesHook` to each block of a device map.

    `execution_device` and `offload` may be mappings from names of blocks (or individual tensors); the other
    arguments are as in `attach_align_device_hook`.
    """
    devices, offloads = execution_device, offload
    if not isinstance(devices, Mapping):
        names = offloads if isinstance(offloads, Mapping) else (module_name,)
        devices = dict.fromkeys(names, devices)
    if not isinstance(offloads, Mapping):
        offloads = dict.fromkeys(devices, offloads)
    options: dict[str, Any] = {
        "offload_buffers": offload_buffers,
        "skip_keys": skip_keys,
        "tied_params_map": tied_params_map,
    }
    main = devices.get("")
    if offloads.get(module_name, True) or module_name not in devices:
        hook = AlignDevicesHook(main, io_same_device=True, only=(), **options)
        add_hook_to_module(module, hook, append=True)
    for name, part in module.named_modules(prefix=module_name, remove_duplicate=False):
        if name in devices and name in offloads:
            device, is_offloaded = devices[name], offloads[name]
            if is_offloaded:
                attach_align_device_hook(
                    part,
                    device,
                    is_offloaded,
                    weights_map,
                    module_name=name,
                    preload_module_classes=preload_module_classes,
                    **options,
                )
            if not is_offloaded or hook_of(part) is None:
                hook = AlignDevicesHook(
                    device,
                    io_same_device=part is module,
                    place_submodules=not is_offloaded,
                    only=() if is_offloaded else None,
                    **options,
                )
                add_hook_to_module(part, hook, append=True)
            if device is not None and (main is None or torch.device(device) != torch.device(main)):
                # The program may call its submodules on their own.
                attach_execution_device_hook(part, device, skip_keys, preload_module_classes, tied_params_map)
        prefix = f"{name}." if name else ""
        targets = {
            leaf: (devices.get(prefix + leaf), offloads[prefix + leaf])
            for leaf, _ in named_module_tensors(part)
            if prefix + leaf in offloads
        }
        for device, is_offloaded in dict.fromkeys(targets.values()):
            only = {leaf for leaf, target in targets.items() if target == (device, is_offloaded)}
            weights = (
                PrefixedDataset(weights_map, prefix) if is_offloaded and weights_map is not None else None
            )
            hook = AlignDevicesHook(device, is_offloaded, weights_map=weights, only=only, **options)
            add_hook_to_module(part, hook, append=True)


class CpuOffload(ModelHook):
    """Move a model from the CPU to a device when its forward is called; it then stays there.

    Args:
        execution_device: The execution device; by default the accelerator, if there is one.
        prev_module_hook: The hook of the previous model, which is moved back to the CPU first.
    """

    def __init__(
        self,
        execution_device: str | int | torch.device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = default_device() if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        previous = self.prev_module_hook
        if previous is not None and previous.model is not module:
            held = (*previous.model.parameters(), *previous.model.buffers())
            frees_memory = any(tensor.device.type != "cpu" for tensor in held)
            previous.offload()
            if frees_memory and torch.accelerator.is_available():
                torch.accelerator.empty_cache()
        module.to(self.execution_device)
        return send_to_device((args, kwargs), self.execution_device, reuse_containers=True)


class UserCpuOffloadHook:
    """The handle of `cpu_offload_with_hook`: moves a model back to the CPU, or removes its hook."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model back to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook from the model."""
        remove_hook_from_module(self.model)


def default_device() -> torch.device:
    """Return the default device: the accelerator, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
"""The layers whose weights are stored in one dtype and cast to another for their forward."""


_lock = threading.Lock()
"""One lock for all hooks: a hook with a lock could not be deep-copied with its model."""


class LayerwiseCastingHook(ModelHook):
    """Cast a module's weights to the compute dtype for its forward, and back. Several threads may run it."""

    _is_stateful = False

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking
        self._users = 0

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with _lock:
            if not self._users:
                module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
            self._users += 1
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.forward_failed(module)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        with _lock:
            self._users -= 1
            if not self._users:
                module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | list[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | type[nn.Module] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers in a small dtype, and cast them per forward.

    Args:
        module: The model.
        storage_dtype: The dtype between forwards, such as `torch.float8_e4m3fn`.
        compute_dtype: The dtype during a forward.
        skip_modules_pattern: Regular expressions; modules whose dotted name matches are skipped, with
            their submodules.
        skip_modules_classes: Classes that are skipped, with their submodules.
        non_blocking: Cast weights in pinned memory asynchronously.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        >>> attach_layerwise_casting_hooks(model, torch.float16, torch.float32, ["norm"])
        >>> model[0].weight.dtype, model[1].weight.dtype, model(torch.ones(1, 2)).dtype
        (torch.float16, torch.float32, torch.float32)
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    for layer in _castable(module, "", patterns, skip_modules_classes or ()):
        hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
        add_hook_to_module(layer, hook, append=True)


def _castable(
    module: nn.Module,
    name: str,
    patterns: Iterable[str],
    skipped: type[nn.Module] | tuple[type[nn.Module], ...],
) -> list[nn.Module]:
    if isinstance(module, skipped) or any(re.search(pattern, name) for pattern in patterns):
        return []
    if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        return [module]
    return [
        layer
        for leaf, child in module.named_children()
        for layer in _castable(child, f"{name}.{leaf}" if name else leaf, patterns, skipped)
    ]
