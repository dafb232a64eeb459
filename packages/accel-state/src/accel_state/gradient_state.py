"""`GradientState`: the position of the training loop in its accumulation window and its loader."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class AccumulationPlugin(Protocol):
    """The interface of `GradientAccumulationPlugin` that `GradientState` uses."""

    num_steps: int | None
    adjust_scheduler: bool
    sync_with_dataloader: bool

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults."""
        ...


class Loader(Protocol):
    """The interface of a loader about its last batch."""

    @property
    def end_of_dataloader(self) -> bool:
        """Whether it was the last batch."""
        ...

    @property
    def remainder(self) -> int:
        """Number of its real samples, over all ranks; -1 while unknown."""
        ...


class GradientState:
    """Whether gradients are synchronised in this step, and the active loader. All instances share state.

    What is read in every step is a plain attribute.

    Args:
        gradient_accumulation_plugin: How gradients accumulate; `None` leaves it as it is.

    Attributes:
        sync_gradients (bool): Whether this step ends with synchronised gradients and an optimizer step.
        num_steps (int): Micro-batches per optimizer step.
        adjust_scheduler (bool): What the plugin was given; has no effect.
        sync_with_dataloader (bool): Whether the end of a loader ends the accumulation too.
        plugin_kwargs (dict): What the plugin was given.
        is_xla_gradients_synced (bool): Whether gradients were reduced by hand on XLA devices.

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
    _loaders: list[weakref.ref[Any]]

    def __init__(self, gradient_accumulation_plugin: AccumulationPlugin | None = None) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.__dict__.update(
                sync_gradients=True,
                num_steps=1,
                adjust_scheduler=False,
                sync_with_dataloader=True,
                is_xla_gradients_synced=False,
                plugin_kwargs={},
                _loaders=[],
            )
        if gradient_accumulation_plugin is not None:
            self._use(gradient_accumulation_plugin)

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
        return type(self), ()  # a copy is that of its process

    @classmethod
    def _reset_state(cls) -> None:
        """Reset the shared state, for tests."""
        cls._shared_state.clear()

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

    def _add_dataloader(self, dataloader: Loader) -> None:
        """Make a loader the active one; only weak references to loaders are kept."""
        self._loaders.append(weakref.ref(dataloader, self._remove))

    def _remove_dataloader(self, dataloader: Loader) -> None:
        """Remove a loader, active or not; do nothing if it is not there."""
        loaders = self.__dict__.get("_loaders", [])  # none after a reset
        for index in range(len(loaders) - 1, -1, -1):
            if loaders[index]() is dataloader:
                del loaders[index]
                return

    def _remove(self, reference: weakref.ref[Any]) -> None:
        loaders = self.__dict__.get("_loaders", [])
        loaders[:] = [other for other in loaders if other is not reference]

    def _use(self, plugin: AccumulationPlugin) -> None:
        self.plugin_kwargs = plugin.to_kwargs()
        self.num_steps = 1 if plugin.num_steps is None else plugin.num_steps
        self.adjust_scheduler = plugin.adjust_scheduler
        self.sync_with_dataloader = plugin.sync_with_dataloader
