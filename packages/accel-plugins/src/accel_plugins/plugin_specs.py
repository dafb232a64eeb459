"""The plugins that `Accelerator` takes, and how arguments, state and settings become one set of them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, cast

from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_state.settings.model import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A plugin that `Accelerator` takes.

    Its class has a method `to_settings(settings)`, which returns settings that say as much of what the plugin
    says as `accel_plugins.registry.choose` needs, and refuses what contradicts them.

    Args:
        section: The field of `Settings` that, if it is not `None`, stands for a plugin made without
            arguments.
        several: Whether the argument may also be a dictionary of plugins by name.
    """

    argument: str
    section: str | None
    plugin: str
    several: bool = False

    def plugin_type(self) -> type[Any]:
        """Import the class."""
        return cast("type[Any]", EntryPoint(self.argument, self.plugin, "accel.plugins").load())


ENGINES: tuple[Engine, ...] = (
    Engine(
        argument="deepspeed_plugin",
        section="deepspeed",
        plugin="accel_plugins.deepspeed.plugin:DeepSpeedPlugin",
        several=True,
    ),
    Engine(
        argument="fsdp_plugin",
        section="fsdp",
        plugin="accel_plugins.fsdp.plugin:FullyShardedDataParallelPlugin",
    ),
    Engine(
        argument="torch_tp_plugin",
        section=None,
        plugin="accel_plugins.parallelism.handlers:TorchTensorParallelPlugin",
    ),
    Engine(
        argument="parallelism_config",
        section="parallelism",
        plugin="accel_plugins.parallelism.config:ParallelismConfig",
    ),
    Engine(
        argument="megatron_lm_plugin",
        section="megatron",
        plugin="accel_plugins.megatron.plugin:MegatronLMPlugin",
    ),
)
"""Every plugin that there is. In this order each changes the settings from which the strategy is chosen."""


def find_plugins(
    requested: Mapping[str, Any],
    known: Mapping[str, Any],
    settings: Settings,
    needed: Mapping[str, Mapping[str, Any] | None] | None = None,
) -> dict[str, Any]:
    """Resolve the plugins of a run: an argument wins over an earlier `Accelerator`, and that over settings.

    Args:
        requested: Values by argument of `Accelerator`; `None` if absent.
        known: The same, of an earlier one.
        settings: The settings of the run.
        needed: Sections that need a plugin even if the settings have none, each with the plugin's arguments;
            `None` for sections that do not.

    Returns:
        Plugins by argument, or by argument and name if there may be `several`; in the order of `ENGINES`.
    """
    found: dict[str, Any] = {}
    for engine in ENGINES:
        value = requested.get(engine.argument)
        if value is None:
            value = known.get(engine.argument)
        if value is None and engine.section is not None:
            arguments = (needed or {}).get(engine.section)
            if getattr(settings, engine.section) is not None:
                value = engine.plugin_type()()
            elif arguments is not None:
                value = engine.plugin_type()(**arguments)
        if value is not None:
            found[engine.argument] = _checked(engine, value)
    return found


def described(settings: Settings, plugins: Mapping[str, Any]) -> Settings:
    """Settings that say what plugins say, for the choice of a strategy."""
    for value in plugins.values():
        first = next(iter(cast("Mapping[str, Any]", value).values())) if isinstance(value, dict) else value
        settings = first.to_settings(settings)
    return settings


def as_handlers(plugins: Mapping[str, Any]) -> dict[type, Any]:
    """Plugins as `build` of a strategy finds them: by type; several as the dictionary that they are."""
    return {
        engine.plugin_type(): plugins[engine.argument] for engine in ENGINES if engine.argument in plugins
    }


def _checked(engine: Engine, value: Any) -> Any:
    kind = engine.plugin_type()
    several = cast("Mapping[str, Any]", value) if engine.several and isinstance(value, dict) else None
    each = [value] if several is None else [*several.values()]
    if not each or any(not isinstance(one, kind) for one in each):
        more = f", or a dictionary of several by name, {kind.__name__}s" if engine.several else ""
        raise SettingsError(f"Accelerator({engine.argument}={value!r}): expected a {kind.__name__}{more}.")
    return value
