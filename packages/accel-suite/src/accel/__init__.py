"""One training script, unchanged, on any number of devices.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel import accelerator as accelerator
    from accel import big_modeling as big_modeling
    from accel import checkpointing as checkpointing
    from accel import data_loader as data_loader
    from accel import errors as errors
    from accel import hooks as hooks
    from accel import inference as inference
    from accel import launchers as launchers
    from accel import local_sgd as local_sgd
    from accel import logging as logging
    from accel import memory_utils as memory_utils
    from accel import optimizer as optimizer
    from accel import parallelism_config as parallelism_config
    from accel import scheduler as scheduler
    from accel import settings as settings
    from accel import state as state
    from accel import tracking as tracking
    from accel import utils as utils
    from accel_bigmodel.device_map.infer import infer_auto_device_map
    from accel_bigmodel.dispatch import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
    from accel_bigmodel.empty import init_empty_weights, init_on_device
    from accel_bigmodel.loading import load_checkpoint_and_dispatch, load_checkpoint_in_model
    from accel_bigmodel.pipeline import prepare_pippy
    from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
    from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
    from accel_plugins.kwargs.amp import AutocastKwargs, GradScalerKwargs
    from accel_plugins.kwargs.dataloader import DataLoaderConfiguration
    from accel_plugins.kwargs.ddp import DistributedDataParallelKwargs
    from accel_plugins.kwargs.process_group import InitProcessGroupKwargs
    from accel_plugins.kwargs.profile import ProfileKwargs
    from accel_plugins.parallelism.config import ParallelismConfig
    from accel_state.available import is_rich_available
    from accel_state.batch_size import find_executable_batch_size
    from accel_state.labels import DDPCommunicationHookType, DistributedType
    from accel_state.partial_state import PartialState
    from accel_state.rng import synchronize_rng_states
    from accel_train.accelerator import Accelerator
    from accel_train.data.skip import skip_first_batches
    from accel_train.launchers import debug_launcher, notebook_launcher
    from accel_train.launching import launch

__all__ = [
    "Accelerator", "AutocastKwargs", "DDPCommunicationHookType", "DataLoaderConfiguration",
    "DeepSpeedPlugin", "DistributedDataParallelKwargs", "DistributedType", "FullyShardedDataParallelPlugin",
    "GradScalerKwargs", "InitProcessGroupKwargs", "ParallelismConfig", "PartialState", "ProfileKwargs",
    "cpu_offload", "cpu_offload_with_hook", "debug_launcher", "disk_offload", "dispatch_model",
    "find_executable_batch_size", "infer_auto_device_map", "init_empty_weights", "init_on_device",
    "is_rich_available", "launch", "load_checkpoint_and_dispatch", "load_checkpoint_in_model",
    "notebook_launcher", "prepare_pippy", "skip_first_batches", "synchronize_rng_states",
]

__version__ = "0.1.0"

_EXPORTS = {
    "accelerator": "accel.accelerator:",
    "big_modeling": "accel.big_modeling:",
    "checkpointing": "accel.checkpointing:",
    "data_loader": "accel.data_loader:",
    "errors": "accel.errors:",
    "hooks": "accel.hooks:",
    "inference": "accel.inference:",
    "launchers": "accel.launchers:",
    "local_sgd": "accel.local_sgd:",
    "logging": "accel.logging:",
    "memory_utils": "accel.memory_utils:",
    "optimizer": "accel.optimizer:",
    "parallelism_config": "accel.parallelism_config:",
    "scheduler": "accel.scheduler:",
    "settings": "accel.settings:",
    "state": "accel.state:",
    "tracking": "accel.tracking:",
    "utils": "accel.utils:",
    **dict.fromkeys(("infer_auto_device_map",), "accel_bigmodel.device_map.infer"),
    **dict.fromkeys((
        "cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model",
    ), "accel_bigmodel.dispatch"),
    **dict.fromkeys(("init_empty_weights", "init_on_device"), "accel_bigmodel.empty"),
    **dict.fromkeys(("load_checkpoint_and_dispatch", "load_checkpoint_in_model"), "accel_bigmodel.loading"),
    **dict.fromkeys(("prepare_pippy",), "accel_bigmodel.pipeline"),
    **dict.fromkeys(("DeepSpeedPlugin",), "accel_plugins.deepspeed.plugin"),
    **dict.fromkeys(("FullyShardedDataParallelPlugin",), "accel_plugins.fsdp.plugin"),
    **dict.fromkeys(("AutocastKwargs", "GradScalerKwargs"), "accel_plugins.kwargs.amp"),
    **dict.fromkeys(("DataLoaderConfiguration",), "accel_plugins.kwargs.dataloader"),
    **dict.fromkeys(("DistributedDataParallelKwargs",), "accel_plugins.kwargs.ddp"),
    **dict.fromkeys(("InitProcessGroupKwargs",), "accel_plugins.kwargs.process_group"),
    **dict.fromkeys(("ProfileKwargs",), "accel_plugins.kwargs.profile"),
    **dict.fromkeys(("ParallelismConfig",), "accel_plugins.parallelism.config"),
    **dict.fromkeys(("is_rich_available",), "accel_state.available"),
    **dict.fromkeys(("find_executable_batch_size",), "accel_state.batch_size"),
    **dict.fromkeys(("DDPCommunicationHookType", "DistributedType"), "accel_state.labels"),
    **dict.fromkeys(("PartialState",), "accel_state.partial_state"),
    **dict.fromkeys(("synchronize_rng_states",), "accel_state.rng"),
    **dict.fromkeys(("Accelerator",), "accel_train.accelerator"),
    **dict.fromkeys(("skip_first_batches",), "accel_train.data.skip"),
    **dict.fromkeys(("debug_launcher", "notebook_launcher"), "accel_train.launchers"),
    **dict.fromkeys(("launch",), "accel_train.launching"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
