"""The settings of a run as a frozen record, and their table: one row per setting, for readers and writers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from accel_state.settings.sections.deepspeed import DEEPSPEED, DeepSpeedSettings, HostSettings
from accel_state.settings.sections.fp8 import FP8, Fp8Settings
from accel_state.settings.sections.fsdp import FSDP, FsdpSettings
from accel_state.settings.sections.launch import LAUNCH, LaunchSettings
from accel_state.settings.sections.megatron import MEGATRON, MegatronSettings
from accel_state.settings.sections.parallelism import PARALLELISM, ParallelismSettings
from accel_state.settings.sections.process import PROCESS, ProcessSettings
from accel_state.settings.sections.remote import (
    MPI,
    SAGEMAKER,
    TPU,
    MpiSettings,
    SageMakerSettings,
    TpuSettings,
)
from accel_state.settings.sections.training import (
    DYNAMO,
    TRAINING,
    DynamoSettings,
    PrecisionSettings,
    TrainingSettings,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_state.settings.option import Option

Precision: TypeAlias = Literal["no", "fp16", "bf16", "fp8"]

BASE_PRECISIONS = frozenset({"no", "fp16", "bf16"})
"""Those that need no recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
"""The sections of which there can be one only."""

IMPLICIT_SECTIONS: Mapping[str, type[Fp8Settings]] = {"fp8": Fp8Settings}
"""The sections that exist if any of their settings has a source."""


def value_at(settings: Settings, path: str) -> object:
    """The value of a path; of a section alone whether it is there; None in a section that is not.

    Example:
        >>> value_at(Settings(fsdp=FsdpSettings(fsdp_version=2)), "fsdp.fsdp_version")
        2
        >>> value_at(Settings(), "fsdp"), value_at(Settings(), "fsdp.fsdp_version")
        (False, None)
    """
    section, _, name = path.partition(".")
    found = getattr(settings, section)
    if not name:
        return found is not None
    return None if found is None else getattr(found, name)


OPTIONS: tuple[Option, ...] = (
    *LAUNCH,
    *MPI,
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
"""The settings of config files by their key, in every spelling that is read."""
