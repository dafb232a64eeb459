"""Who a process is, on what it computes, and what it was asked to do. Names are imported when asked for."""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
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
        rendezvous,
    )
    from accel_state.versions import (
        compare_versions,
        installed_version,
        is_torch_version,
    )

__all__ = [
    "AccelError", "BaseEnum", "CPUInformation", "ComputeEnvironment", "CustomDtype",
    "DDPCommunicationHookType", "DistributedOperationException", "DistributedType", "DynamoBackend",
    "LoggerType", "MissingDependencyError", "PrecisionType", "RNGType", "Rendezvous",
    "SageMakerDistributedType", "Settings", "SettingsError", "StalledCollectiveError", "Topology",
    "UnsupportedError", "are_libraries_initialized", "clear_environment", "compare_versions",
    "convert_dict_to_env_variables", "detect", "distributed_type_of", "from_environ",
    "get_int_from_env", "installed_version", "is_4bit_bnb_available", "is_8bit_bnb_available",
    "is_aim_available", "is_amdsmi_available", "is_bitsandbytes_multi_backend_available",
    "is_bnb_available", "is_boto3_available", "is_clearml_available", "is_comet_ml_available",
    "is_datasets_available", "is_deepspeed_available", "is_dvclive_available", "is_fp8_available",
    "is_import_timer_available", "is_lomo_available", "is_matplotlib_available",
    "is_megatron_lm_available", "is_mlflow_available", "is_msamp_available", "is_pandas_available",
    "is_peft_available", "is_pippy_available", "is_pynvml_available", "is_pytest_available",
    "is_rich_available", "is_sagemaker_available", "is_schedulefree_available", "is_swanlab_available",
    "is_tensorboard_available", "is_timm_available", "is_torch_version", "is_torchao_available",
    "is_torchdata_available", "is_torchdata_stateful_dataloader_available", "is_torchvision_available",
    "is_trackio_available", "is_transformer_engine_available", "is_transformers_available",
    "is_triton_available", "is_wandb_available", "is_weights_only_available", "parse_choice_from_env",
    "parse_flag_from_env", "patch_environment", "purge_accelerate_environment", "rendezvous", "require",
    "str_to_bool", "to_environ",
]

_EXPORTS = {
    **dict.fromkeys(
        (
            "is_4bit_bnb_available", "is_8bit_bnb_available", "is_aim_available",
            "is_amdsmi_available", "is_bitsandbytes_multi_backend_available", "is_bnb_available",
            "is_boto3_available", "is_clearml_available", "is_comet_ml_available",
            "is_datasets_available", "is_deepspeed_available", "is_dvclive_available",
            "is_fp8_available", "is_import_timer_available", "is_lomo_available",
            "is_matplotlib_available", "is_megatron_lm_available", "is_mlflow_available",
            "is_msamp_available", "is_pandas_available", "is_peft_available", "is_pippy_available",
            "is_pynvml_available", "is_pytest_available", "is_rich_available",
            "is_sagemaker_available", "is_schedulefree_available", "is_swanlab_available",
            "is_tensorboard_available", "is_timm_available", "is_torchao_available",
            "is_torchdata_available", "is_torchdata_stateful_dataloader_available",
            "is_torchvision_available", "is_trackio_available", "is_transformer_engine_available",
            "is_transformers_available", "is_triton_available", "is_wandb_available",
            "is_weights_only_available", "require",
        ),
        "accel_state.available",
    ),
    **dict.fromkeys(
        (
            "are_libraries_initialized", "clear_environment", "convert_dict_to_env_variables",
            "get_int_from_env", "parse_choice_from_env", "parse_flag_from_env", "patch_environment",
            "purge_accelerate_environment", "str_to_bool",
        ),
        "accel_state.environ",
    ),
    **dict.fromkeys(
        (
            "AccelError", "DistributedOperationException", "MissingDependencyError",
            "SettingsError", "StalledCollectiveError", "UnsupportedError",
        ),
        "accel_state.errors",
    ),
    **dict.fromkeys(
        (
            "BaseEnum", "ComputeEnvironment", "CustomDtype", "DDPCommunicationHookType",
            "DistributedType", "DynamoBackend", "LoggerType", "PrecisionType", "RNGType",
            "SageMakerDistributedType", "distributed_type_of",
        ),
        "accel_state.labels",
    ),
    **dict.fromkeys(
        (
            "Settings", "from_environ", "to_environ",
        ),
        "accel_state.settings",
    ),
    **dict.fromkeys(
        (
            "CPUInformation", "Rendezvous", "Topology", "detect", "rendezvous",
        ),
        "accel_state.topology",
    ),
    **dict.fromkeys(
        (
            "compare_versions", "installed_version", "is_torch_version",
        ),
        "accel_state.versions",
    ),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
