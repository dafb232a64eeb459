"""`AcceleratorState` and `GradientState`: the state shared by all `Accelerator`s of a process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast, get_args

from accel_state import environ
from accel_state.devices import is_bf16_available
from accel_state.errors import SettingsError
from accel_state.labels import distributed_type_of
from accel_state.partial_state import PartialState, SharedState
from accel_state.settings.model import BASE_PRECISIONS, Precision, from_environ
from accel_state.settings.option import one_of

if TYPE_CHECKING:
    import torch


# The distributed type of a run with each of these plugins; the first plugin passed counts.
_ENGINE_LABELS = {"deepspeed_plugins": "deepspeed", "megatron_lm_plugin": "megatron", "fsdp_plugin": "fsdp"}


_is_bf16_available = is_bf16_available  # stays the original if a program patches the function


class AcceleratorState(SharedState):
    """State that all `Accelerator`s share: topology, device, precision and plugins.

    It has all attributes of `PartialState`.

    Args:
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`; `None` for the environment's.
        cpu: Compute on the CPU even if there is an accelerator.
        dynamo_plugin: The options of `torch.compile`.
        deepspeed_plugin: The DeepSpeed plugin, or plugins by name, of which the first is active. As for the
            arguments below, `None` keeps the earlier value.
        fsdp_plugin: The FSDP plugin.
        torch_tp_plugin: The tensor-parallel plugin.
        megatron_lm_plugin: The Megatron-LM plugin.
        parallelism_config: The sizes of the axes of parallelism.
        _from_accelerator: Whether an `Accelerator` is the caller; it may choose another precision.
        **kwargs: As in `PartialState`.

    Raises:
        SettingsError: The precision is unknown or not supported by the device, or another
            precision or plugin is in use.

    Example:
        >>> AcceleratorState(mixed_precision="bf16", cpu=True).mixed_precision
        'bf16'
        >>> AcceleratorState._reset_state()
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _known_attrs: ClassVar[list[str]] = [
        *PartialState._known_attrs,
        *("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "dynamo_plugin"),
    ]

    deepspeed_plugins: Mapping[str, Any] | None
    fsdp_plugin: Any
    torch_tp_plugin: Any
    megatron_lm_plugin: Any
    parallelism_config: Any
    device_mesh: Any
    strategy: Any
    _mixed_precision: str
    _active_deepspeed: str

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        plugins_by_field = {
            "deepspeed_plugins": _by_name(deepspeed_plugin),
            "fsdp_plugin": fsdp_plugin,
            "torch_tp_plugin": torch_tp_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
            "parallelism_config": parallelism_config,
        }
        plugins = {name: value for name, value in plugins_by_field.items() if value is not None}
        partial = PartialState(cpu, **kwargs)
        known = self.__dict__.get("_mixed_precision")
        if known is not None and mixed_precision is None and dynamo_plugin is None and not plugins:
            return
        wanted = known if known and mixed_precision is None else _precision(mixed_precision, partial)
        if known is not None and not _from_accelerator:
            self._check_initialized(wanted)
            for name, value in plugins.items():
                if self.__dict__.get(name) != value:
                    raise SettingsError(
                        f"AcceleratorState({name}={value!r}): this process has {self.__dict__.get(name)!r} "
                        "already. Pass it to `Accelerator`, which can change it."
                    )
            return
        active = self.__dict__.get("deepspeed_plugins")
        previous = {name: self.__dict__.get(name) for name in plugins_by_field} | plugins
        self.__dict__.update(partial.__dict__)
        self.__dict__.update(
            _mixed_precision=wanted, dynamo_plugin=dynamo_plugin, device_mesh=None, **previous
        )
        if previous["deepspeed_plugins"] is not active:
            self.select_deepspeed_plugin()
        engines = (previous["deepspeed_plugins"] or {}).values() if wanted in BASE_PRECISIONS else ()
        for plugin in engines:
            plugin.set_mixed_precision(wanted)
        engine = next((label for name, label in _ENGINE_LABELS.items() if previous[name] is not None), None)
        if engine is not None:
            self.distributed_type = distributed_type_of(engine, self.distributed_type, self.num_processes)

    def __repr__(self) -> str:
        if not self._shared_state:
            return "AcceleratorState(reset)"
        return f"{PartialState()!r}\nMixed precision type: {self.mixed_precision}\n"

    def _check_initialized(self, mixed_precision: str | None = None, cpu: bool | None = None) -> None:
        """Check that a precision and device match those in use.

        Raises:
            SettingsError: The state is initialised with another precision or device.
        """
        known = self.__dict__.get("_mixed_precision")
        if known is None:
            return
        if mixed_precision not in (None, known):
            raise SettingsError(
                f"mixed_precision={mixed_precision!r} was requested, but this process already uses "
                f"{known!r}. Pass it to `Accelerator(mixed_precision=...)`, which can change it."
            )
        if cpu:
            PartialState(cpu)

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """Reset the shared state, for tests and sweeps."""
        cls._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def _process(self) -> PartialState:
        return PartialState()

    @property
    def mixed_precision(self) -> str:
        """`"no"`, `"fp16"`, `"bf16"` or `"fp8"`."""
        plugin, named = self.deepspeed_plugin, self._mixed_precision
        return named if plugin is None or named not in BASE_PRECISIONS else plugin.mixed_precision

    @property
    def fork_launched(self) -> bool:
        """Whether `notebook_launcher` forked this process."""
        return self.runtime.fork_launched

    @property
    def deepspeed_plugin(self) -> Any:
        """The active DeepSpeed plugin, `None` where DeepSpeed is not used."""
        plugins = self.deepspeed_plugins
        return None if plugins is None else plugins[self._active_deepspeed]

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by FSDP2."""
        plugin = self.fsdp_plugin
        return self.__dict__.get("_fsdp_version", plugin and plugin.fsdp_version) == 2

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return the DeepSpeed plugin with the given name.

        Raises:
            SettingsError: The plugin does not exist.
        """
        plugins: Mapping[str, Any] = self.deepspeed_plugins or {}
        if name not in plugins:
            names = ", ".join(map(repr, plugins)) or "none"
            raise SettingsError(f"There is no DeepSpeed plugin {name!r}. This run has: {names}.")
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Select the active DeepSpeed plugin by name.

        Args:
            name: The key of the plugin; the first if `None`.

        Raises:
            SettingsError: The plugin does not exist.
        """
        plugins: Mapping[str, Any] = self.deepspeed_plugins or {}
        if name is None:
            name = next(iter(plugins), "")
        selected = self.get_deepspeed_plugin(name)
        for other, plugin in plugins.items():
            if other != name:
                plugin._unselect()
        self._shared_state["_active_deepspeed"] = name
        selected.select(_from_accelerator_state=True)

    def destroy_process_group(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        """Destroy a process group; see `PartialState.destroy_process_group`."""
        PartialState().destroy_process_group(group)


class ThreadLocalSharedDict(threading.local):
    """A descriptor for a dict that all instances share, optionally one dict per thread.

    Args:
        thread_local: Whether every thread has a separate dict.

    Example:
        >>> class State:
        ...     shared = ThreadLocalSharedDict()
        >>> State().shared["a"] = 1
        >>> State().shared
        {'a': 1}
    """

    __slots__ = ("_everywhere",)  # unlike attributes in its dict, these are shared between threads

    def __init__(self, thread_local: bool = False) -> None:
        if thread_local:
            self._local: dict[str, Any] = {}
        elif not hasattr(self, "_everywhere"):  # `__init__` runs again in each thread
            self._everywhere: dict[str, Any] = {}

    def __get__(self, instance: object, owner: type | None = None) -> dict[str, Any]:
        return self._local if "_local" in self.__dict__ else self._everywhere

    def __set__(self, instance: object, value: dict[str, Any]) -> None:
        if "_local" in self.__dict__:
            self._local = value
        else:
            self._everywhere = value


def is_initialized() -> bool:
    """Whether an `AcceleratorState` has been created, as every `Accelerator` does."""
    return AcceleratorState.__new__(AcceleratorState).initialized


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Accept anything and return `None`."""
    del args, kwargs


def _precision(asked: str | None, state: PartialState) -> str:
    if asked is None:
        wanted = from_environ(environ.read()).precision.mixed_precision
    else:
        try:
            wanted = one_of(*get_args(Precision))(str(asked))
        except ValueError as error:
            raise SettingsError(f"mixed_precision={asked!r}: {error}.") from None
    # A function patched in by a program has Accelerate's signature.
    own: dict[str, Any] = {"device": state.device} if is_bf16_available is _is_bf16_available else {}
    if wanted == "bf16" and not is_bf16_available(**own):
        raise SettingsError(
            f"mixed_precision='bf16' was requested, but {state.device} does not support bfloat16. Use "
            "'fp16' or 'no'."
        )
    return wanted


def _by_name(plugin: Any) -> Mapping[str, Any] | None:
    """Return DeepSpeed plugins by name; a single plugin is named `default`."""
    if plugin is None or isinstance(plugin, dict):
        return cast("Mapping[str, Any] | None", plugin) or None
    return {"default": plugin}


@dataclass(slots=True)
class AccumulationWindow:
    """The micro-batches since an optimizer step.

    Attributes:
        step: Their number; 0 where the last one was to end with an optimizer step.
        has_gradients: Whether earlier micro-batches ran backward passes, and no optimizer has stepped since.
        ran_backward: Whether the present micro-batch has run a backward pass.
    """

    step: int = 0
    has_gradients: bool = False
    ran_backward: bool = False


class GradientState:
    """Whether gradients are synchronised in this step, and the active loader. All instances share state.

    Values that are read in every step are plain attributes. Those of accumulation are the values of the
    `Accelerator` that was used last.

    Args:
        gradient_accumulation_plugin: A `GradientAccumulationPlugin`, how gradients accumulate; `None` leaves
            it as it is.

    Attributes:
        sync_gradients (bool): Whether this step ends with synchronised gradients and an optimizer step.
        num_steps (int): Micro-batches per optimizer step.
        adjust_scheduler (bool): The value passed to the plugin; has no effect.
        sync_with_dataloader (bool): Whether the end of a loader ends the accumulation too.
        plugin_kwargs (dict): The arguments of the plugin.
        window (AccumulationWindow): The micro-batches since the last optimizer step.
        accumulation (dict): Identifies the `Accelerator` that was used last.
        is_xla_gradients_synced (bool): Whether gradients were reduced manually on XLA devices.

    Example:
        >>> state = GradientState()
        >>> state.sync_gradients, state.in_dataloader, state.remainder
        (True, False, -1)
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    sync_gradients: bool = True
    num_steps: int = 1
    adjust_scheduler: bool = False
    sync_with_dataloader: bool = True
    is_xla_gradients_synced: bool = False
    plugin_kwargs: Mapping[str, Any] = {}
    window: AccumulationWindow
    accumulation: dict[str, Any]
    _loaders: list[weakref.ref[Any]]

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.__dict__.update(is_xla_gradients_synced=False, _loaders=[], accumulation={})
            self.activate(_accumulation())
        plugin = gradient_accumulation_plugin
        if plugin is not None:
            self.activate(
                _accumulation(
                    num_steps=1 if plugin.num_steps is None else plugin.num_steps,
                    adjust_scheduler=plugin.adjust_scheduler,
                    sync_with_dataloader=plugin.sync_with_dataloader,
                    plugin_kwargs=plugin.to_kwargs(),
                )
            )

    def __repr__(self) -> str:
        if not self._shared_state:
            return "GradientState(reset)"
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    def __reduce__(self) -> tuple[type[GradientState], tuple[()]]:
        return type(self), ()  # unpickling returns the state of the receiving process

    @classmethod
    def _reset_state(cls) -> None:
        """Reset the shared state, for tests."""
        cls._shared_state.clear()

    def activate(self, accumulation: dict[str, Any]) -> None:
        """Show the values of another `Accelerator`; those of the last one are kept for it."""
        if accumulation is not self.accumulation:
            self.accumulation.update((name, getattr(self, name)) for name in self.accumulation)
            self.accumulation = accumulation
            self.__dict__.update(accumulation)

    @property
    def initialized(self) -> bool:
        """Whether there has been a `GradientState` since the last reset."""
        return bool(self._shared_state)

    @property
    def active_dataloader(self) -> Any | None:
        """The innermost loader that is being iterated over; `None` outside of all."""
        loaders = self._loaders
        return loaders[-1]() if loaders else None

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being iterated over, outermost first, after a `None` for "outside of all"."""
        return [None, *(reference() for reference in self._loaders)]

    @dataloader_references.setter
    def dataloader_references(self, references: Iterable[Any]) -> None:
        loaders = [loader for loader in references if loader is not None]
        self._loaders = [weakref.ref(loader, self._remove) for loader in loaders]

    @property
    def _dataloader_references_ref(self) -> list[weakref.ref[Any] | None]:
        return [None, *self._loaders]  # Accelerate's name

    @property
    def _is_xla_gradients_synced(self) -> bool:
        return self.is_xla_gradients_synced  # Accelerate's name

    @_is_xla_gradients_synced.setter
    def _is_xla_gradients_synced(self, is_synced: bool) -> None:
        self.is_xla_gradients_synced = is_synced

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being iterated over."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has yielded its last batch."""
        loaders = self._loaders
        loader = loaders[-1]() if loaders else None
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Number of real samples in the last global batch; -1 outside of loaders, and while unknown."""
        loaders = self._loaders
        loader = loaders[-1]() if loaders else None
        return -1 if loader is None else loader.remainder

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set whether this step synchronises gradients."""
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, dataloader: Any) -> None:
        """Make a loader, with `end_of_dataloader` and `remainder`, the active one, by a weak reference."""
        self._loaders.append(weakref.ref(dataloader, self._remove))

    def _remove_dataloader(self, dataloader: Any) -> None:
        """Remove a loader, active or not; do nothing if it is not there."""
        loaders = self.__dict__.get("_loaders", [])  # none after a reset
        for index in range(len(loaders) - 1, -1, -1):
            if loaders[index]() is dataloader:
                del loaders[index]
                return

    def _remove(self, reference: weakref.ref[Any]) -> None:
        loaders = self.__dict__.get("_loaders", [])
        loaders[:] = [other for other in loaders if other is not reference]


def _accumulation(**values: Any) -> dict[str, Any]:
    defaults = {"num_steps": 1, "adjust_scheduler": False, "sync_with_dataloader": True, "plugin_kwargs": {}}
    return {"sync_gradients": True, "window": AccumulationWindow(), **defaults, **values}
