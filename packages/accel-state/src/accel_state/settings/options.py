"""The settings table: one row per setting, from which all readers and writers are derived."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.settings.sections.deepspeed import DEEPSPEED
from accel_state.settings.sections.fp8 import FP8
from accel_state.settings.sections.fsdp import FSDP
from accel_state.settings.sections.launch import LAUNCH
from accel_state.settings.sections.megatron import MEGATRON
from accel_state.settings.sections.parallelism import PARALLELISM
from accel_state.settings.sections.process import PROCESS
from accel_state.settings.sections.remote import MPI, SAGEMAKER, TPU
from accel_state.settings.sections.training import DYNAMO, TRAINING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_state.settings.option import Option

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
