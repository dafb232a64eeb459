"""The plugin arguments of `Accelerator`, with the launcher's and an earlier `Accelerator`'s as defaults."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accel_plugins.plugin_specs import ENGINES
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Generator

# What `AcceleratorState` calls otherwise.
_STATE_NAMES = {"deepspeed_plugin": "deepspeed_plugins"}


def sort_plugins(**plugins: Any) -> dict[str, Any]:
    """Return the plugin arguments of `Accelerator` by name; the two of DeepSpeed as one.

    Raises:
        SettingsError: Both arguments of DeepSpeed were passed.

    Example:
        >>> sort_plugins(fsdp_plugin=None, deepspeed_plugin=None, deepspeed_plugins={"zero3": 3})
        {'fsdp_plugin': None, 'deepspeed_plugin': {'zero3': 3}}
    """
    several = plugins.pop("deepspeed_plugins")
    if several is not None:
        if plugins["deepspeed_plugin"] is not None:
            raise SettingsError(
                f"Accelerator(deepspeed_plugin={plugins['deepspeed_plugin']!r}, "
                f"deepspeed_plugins={several!r}): "
                "give one of the two."
            )
        plugins["deepspeed_plugin"] = several
    return plugins


def known_plugins() -> dict[str, Any]:
    """Return the plugins of an earlier `Accelerator` of this process, by argument."""
    known = AcceleratorState._shared_state  # pyright: ignore[reportPrivateUsage] - asks without making one
    return {
        engine.argument: known.get(_STATE_NAMES.get(engine.argument, engine.argument)) for engine in ENGINES
    }


@contextmanager
def unchanged_by_failure() -> Generator[None]:
    """Restore the shared state if the block raises."""
    shared = AcceleratorState._shared_state  # pyright: ignore[reportPrivateUsage] - as above
    before = dict(shared)
    try:
        yield
    except BaseException:
        shared.clear()
        shared.update(before)
        raise


def configured_accumulation(plugin: Any) -> int | None:
    """Return the micro-batches of a step in a DeepSpeed configuration; `None` if it has none.

    Args:
        plugin: A `DeepSpeedPlugin`, several by name, of which the first is used first, or `None`.
    """
    first = next(iter(plugin.values())) if isinstance(plugin, dict) else plugin
    return None if first is None else first.gradient_accumulation_steps
