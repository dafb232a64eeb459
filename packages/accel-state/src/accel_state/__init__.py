"""Topology, device, settings and collectives of a process. Names are imported at their first use."""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_state.accelerator_state import (
        AcceleratorState,
        ThreadLocalSharedDict,
        do_nothing,
        is_initialized,
    )
    from accel_state.available import (
        is_4bit_bnb_available,
        is_8bit_bnb_available,
        is_aim_available,
        is_amdsmi_available,
        is_bitsandbytes_multi_backend_available,
        is_bnb_available,
        is_boto3_available,
        is_clearml_available,
        is_comet_ml_available,
        is_datasets_available,
        is_deepspeed_available,
        is_dvclive_available,
        is_fp8_available,
        is_import_timer_available,
        is_lomo_available,
        is_matplotlib_available,
        is_megatron_lm_available,
        is_mlflow_available,
        is_msamp_available,
        is_pandas_available,
        is_peft_available,
        is_pippy_available,
        is_pynvml_available,
        is_pytest_available,
        is_rich_available,
        is_sagemaker_available,
        is_schedulefree_available,
        is_swanlab_available,
        is_tensorboard_available,
        is_timm_available,
        is_torchao_available,
        is_torchdata_available,
        is_torchdata_stateful_dataloader_available,
        is_torchvision_available,
        is_trackio_available,
        is_transformer_engine_available,
        is_transformers_available,
        is_triton_available,
        is_wandb_available,
        is_weights_only_available,
        require,
    )
    from accel_state.backends.base import (
        Collectives,
    )
    from accel_state.batch_size import (
        find_executable_batch_size,
        should_reduce_batch_size,
    )
    from accel_state.devices.affinity import (
        override_numa_affinity,
        set_numa_affinity,
    )
    from accel_state.devices.info import (
        check_cuda_p2p_ib_support,
        check_os_kernel,
        get_driver_version,
        get_gpu_info,
    )
    from accel_state.devices.kinds import (
        DeviceKind,
        available_kind,
        kind_of,
    )
    from accel_state.devices.probes import (
        check_cuda_fp8_capability,
        get_current_device_type,
        is_bf16_available,
        is_cuda_available,
        is_fp16_available,
        is_habana_gaudi1,
        is_hpu_available,
        is_mlu_available,
        is_mps_available,
        is_musa_available,
        is_neuron_available,
        is_npu_available,
        is_rocm_available,
        is_sdaa_available,
        is_torch_xla_available,
        is_transformer_engine_mxfp8_available,
        is_xccl_available,
        is_xpu_available,
    )
    from accel_state.environ import (
        are_libraries_initialized,
        clear_environment,
        convert_dict_to_env_variables,
        get_int_from_env,
        parse_choice_from_env,
        parse_flag_from_env,
        patch_environment,
        purge_accelerate_environment,
        str_to_bool,
    )
    from accel_state.errors import (
        AccelError,
        DistributedOperationException,
        MissingDependencyError,
        SettingsError,
        StalledCollectiveError,
        UnsupportedError,
    )
    from accel_state.gradient_state import (
        GradientState,
    )
    from accel_state.labels import (
        BaseEnum,
        ComputeEnvironment,
        CustomDtype,
        DDPCommunicationHookType,
        DistributedType,
        DynamoBackend,
        LoggerType,
        PrecisionType,
        RNGType,
        SageMakerDistributedType,
        distributed_type_of,
    )
    from accel_state.logging import (
        MultiProcessAdapter,
        get_logger,
    )
    from accel_state.memory import (
        clear_device_cache,
        release_memory,
    )
    from accel_state.partial_state import (
        PartialState,
        wait_for_everyone,
    )
    from accel_state.ports import (
        free_port,
        is_port_in_use,
    )
    from accel_state.progress import (
        tqdm,
    )
    from accel_state.rng import (
        set_seed,
        synchronize_rng_state,
        synchronize_rng_states,
    )
    from accel_state.runtime import (
        NotStartedError,
        Runtime,
    )
    from accel_state.settings import (
        Settings,
        from_environ,
        to_environ,
    )
    from accel_state.topology import (
        CPUInformation,
        Rendezvous,
        Topology,
        detect,
        get_cpu_distributed_information,
        rendezvous,
    )
    from accel_state.versions import (
        compare_versions,
        installed_version,
        is_torch_version,
    )

