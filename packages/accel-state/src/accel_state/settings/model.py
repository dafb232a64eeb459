"""`Settings` and `OPTIONS`: merge sources by precedence; convert from and to environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from enum import IntEnum
from types import TracebackType
from typing import Any, Literal, TypeAlias

from accel_state.errors import SettingsError
from accel_state.frozen import frozen
from accel_state.settings.engines import (
    DEEPSPEED,
    FP8,
    FSDP,
    MEGATRON,
    PARALLELISM,
    DeepSpeedSettings,
    Fp8Settings,
    FsdpSettings,
    HostSettings,
    MegatronSettings,
    ParallelismSettings,
)
from accel_state.settings.option import Option
from accel_state.settings.run import (
    CLUSTER,
    DYNAMO,
    ENGINE_TYPES,
    LAUNCH,
    MPI,
    PROCESS,
    REPLICAS,
    SAGEMAKER,
    TPU,
    TRAINING,
    ClusterSettings,
    DynamoSettings,
    LaunchSettings,
    MpiSettings,
    PrecisionSettings,
    ProcessSettings,
    ReplicaSettings,
    SageMakerSettings,
    TpuSettings,
    TrainingSettings,
)

Precision: TypeAlias = Literal["no", "fp16", "bf16", "fp8"]

BASE_PRECISIONS = frozenset({"no", "fp16", "bf16"})
"""The precisions of autocast."""


@frozen
class Settings:
    """Everything that can be set from outside a script, decided once and passed down in parts.

    Example:
        >>> Settings().precision.mixed_precision
        'no'
    """

    process: ProcessSettings = field(default_factory=ProcessSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    dynamo: DynamoSettings = field(default_factory=DynamoSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    fsdp: FsdpSettings | None = None
    deepspeed: DeepSpeedSettings | None = None
    megatron: MegatronSettings | None = None
    parallelism: ParallelismSettings | None = None
    fp8: Fp8Settings | None = None
    mpi: MpiSettings = field(default_factory=MpiSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    replicas: ReplicaSettings = field(default_factory=ReplicaSettings)
    hosts: HostSettings = field(default_factory=HostSettings)
    tpu: TpuSettings = field(default_factory=TpuSettings)
    sagemaker: SageMakerSettings = field(default_factory=SageMakerSettings)

    @property
    def is_sharded_on_xla(self) -> bool:
        """Whether FSDP shards over the devices of a TPU."""
        return self.launch.on_tpu and self.fsdp is not None and bool(self.fsdp.xla)


OPTIONAL_SECTIONS: Mapping[
    str, type[FsdpSettings | DeepSpeedSettings | MegatronSettings | ParallelismSettings]
] = {
    "fsdp": FsdpSettings,
    "deepspeed": DeepSpeedSettings,
    "megatron": MegatronSettings,
    "parallelism": ParallelismSettings,
}
"""The sections that a switch of the same name turns on."""

ENGINES = ("deepspeed", "megatron", "fsdp")
"""The mutually exclusive sections."""

IMPLICIT_SECTIONS: Mapping[str, type[Fp8Settings]] = {"fp8": Fp8Settings}
"""The sections that exist if any of their settings has a source."""


def value_at(settings: Settings, path: str) -> object:
    """Return the value of a path; for a section, whether it is set; None for a path in an unset section.

    Example:
        >>> value_at(Settings(fsdp=FsdpSettings(fsdp_version=2)), "fsdp.fsdp_version")
        2
        >>> value_at(Settings(), "fsdp"), value_at(Settings(), "fsdp.fsdp_version")
        (False, None)
    """
    section, _, name = path.partition(".")
    record = getattr(settings, section)
    if not name:
        return record is not None
    return None if record is None else getattr(record, name)


OPTIONS: tuple[Option, ...] = (
    *LAUNCH,
    *MPI,
    *CLUSTER,
    *REPLICAS,
    *PROCESS,
    *DEEPSPEED,
    *MEGATRON,
    *FSDP,
    *PARALLELISM,
    *TRAINING,
    *FP8,
    *DYNAMO,
    *TPU,
    *SAGEMAKER,
)
"""Every setting, in the order of the help text and of the questions."""

BY_PATH: Mapping[str, Option] = {option.path: option for option in OPTIONS}
"""The settings by their path in `Settings`."""

BY_VARIABLE: Mapping[str, Option] = {option.variable: option for option in OPTIONS if option.variable}
"""The settings that have an environment variable, by its name."""

BY_KEY: Mapping[str, Option] = {
    key: option for option in OPTIONS if option.key for key in (option.key, *option.key_aliases)
}
"""The settings of config files by their key, in every accepted spelling."""


class Layer(IntEnum):
    """The kind of source that a value comes from; the lower number wins."""

    ARGUMENT = 0
    ENVIRONMENT = 1
    FILE = 2
    DEFAULT = 3


@frozen
class SourcedValue:
    """A parsed value with its source.

    Args:
        value: The parsed value.
        layer: The kind of source.
        origin: The source as messages name it, such as `"argument --num_processes"`.
    """

    value: object
    layer: Layer
    origin: str


TITLES = {
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron-LM",
    "fsdp": "FSDP",
    "parallelism": "tensor, context, sequence, expert or pipeline parallelism",
}
"""The names of the optional sections in messages."""

DEFAULT = SourcedValue(value=None, layer=Layer.DEFAULT, origin="default")


@frozen
class Merged:
    """Merged settings with their provenance.

    Args:
        settings: The merged settings.
        sourced: Path to the winning value, for every path that has a source.
        conflicts: A sentence for each conflict between sources of equal precedence.
    """

    settings: Settings
    sourced: Mapping[str, SourcedValue]
    conflicts: tuple[str, ...] = ()

    def source_of(self, path: str) -> SourcedValue:
        """Return the source of the value at `path`; `DEFAULT` if it has none."""
        return self.sourced.get(path, DEFAULT)


class ErrorCollector:
    """A reusable context manager that collects `SettingsError`s instead of raising them.

    Attributes:
        found: A sentence for each error.
    """

    def __init__(self) -> None:
        self.found: list[str] = []

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, SettingsError):
            self.found += error.problems
        return isinstance(error, SettingsError)

    def raise_if_any(self) -> None:
        """Raise one SettingsError with all collected errors, if any.

        Raises:
            SettingsError: Errors were collected.
        """
        if self.found:
            raise SettingsError(*self.found)


def parse(option: Option, text: str, layer: Layer, origin: str) -> SourcedValue | None:
    """Parse the text of an option.

    Returns:
        The value and its origin, or None if the text stands for "not given".

    Raises:
        SettingsError: The text is invalid. The message names it and its origin.

    Example:
        >>> from accel_state.settings.model import BY_KEY
        >>> parse(BY_KEY["num_machines"], "2", Layer.FILE, "key num_machines").value
        2
    """
    if not text:
        return None
    try:
        value = option.parse(text)
    except ValueError as error:
        raise SettingsError(f"{origin} is {text!r}: {error}") from None
    if value is None:
        return None
    return SourcedValue(value=(value,) if option.kind == "list" else value, layer=layer, origin=origin)


def merge_layers(*sources: Mapping[str, SourcedValue]) -> Merged:
    """Merge sources by precedence and raise if they conflict.

    Args:
        *sources: Path to value, in any order; a lower `Layer` wins.

    Raises:
        SettingsError: Sources of equal precedence select different engines.

    Example:
        >>> asked = {"fsdp": SourcedValue(value=True, layer=Layer.ARGUMENT, origin="argument --use_fsdp")}
        >>> merge_layers(asked).settings.fsdp is None
        False
    """
    merged = merge_sources(*sources)
    if merged.conflicts:
        raise SettingsError(*merged.conflicts)
    return merged


def merge_sources(*sources: Mapping[str, SourcedValue]) -> Merged:
    """Merge sources by precedence and collect their conflicts.

    Args:
        *sources: Path to value, in any order; a lower `Layer` wins.

    Example:
        >>> low = {"launch.num_machines": SourcedValue(value=2, layer=Layer.FILE, origin="file")}
        >>> high = {"launch.num_machines": SourcedValue(value=4, layer=Layer.ARGUMENT, origin="flag")}
        >>> merge_sources(low, high).settings.launch.num_machines
        4
    """
    # 1. Keep the value of the highest precedence.
    sourced: dict[str, SourcedValue] = {}
    for source in sources:
        for path, value in source.items():
            if value.layer <= sourced.get(path, DEFAULT).layer:
                sourced[path] = value
    # 2. Switch on the engine of the source with the highest precedence; name conflicts at that precedence.
    kind = sourced.get("launch.distributed_type", DEFAULT)
    asked = {name: sourced[name] for name in ENGINES if name in sourced}
    by_kind = ENGINE_TYPES.get(str(kind.value))
    if by_kind is not None and kind.layer <= asked.get(by_kind, DEFAULT).layer:
        asked[by_kind] = replace(kind, value=True)
    on = sorted((switch.layer, name) for name, switch in asked.items() if switch.value)
    conflicts = tuple(
        f"{asked[on[0][1]].origin} requests {TITLES[on[0][1]]}, but {asked[name].origin} requests "
        f"{TITLES[name]}: choose one."
        for layer, name in on[1:]
        if layer == on[0][0]
    )
    sourced |= asked | {name: replace(asked[name], value=False) for _, name in on[1:]}
    # 3. Create the sections.
    sections: dict[str, dict[str, Any]] = {}
    for path, value in sourced.items():
        section, _, name = path.partition(".")
        if name:
            sections.setdefault(section, {})[name] = value.value
    made: dict[str, Any] = {}
    for name, section_class in OPTIONAL_SECTIONS.items():
        values = sections.pop(name, {})
        made[name] = section_class(**values) if sourced.get(name, DEFAULT).value else None
    for name in IMPLICIT_SECTIONS.keys() & sections.keys():
        made[name] = IMPLICIT_SECTIONS[name](**sections.pop(name))
    defaults = Settings()
    made |= {section: replace(getattr(defaults, section), **values) for section, values in sections.items()}
    return Merged(settings=replace(defaults, **made), sourced=sourced, conflicts=conflicts)


SPLIT_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "fp8.override_linear_precision": (
        "ACCELERATE_FP8_OVERRIDE_FPROP",
        "ACCELERATE_FP8_OVERRIDE_DGRAD",
        "ACCELERATE_FP8_OVERRIDE_WGRAD",
    )
}
"""Settings that other launchers pass in several variables; an unset variable is false."""


def parse_environ(environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    """Read every documented variable that is set, by path; an empty variable counts as unset.

    Raises:
        SettingsError: Variables are invalid. The message lists all.
    """
    values: dict[str, SourcedValue | None] = {}
    problems = ErrorCollector()
    for name, option in BY_VARIABLE.items():
        if name in environ:
            with problems:
                values[option.path] = parse(option, environ[name], Layer.ENVIRONMENT, f"variable {name}")
    for path, names in SPLIT_VARIABLES.items():
        if values.get(path) is None and any(environ.get(name) for name in names):
            text = ",".join(environ.get(name) or "false" for name in names)
            with problems:
                values[path] = parse(BY_PATH[path], text, Layer.ENVIRONMENT, f"variables {', '.join(names)}")
    problems.raise_if_any()
    return {path: value for path, value in values.items() if value is not None}


def from_environ(environ: Mapping[str, str]) -> Settings:
    """Read the settings of a process from its environment.

    Raises:
        SettingsError: A variable is invalid, or two variables request different engines. The message names
            them.

    Example:
        >>> from_environ({"ACCELERATE_MIXED_PRECISION": "bf16"}).precision.mixed_precision
        'bf16'
        >>> from_environ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}).fsdp.fsdp_version
        2
    """
    return merge_layers(parse_environ(environ)).settings


def to_environ(settings: Settings) -> dict[str, str]:
    """Convert settings that differ from the defaults to variables; `from_environ` is the inverse.

    Settings that only the command reads are omitted: workers get their topology from their launcher.

    Example:
        >>> from accel_state.settings.model import PrecisionSettings
        >>> to_environ(Settings(precision=PrecisionSettings(mixed_precision="bf16")))
        {'ACCELERATE_MIXED_PRECISION': 'bf16'}
    """
    defaults = Settings()
    return {
        name: as_text(value)
        for name, option in BY_VARIABLE.items()
        if (value := value_at(settings, option.path)) != value_at(defaults, option.path)
    }


def worker_environ(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Create a worker's environment: the launcher's, with the variables of settings replaced.

    Example:
        >>> worker_environ(Settings(), {"HOME": "/root", "ACCELERATE_USE_CPU": "1"})
        {'HOME': '/root'}
    """
    ours = {*BY_VARIABLE, *(name for names in SPLIT_VARIABLES.values() for name in names)}
    return {name: value for name, value in environ.items() if name not in ours} | to_environ(settings)


def as_text(value: object) -> str:
    """Format a value as text that the `parse` of its row reads.

    Example:
        >>> as_text(True), as_text((False, True)), as_text(("A", "B"))
        ('true', 'false,true', 'A,B')
    """
    if isinstance(value, tuple):
        return ",".join(map(as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
