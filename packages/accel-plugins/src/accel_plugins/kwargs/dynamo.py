"""Options of `torch.compile`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from accel_plugins.kwargs.base import KwargsHandler, expect, expect_flags, resolve_fields
from accel_state.did_you_mean import did_you_mean
from accel_state.errors import SettingsError
from accel_state.labels import DynamoBackend

_DEFAULTS = {
    "backend": DynamoBackend.NO.value.lower(),
    "mode": "default",
    "fullgraph": False,
    "dynamic": None,
    "options": None,
    "disable": False,
}


# PyTorch 2.1 has renamed the backends of torch_xla; scripts and files have the names of before.
_OF_XLA = {"torchxla_trace_once": "openxla_eval", "aot_torchxla_trace_once": "openxla"}


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of `torch.compile`. An argument wins over `ACCELERATE_DYNAMO_*`, and that over the default.

    Args:
        backend: The compiler, a `DynamoBackend` or its name; `NO` does not compile.
        mode: `"default"`, `"reduce-overhead"`, `"max-autotune"` or another mode of `torch.compile`.
        fullgraph: Whether a model must compile into a single graph.
        dynamic: Whether shapes are dynamic; torch decides if `None`.
        options: Options of the backend; not together with `mode`.
        disable: Whether `torch.compile` does nothing, for tests.
        use_regional_compilation: Whether a model's repeated blocks are compiled instead of the full model.

    Raises:
        SettingsError: The value of a field, or of its variable, is invalid.

    Example:
        >>> TorchDynamoPlugin(backend="inductor", mode="max-autotune").to_kwargs()
        {'backend': 'inductor', 'mode': 'max-autotune'}
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        names = {"fullgraph": "use_fullgraph", "dynamic": "use_dynamic"}
        resolve_fields(self, "dynamo", {**_DEFAULTS, "use_regional_compilation": False}, names)
        self.backend = _backend(cast("Any", self.backend))
        expect(self, "mode", "a text", lambda value: isinstance(value, str))
        expect_flags(self, "dynamic")

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, with the backend as `torch.compile` spells it."""
        name = cast("DynamoBackend", self.backend).value.lower()
        return super().to_dict() | {"backend": _OF_XLA.get(name, name)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that differ from its defaults, whatever their source."""
        fields = self.to_dict()
        return {name: fields[name] for name, default in _DEFAULTS.items() if fields[name] != default}


def _backend(value: DynamoBackend | str) -> DynamoBackend:
    name = value.value if isinstance(value, DynamoBackend) else str(value).upper()
    name = next((old.upper() for old, new in _OF_XLA.items() if new.upper() == name), name)
    if name in DynamoBackend:
        return DynamoBackend(name)
    backends = [backend.lower() for backend in DynamoBackend.list()]
    hint = did_you_mean(name.lower(), backends, f"there are {backends}.")
    raise SettingsError(f"TorchDynamoPlugin(backend={value!r}): no such compiler; {hint}")
