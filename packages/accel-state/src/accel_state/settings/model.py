"""What a run was asked to do: frozen records, and nothing that knows where a value came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from accel_state.settings.sections.deepspeed import DeepSpeedSettings, HostSettings
from accel_state.settings.sections.fp8 import Fp8Settings
from accel_state.settings.sections.fsdp import FsdpSettings
from accel_state.settings.sections.launch import LaunchSettings
from accel_state.settings.sections.megatron import MegatronSettings
from accel_state.settings.sections.parallelism import ParallelismSettings
from accel_state.settings.sections.process import ProcessSettings
from accel_state.settings.sections.remote import MpiSettings, SageMakerSettings, TpuSettings
from accel_state.settings.sections.training import DynamoSettings, PrecisionSettings, TrainingSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

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