__all__ = [
    "AccelError",
    "AcceleratorState",
    "BaseEnum",
    "CPUInformation",
    "Collectives",
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DeviceKind",
    "DistributedOperationException",
    "DistributedType",
    "DynamoBackend",
    "GradientState",
    "LoggerType",
    "MissingDependencyError",
    "MultiProcessAdapter",
    "NotStartedError",
    "PartialState",
    "PrecisionType",
    "RNGType",
    "Rendezvous",
    "Runtime",
    "SageMakerDistributedType",
    "Settings",
    "SettingsError",
    "StalledCollectiveError",
    "ThreadLocalSharedDict",
    "Topology",
    "UnsupportedError",
    "are_libraries_initialized",
    "available_kind",
    "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support",
    "check_os_kernel",
    "clear_device_cache",
    "clear_environment",
    "compare_versions",
    "convert_dict_to_env_variables",
    "detect",
    "distributed_type_of",
    "do_nothing",
    "find_executable_batch_size",
    "free_port",
    "from_environ",
    "get_cpu_distributed_information",
    "get_current_device_type",
    "get_driver_version",
    "get_gpu_info",
    "get_int_from_env",
    "get_logger",
    "installed_version",
    "is_4bit_bnb_available",
    "is_8bit_bnb_available",
    "is_aim_available",
    "is_amdsmi_available",
    "is_bf16_available",
    "is_bitsandbytes_multi_backend_available",
    "is_bnb_available",
    "is_boto3_available",
    "is_clearml_available",
    "is_comet_ml_available",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_dvclive_available",
    "is_fp8_available",
    "is_fp16_available",
    "is_habana_gaudi1",
    "is_hpu_available",
    "is_import_timer_available",
    "is_initialized",
    "is_lomo_available",
    "is_matplotlib_available",
    "is_megatron_lm_available",
    "is_mlflow_available",
    "is_mlu_available",
    "is_mps_available",
    "is_msamp_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_pandas_available",
    "is_peft_available",
    "is_pippy_available",
    "is_port_in_use",
    "is_pynvml_available",
    "is_pytest_available",
    "is_rich_available",
    "is_rocm_available",
    "is_sagemaker_available",
    "is_schedulefree_available",
    "is_sdaa_available",
    "is_swanlab_available",
    "is_tensorboard_available",
    "is_timm_available",
    "is_torch_version",
    "is_torch_xla_available",
    "is_torchao_available",
    "is_torchdata_available",
    "is_torchdata_stateful_dataloader_available",
    "is_torchvision_available",
    "is_trackio_available",
    "is_transformer_engine_available",
    "is_transformer_engine_mxfp8_available",
    "is_transformers_available",
    "is_triton_available",
    "is_wandb_available",
    "is_weights_only_available",
    "is_xccl_available",
    "is_xpu_available",
    "kind_of",
    "override_numa_affinity",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "release_memory",
    "rendezvous",
    "require",
    "set_numa_affinity",
    "set_seed",
    "should_reduce_batch_size",
    "str_to_bool",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "to_environ",
    "tqdm",
    "wait_for_everyone",
]

_MODULES = {
    "accelerator_state": "AcceleratorState ThreadLocalSharedDict do_nothing is_initialized",
    "available": (
        "is_4bit_bnb_available is_8bit_bnb_available is_aim_available is_amdsmi_available "
        "is_bitsandbytes_multi_backend_available is_bnb_available is_boto3_available "
        "is_clearml_available is_comet_ml_available is_datasets_available is_deepspeed_available "
        "is_dvclive_available is_fp8_available is_import_timer_available is_lomo_available "
        "is_matplotlib_available is_megatron_lm_available is_mlflow_available is_msamp_available "
        "is_pandas_available is_peft_available is_pippy_available is_pynvml_available "
        "is_pytest_available is_rich_available is_sagemaker_available is_schedulefree_available "
        "is_swanlab_available is_tensorboard_available is_timm_available is_torchao_available "
        "is_torchdata_available is_torchdata_stateful_dataloader_available is_torchvision_available "
        "is_trackio_available is_transformer_engine_available is_transformers_available "
        "is_triton_available is_wandb_available is_weights_only_available require "
    ),
    "backends.base": "Collectives",
    "batch_size": "find_executable_batch_size should_reduce_batch_size",
    "devices.affinity": "override_numa_affinity set_numa_affinity",
    "devices.info": "check_cuda_p2p_ib_support check_os_kernel get_driver_version get_gpu_info",
    "devices.kinds": "DeviceKind available_kind kind_of",
    "devices.probes": (
        "check_cuda_fp8_capability get_current_device_type is_bf16_available is_cuda_available "
        "is_fp16_available is_habana_gaudi1 is_hpu_available is_mlu_available is_mps_available "
        "is_musa_available is_neuron_available is_npu_available is_rocm_available is_sdaa_available "
        "is_torch_xla_available is_transformer_engine_mxfp8_available is_xccl_available "
        "is_xpu_available "
    ),
    "environ": (
        "are_libraries_initialized clear_environment convert_dict_to_env_variables get_int_from_env "
        "parse_choice_from_env parse_flag_from_env patch_environment purge_accelerate_environment "
        "str_to_bool "
    ),
    "errors": (
        "AccelError DistributedOperationException MissingDependencyError SettingsError "
        "StalledCollectiveError UnsupportedError "
    ),
    "gradient_state": "GradientState",
    "labels": (
        "BaseEnum ComputeEnvironment CustomDtype DDPCommunicationHookType DistributedType DynamoBackend "
        "LoggerType PrecisionType RNGType SageMakerDistributedType distributed_type_of "
    ),
    "logging": "MultiProcessAdapter get_logger",
    "memory": "clear_device_cache release_memory",
    "partial_state": "PartialState wait_for_everyone",
    "ports": "free_port is_port_in_use",
    "progress": "tqdm",
    "rng": "set_seed synchronize_rng_state synchronize_rng_states",
    "runtime": "NotStartedError Runtime",
    "settings": "Settings from_environ to_environ",
    "topology": "CPUInformation Rendezvous Topology detect get_cpu_distributed_information rendezvous",
    "versions": "compare_versions installed_version is_torch_version",
}
__getattr__, __dir__ = attach(
    __name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}
)
