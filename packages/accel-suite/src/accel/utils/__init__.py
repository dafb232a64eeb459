"""The building blocks: nested data, settings, RNG, availability, plugin dataclasses.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel.utils import ao as ao
    from accel.utils import bnb as bnb
    from accel.utils import constants as constants
    from accel.utils import dataclasses as dataclasses
    from accel.utils import deepspeed as deepspeed
    from accel.utils import environment as environment
    from accel.utils import fsdp_utils as fsdp_utils
    from accel.utils import imports as imports
    from accel.utils import launch as launch
    from accel.utils import megatron_lm as megatron_lm
    from accel.utils import memory as memory
    from accel.utils import modeling as modeling
    from accel.utils import offload as offload
    from accel.utils import operations as operations
    from accel.utils import other as other
    from accel.utils import random as random
    from accel.utils import torch_xla as torch_xla
    from accel.utils import transformer_engine as transformer_engine
    from accel.utils import versions as versions
    from accel_bigmodel.device_map.budget import get_balanced_memory, get_max_memory
    from accel_bigmodel.device_map.check import check_device_map, check_tied_parameters_on_same_device
    from accel_bigmodel.device_map.infer import infer_auto_device_map
    from accel_bigmodel.hooks.align import align_module_device, has_offloaded_params
    from accel_bigmodel.loading import load_checkpoint_in_model
    from accel_bigmodel.offload import (
        OffloadedWeightsLoader, PrefixedDataset, extract_submodules_state_dict, load_offloaded_weight,
        load_offloaded_weights, offload_state_dict, offload_weight,
    )
    from accel_bigmodel.offload_index import save_offload_index
    from accel_bigmodel.placement import set_module_tensor_to_device
    from accel_bigmodel.sizes import calculate_maximum_sizes, compute_module_sizes, get_max_layer_size
    from accel_cli.config.basic import write_basic_config
    from accel_cli.install_xla import install_xla
    from accel_cli.launch.namespace import (
        TORCH_LAUNCH_PARAMS, prepare_deepspeed_cmd_env, prepare_multi_gpu_env,
        prepare_sagemager_args_inputs, prepare_simple_launcher_cmd_env, prepare_tpu,
    )
    from accel_ops.collect import broadcast, broadcast_object_list, gather, gather_object, reduce
    from accel_ops.compile import compile_regions, compile_regions_deepspeed, compile_regions_fsdp2
    from accel_ops.modules import (
        extract_model_from_parallel, has_compiled_regions, is_compiled_module, model_has_dtensor,
    )
    from accel_ops.move import copy_tensor_to_devices, send_to_device
    from accel_ops.names import (
        get_module_children_bottom_up, get_pretty_name, is_peft_model, merge_dicts, recursive_getattr,
    )
    from accel_ops.pad import CannotPadNestedTensorWarning, pad_across_processes, pad_input_tensors
    from accel_ops.precision import convert_outputs_to_fp32, convert_to_fp32
    from accel_ops.tree import (
        TensorInformation, concatenate, find_batch_size, find_device, get_data_structure, honor_type,
        ignorant_find_batch_size, initialize_tensors, is_namedtuple, is_tensor_information, is_torch_tensor,
        listify, recursively_apply, slice_tensors,
    )
    from accel_ops.weights.clean import clean_state_dict_for_safetensors
    from accel_ops.weights.names import (
        MODEL_NAME, SAFE_MODEL_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_PATTERN_NAME,
        WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_PATTERN_NAME,
    )
    from accel_ops.weights.read import load, load_state_dict
    from accel_ops.weights.sizes import convert_bytes, convert_file_size_to_int, dtype_byte_size
    from accel_ops.weights.tensors import id_tensor_storage, named_module_tensors
    from accel_ops.weights.tied import (
        check_tied_parameters_in_config, find_tied_parameters, retie_parameters,
    )
    from accel_ops.weights.write import save
    from accel_plugins.deepspeed.dummy import DummyOptim, DummyScheduler
    from accel_plugins.deepspeed.enabled import deepspeed_required
    from accel_plugins.deepspeed.engine import DeepSpeedEngineWrapper
    from accel_plugins.deepspeed.gathered import GatheredParameters
    from accel_plugins.deepspeed.hf_config import HfDeepSpeedConfig
    from accel_plugins.deepspeed.optimizers import map_pytorch_optim_to_deepspeed
    from accel_plugins.deepspeed.plugin import DeepSpeedPlugin, get_active_deepspeed_plugin
    from accel_plugins.fp8.ao import (
        convert_model_to_fp8_ao, filter_first_and_last_linear_layers, has_ao_layers, torchao_required,
    )
    from accel_plugins.fp8.te import (
        apply_fp8_autowrap, contextual_fp8_autocast, convert_model, has_transformer_engine_layers,
    )
    from accel_plugins.fsdp.env_flags import (
        disable_fsdp_ram_efficient_loading, enable_fsdp_ram_efficient_loading,
    )
    from accel_plugins.fsdp.loading import ensure_weights_retied
    from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
    from accel_plugins.kwargs.accumulation import GradientAccumulationPlugin
    from accel_plugins.kwargs.amp import AutocastKwargs, GradScalerKwargs
    from accel_plugins.kwargs.base import KwargsHandler
    from accel_plugins.kwargs.dataloader import DataLoaderConfiguration
    from accel_plugins.kwargs.ddp import DistributedDataParallelKwargs
    from accel_plugins.kwargs.dynamo import TorchDynamoPlugin
    from accel_plugins.kwargs.fp8 import (
        AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs,
    )
    from accel_plugins.kwargs.process_group import InitProcessGroupKwargs
    from accel_plugins.kwargs.profile import ProfileKwargs
    from accel_plugins.kwargs.project import ProjectConfiguration
    from accel_plugins.megatron.bert_step import BertTrainStep
    from accel_plugins.megatron.dummy import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
    from accel_plugins.megatron.losses import avg_losses_across_data_parallel_group
    from accel_plugins.megatron.model_args import add_model_config_to_megatron_parser
    from accel_plugins.megatron.plugin import MegatronLMPlugin
    from accel_plugins.megatron.t5_step import T5TrainStep
    from accel_plugins.megatron.train_steps import AbstractTrainStep, GPTTrainStep
    from accel_plugins.parallelism.config import ParallelismConfig
    from accel_plugins.parallelism.handlers import (
        DeepSpeedSequenceParallelConfig, TorchContextParallelConfig, TorchTensorParallelConfig,
        TorchTensorParallelPlugin,
    )
    from accel_plugins.parallelism.tensor import get_model_tp_size
    from accel_plugins.precision.contexts import get_grad_scaler, get_mixed_precision_context_manager
    from accel_plugins.precision.sharded_scaler import get_fsdp2_grad_scaler
    from accel_quant.bnb.config import BnbQuantizationConfig
    from accel_quant.bnb.convert import has_4bit_bnb_layers
    from accel_quant.bnb.load import load_and_quantize_model
    from accel_state.available import (
        is_4bit_bnb_available, is_8bit_bnb_available, is_aim_available, is_amdsmi_available,
        is_bitsandbytes_multi_backend_available, is_bnb_available, is_boto3_available, is_clearml_available,
        is_comet_ml_available, is_datasets_available, is_deepspeed_available, is_dvclive_available,
        is_fp8_available, is_import_timer_available, is_lomo_available, is_matplotlib_available,
        is_megatron_lm_available, is_mlflow_available, is_msamp_available, is_pandas_available,
        is_peft_available, is_pippy_available, is_pynvml_available, is_pytest_available, is_rich_available,
        is_sagemaker_available, is_schedulefree_available, is_swanlab_available, is_tensorboard_available,
        is_timm_available, is_torchao_available, is_torchdata_available,
        is_torchdata_stateful_dataloader_available, is_torchvision_available, is_trackio_available,
        is_transformer_engine_available, is_transformers_available, is_triton_available, is_wandb_available,
        is_weights_only_available,
    )
    from accel_state.batch_size import find_executable_batch_size
    from accel_state.devices.affinity import set_numa_affinity
    from accel_state.devices.info import check_cuda_p2p_ib_support, check_os_kernel, get_gpu_info
    from accel_state.devices.probes import (
        check_cuda_fp8_capability, get_current_device_type, is_bf16_available, is_cuda_available,
        is_fp16_available, is_habana_gaudi1, is_hpu_available, is_mlu_available, is_mps_available,
        is_musa_available, is_neuron_available, is_npu_available, is_rocm_available, is_sdaa_available,
        is_torch_xla_available, is_transformer_engine_mxfp8_available, is_xccl_available, is_xpu_available,
    )
    from accel_state.environ import (
        are_libraries_initialized, clear_environment, convert_dict_to_env_variables, get_int_from_env,
        parse_choice_from_env, parse_flag_from_env, patch_environment, purge_accelerate_environment,
        str_to_bool,
    )
    from accel_state.labels import (
        ComputeEnvironment, CustomDtype, DDPCommunicationHookType, DistributedType, DynamoBackend,
        FP8BackendType, LoggerType, PrecisionType, RNGType, SageMakerDistributedType,
        TORCH_DISTRIBUTED_OPERATION_TYPES,
    )
    from accel_state.memory import release_memory
    from accel_state.partial_state import wait_for_everyone
    from accel_state.ports import is_port_in_use
    from accel_state.progress import tqdm
    from accel_state.rng import set_seed, synchronize_rng_state, synchronize_rng_states
    from accel_state.topology import get_cpu_distributed_information
    from accel_state.versions import (
        MITA_PROFILING_AVAILABLE_PYTORCH_VERSION, XPU_PROFILING_AVAILABLE_PYTORCH_VERSION, compare_versions,
        is_torch_version,
    )
    from accel_train.checkpoint.fsdp_files import (
        load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer,
    )
    from accel_train.checkpoint.layout import (
        OPTIMIZER_NAME, RNG_STATE_NAME, SAMPLER_NAME, SCALER_NAME, SCHEDULER_NAME,
    )
    from accel_train.checkpoint.merge import merge_fsdp_weights
    from accel_train.deepspeed import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
    from accel_train.fsdp import (
        fsdp2_apply_ac, fsdp2_canonicalize_names, fsdp2_load_full_state_dict, fsdp2_prepare_model,
        fsdp2_switch_optimizer_parameters,
    )
    from accel_train.launchers import PrepareForLaunch
    from accel_train.profiling import PROFILE_PATTERN_NAME

__all__ = [
    "AORecipeKwargs", "AbstractTrainStep", "AutocastKwargs", "BertTrainStep", "BnbQuantizationConfig",
    "CannotPadNestedTensorWarning", "ComputeEnvironment", "CustomDtype", "DDPCommunicationHookType",
    "DataLoaderConfiguration", "DeepSpeedEngineWrapper", "DeepSpeedOptimizerWrapper", "DeepSpeedPlugin",
    "DeepSpeedSchedulerWrapper", "DeepSpeedSequenceParallelConfig", "DistributedDataParallelKwargs",
    "DistributedType", "DummyOptim", "DummyScheduler", "DynamoBackend", "FP8BackendType", "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin", "GPTTrainStep", "GatheredParameters", "GradScalerKwargs",
    "GradientAccumulationPlugin", "HfDeepSpeedConfig", "InitProcessGroupKwargs", "KwargsHandler",
    "LoggerType", "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION", "MODEL_NAME", "MSAMPRecipeKwargs",
    "MegatronLMDummyDataLoader", "MegatronLMDummyScheduler", "MegatronLMPlugin", "OPTIMIZER_NAME",
    "OffloadedWeightsLoader", "PROFILE_PATTERN_NAME", "ParallelismConfig", "PrecisionType",
    "PrefixedDataset", "PrepareForLaunch", "ProfileKwargs", "ProjectConfiguration", "RNGType",
    "RNG_STATE_NAME", "SAFE_MODEL_NAME", "SAFE_WEIGHTS_INDEX_NAME", "SAFE_WEIGHTS_NAME",
    "SAFE_WEIGHTS_PATTERN_NAME", "SAMPLER_NAME", "SCALER_NAME", "SCHEDULER_NAME",
    "SageMakerDistributedType", "T5TrainStep", "TERecipeKwargs", "TORCH_DISTRIBUTED_OPERATION_TYPES",
    "TORCH_LAUNCH_PARAMS", "TensorInformation", "TorchContextParallelConfig", "TorchDynamoPlugin",
    "TorchTensorParallelConfig", "TorchTensorParallelPlugin", "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME", "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
    "add_model_config_to_megatron_parser", "align_module_device", "apply_fp8_autowrap",
    "are_libraries_initialized", "avg_losses_across_data_parallel_group", "broadcast",
    "broadcast_object_list", "calculate_maximum_sizes", "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support", "check_device_map", "check_os_kernel", "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device", "clean_state_dict_for_safetensors", "clear_environment",
    "compare_versions", "compile_regions", "compile_regions_deepspeed", "compile_regions_fsdp2",
    "compute_module_sizes", "concatenate", "contextual_fp8_autocast", "convert_bytes",
    "convert_dict_to_env_variables", "convert_file_size_to_int", "convert_model", "convert_model_to_fp8_ao",
    "convert_outputs_to_fp32", "convert_to_fp32", "copy_tensor_to_devices", "deepspeed_required",
    "disable_fsdp_ram_efficient_loading", "dtype_byte_size", "enable_fsdp_ram_efficient_loading",
    "ensure_weights_retied", "extract_model_from_parallel", "extract_submodules_state_dict",
    "filter_first_and_last_linear_layers", "find_batch_size", "find_device", "find_executable_batch_size",
    "find_tied_parameters", "fsdp2_apply_ac", "fsdp2_canonicalize_names", "fsdp2_load_full_state_dict",
    "fsdp2_prepare_model", "fsdp2_switch_optimizer_parameters", "gather", "gather_object",
    "get_active_deepspeed_plugin", "get_balanced_memory", "get_cpu_distributed_information",
    "get_current_device_type", "get_data_structure", "get_fsdp2_grad_scaler", "get_gpu_info",
    "get_grad_scaler", "get_int_from_env", "get_max_layer_size", "get_max_memory",
    "get_mixed_precision_context_manager", "get_model_tp_size", "get_module_children_bottom_up",
    "get_pretty_name", "has_4bit_bnb_layers", "has_ao_layers", "has_compiled_regions",
    "has_offloaded_params", "has_transformer_engine_layers", "honor_type", "id_tensor_storage",
    "ignorant_find_batch_size", "infer_auto_device_map", "initialize_tensors", "install_xla",
    "is_4bit_bnb_available", "is_8bit_bnb_available", "is_aim_available", "is_amdsmi_available",
    "is_bf16_available", "is_bitsandbytes_multi_backend_available", "is_bnb_available",
    "is_boto3_available", "is_clearml_available", "is_comet_ml_available", "is_compiled_module",
    "is_cuda_available", "is_datasets_available", "is_deepspeed_available", "is_dvclive_available",
    "is_fp16_available", "is_fp8_available", "is_habana_gaudi1", "is_hpu_available",
    "is_import_timer_available", "is_lomo_available", "is_matplotlib_available", "is_megatron_lm_available",
    "is_mlflow_available", "is_mlu_available", "is_mps_available", "is_msamp_available",
    "is_musa_available", "is_namedtuple", "is_neuron_available", "is_npu_available", "is_pandas_available",
    "is_peft_available", "is_peft_model", "is_pippy_available", "is_port_in_use", "is_pynvml_available",
    "is_pytest_available", "is_rich_available", "is_rocm_available", "is_sagemaker_available",
    "is_schedulefree_available", "is_sdaa_available", "is_swanlab_available", "is_tensor_information",
    "is_tensorboard_available", "is_timm_available", "is_torch_tensor", "is_torch_version",
    "is_torch_xla_available", "is_torchao_available", "is_torchdata_available",
    "is_torchdata_stateful_dataloader_available", "is_torchvision_available", "is_trackio_available",
    "is_transformer_engine_available", "is_transformer_engine_mxfp8_available", "is_transformers_available",
    "is_triton_available", "is_wandb_available", "is_weights_only_available", "is_xccl_available",
    "is_xpu_available", "listify", "load", "load_and_quantize_model", "load_checkpoint_in_model",
    "load_fsdp_model", "load_fsdp_optimizer", "load_offloaded_weight", "load_offloaded_weights",
    "load_state_dict", "map_pytorch_optim_to_deepspeed", "merge_dicts", "merge_fsdp_weights",
    "model_has_dtensor", "named_module_tensors", "offload_state_dict", "offload_weight",
    "pad_across_processes", "pad_input_tensors", "parse_choice_from_env", "parse_flag_from_env",
    "patch_environment", "prepare_deepspeed_cmd_env", "prepare_multi_gpu_env",
    "prepare_sagemager_args_inputs", "prepare_simple_launcher_cmd_env", "prepare_tpu",
    "purge_accelerate_environment", "recursive_getattr", "recursively_apply", "reduce", "release_memory",
    "retie_parameters", "save", "save_fsdp_model", "save_fsdp_optimizer", "save_offload_index",
    "send_to_device", "set_module_tensor_to_device", "set_numa_affinity", "set_seed", "slice_tensors",
    "str_to_bool", "synchronize_rng_state", "synchronize_rng_states", "torchao_required", "tqdm",
    "wait_for_everyone", "write_basic_config",
]

_EXPORTS = {
    "ao": "accel.utils.ao:",
    "bnb": "accel.utils.bnb:",
    "constants": "accel.utils.constants:",
    "dataclasses": "accel.utils.dataclasses:",
    "deepspeed": "accel.utils.deepspeed:",
    "environment": "accel.utils.environment:",
    "fsdp_utils": "accel.utils.fsdp_utils:",
    "imports": "accel.utils.imports:",
    "launch": "accel.utils.launch:",
    "megatron_lm": "accel.utils.megatron_lm:",
    "memory": "accel.utils.memory:",
    "modeling": "accel.utils.modeling:",
    "offload": "accel.utils.offload:",
    "operations": "accel.utils.operations:",
    "other": "accel.utils.other:",
    "random": "accel.utils.random:",
    "torch_xla": "accel.utils.torch_xla:",
    "transformer_engine": "accel.utils.transformer_engine:",
    "versions": "accel.utils.versions:",
    **dict.fromkeys(("get_balanced_memory", "get_max_memory"), "accel_bigmodel.device_map.budget"),
    **dict.fromkeys((
        "check_device_map", "check_tied_parameters_on_same_device",
    ), "accel_bigmodel.device_map.check"),
    **dict.fromkeys(("infer_auto_device_map",), "accel_bigmodel.device_map.infer"),
    **dict.fromkeys(("align_module_device", "has_offloaded_params"), "accel_bigmodel.hooks.align"),
    **dict.fromkeys(("load_checkpoint_in_model",), "accel_bigmodel.loading"),
    **dict.fromkeys((
        "OffloadedWeightsLoader", "PrefixedDataset", "extract_submodules_state_dict",
        "load_offloaded_weight", "load_offloaded_weights", "offload_state_dict", "offload_weight",
    ), "accel_bigmodel.offload"),
    **dict.fromkeys(("save_offload_index",), "accel_bigmodel.offload_index"),
    **dict.fromkeys(("set_module_tensor_to_device",), "accel_bigmodel.placement"),
    **dict.fromkeys((
        "calculate_maximum_sizes", "compute_module_sizes", "get_max_layer_size",
    ), "accel_bigmodel.sizes"),
    **dict.fromkeys(("write_basic_config",), "accel_cli.config.basic"),
    **dict.fromkeys(("install_xla",), "accel_cli.install_xla"),
    **dict.fromkeys((
        "TORCH_LAUNCH_PARAMS", "prepare_deepspeed_cmd_env", "prepare_multi_gpu_env",
        "prepare_sagemager_args_inputs", "prepare_simple_launcher_cmd_env", "prepare_tpu",
    ), "accel_cli.launch.namespace"),
    **dict.fromkeys((
        "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce",
    ), "accel_ops.collect"),
    **dict.fromkeys((
        "compile_regions", "compile_regions_deepspeed", "compile_regions_fsdp2",
    ), "accel_ops.compile"),
    **dict.fromkeys((
        "extract_model_from_parallel", "has_compiled_regions", "is_compiled_module", "model_has_dtensor",
    ), "accel_ops.modules"),
    **dict.fromkeys(("copy_tensor_to_devices", "send_to_device"), "accel_ops.move"),
    **dict.fromkeys((
        "get_module_children_bottom_up", "get_pretty_name", "is_peft_model", "merge_dicts",
        "recursive_getattr",
    ), "accel_ops.names"),
    **dict.fromkeys((
        "CannotPadNestedTensorWarning", "pad_across_processes", "pad_input_tensors",
    ), "accel_ops.pad"),
    **dict.fromkeys(("convert_outputs_to_fp32", "convert_to_fp32"), "accel_ops.precision"),
    **dict.fromkeys((
        "TensorInformation", "concatenate", "find_batch_size", "find_device", "get_data_structure",
        "honor_type", "ignorant_find_batch_size", "initialize_tensors", "is_namedtuple",
        "is_tensor_information", "is_torch_tensor", "listify", "recursively_apply", "slice_tensors",
    ), "accel_ops.tree"),
    **dict.fromkeys(("clean_state_dict_for_safetensors",), "accel_ops.weights.clean"),
    **dict.fromkeys((
        "MODEL_NAME", "SAFE_MODEL_NAME", "SAFE_WEIGHTS_INDEX_NAME", "SAFE_WEIGHTS_NAME",
        "SAFE_WEIGHTS_PATTERN_NAME", "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME", "WEIGHTS_PATTERN_NAME",
    ), "accel_ops.weights.names"),
    **dict.fromkeys(("load", "load_state_dict"), "accel_ops.weights.read"),
    **dict.fromkeys((
        "convert_bytes", "convert_file_size_to_int", "dtype_byte_size",
    ), "accel_ops.weights.sizes"),
    **dict.fromkeys(("id_tensor_storage", "named_module_tensors"), "accel_ops.weights.tensors"),
    **dict.fromkeys((
        "check_tied_parameters_in_config", "find_tied_parameters", "retie_parameters",
    ), "accel_ops.weights.tied"),
    **dict.fromkeys(("save",), "accel_ops.weights.write"),
    **dict.fromkeys(("DummyOptim", "DummyScheduler"), "accel_plugins.deepspeed.dummy"),
    **dict.fromkeys(("deepspeed_required",), "accel_plugins.deepspeed.enabled"),
    **dict.fromkeys(("DeepSpeedEngineWrapper",), "accel_plugins.deepspeed.engine"),
    **dict.fromkeys(("GatheredParameters",), "accel_plugins.deepspeed.gathered"),
    **dict.fromkeys(("HfDeepSpeedConfig",), "accel_plugins.deepspeed.hf_config"),
    **dict.fromkeys(("map_pytorch_optim_to_deepspeed",), "accel_plugins.deepspeed.optimizers"),
    **dict.fromkeys(("DeepSpeedPlugin", "get_active_deepspeed_plugin"), "accel_plugins.deepspeed.plugin"),
    **dict.fromkeys((
        "convert_model_to_fp8_ao", "filter_first_and_last_linear_layers", "has_ao_layers",
        "torchao_required",
    ), "accel_plugins.fp8.ao"),
    **dict.fromkeys((
        "apply_fp8_autowrap", "contextual_fp8_autocast", "convert_model", "has_transformer_engine_layers",
    ), "accel_plugins.fp8.te"),
    **dict.fromkeys((
        "disable_fsdp_ram_efficient_loading", "enable_fsdp_ram_efficient_loading",
    ), "accel_plugins.fsdp.env_flags"),
    **dict.fromkeys(("ensure_weights_retied",), "accel_plugins.fsdp.loading"),
    **dict.fromkeys(("FullyShardedDataParallelPlugin",), "accel_plugins.fsdp.plugin"),
    **dict.fromkeys(("GradientAccumulationPlugin",), "accel_plugins.kwargs.accumulation"),
    **dict.fromkeys(("AutocastKwargs", "GradScalerKwargs"), "accel_plugins.kwargs.amp"),
    **dict.fromkeys(("KwargsHandler",), "accel_plugins.kwargs.base"),
    **dict.fromkeys(("DataLoaderConfiguration",), "accel_plugins.kwargs.dataloader"),
    **dict.fromkeys(("DistributedDataParallelKwargs",), "accel_plugins.kwargs.ddp"),
    **dict.fromkeys(("TorchDynamoPlugin",), "accel_plugins.kwargs.dynamo"),
    **dict.fromkeys((
        "AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs",
    ), "accel_plugins.kwargs.fp8"),
    **dict.fromkeys(("InitProcessGroupKwargs",), "accel_plugins.kwargs.process_group"),
    **dict.fromkeys(("ProfileKwargs",), "accel_plugins.kwargs.profile"),
    **dict.fromkeys(("ProjectConfiguration",), "accel_plugins.kwargs.project"),
    **dict.fromkeys(("BertTrainStep",), "accel_plugins.megatron.bert_step"),
    **dict.fromkeys((
        "MegatronLMDummyDataLoader", "MegatronLMDummyScheduler",
    ), "accel_plugins.megatron.dummy"),
    **dict.fromkeys(("avg_losses_across_data_parallel_group",), "accel_plugins.megatron.losses"),
    **dict.fromkeys(("add_model_config_to_megatron_parser",), "accel_plugins.megatron.model_args"),
    **dict.fromkeys(("MegatronLMPlugin",), "accel_plugins.megatron.plugin"),
    **dict.fromkeys(("T5TrainStep",), "accel_plugins.megatron.t5_step"),
    **dict.fromkeys(("AbstractTrainStep", "GPTTrainStep"), "accel_plugins.megatron.train_steps"),
    **dict.fromkeys(("ParallelismConfig",), "accel_plugins.parallelism.config"),
    **dict.fromkeys((
        "DeepSpeedSequenceParallelConfig", "TorchContextParallelConfig", "TorchTensorParallelConfig",
        "TorchTensorParallelPlugin",
    ), "accel_plugins.parallelism.handlers"),
    **dict.fromkeys(("get_model_tp_size",), "accel_plugins.parallelism.tensor"),
    **dict.fromkeys((
        "get_grad_scaler", "get_mixed_precision_context_manager",
    ), "accel_plugins.precision.contexts"),
    **dict.fromkeys(("get_fsdp2_grad_scaler",), "accel_plugins.precision.sharded_scaler"),
    **dict.fromkeys(("BnbQuantizationConfig",), "accel_quant.bnb.config"),
    **dict.fromkeys(("has_4bit_bnb_layers",), "accel_quant.bnb.convert"),
    **dict.fromkeys(("load_and_quantize_model",), "accel_quant.bnb.load"),
    **dict.fromkeys((
        "is_4bit_bnb_available", "is_8bit_bnb_available", "is_aim_available", "is_amdsmi_available",
        "is_bitsandbytes_multi_backend_available", "is_bnb_available", "is_boto3_available",
        "is_clearml_available", "is_comet_ml_available", "is_datasets_available", "is_deepspeed_available",
        "is_dvclive_available", "is_fp8_available", "is_import_timer_available", "is_lomo_available",
        "is_matplotlib_available", "is_megatron_lm_available", "is_mlflow_available", "is_msamp_available",
        "is_pandas_available", "is_peft_available", "is_pippy_available", "is_pynvml_available",
        "is_pytest_available", "is_rich_available", "is_sagemaker_available", "is_schedulefree_available",
        "is_swanlab_available", "is_tensorboard_available", "is_timm_available", "is_torchao_available",
        "is_torchdata_available", "is_torchdata_stateful_dataloader_available", "is_torchvision_available",
        "is_trackio_available", "is_transformer_engine_available", "is_transformers_available",
        "is_triton_available", "is_wandb_available", "is_weights_only_available",
    ), "accel_state.available"),
    **dict.fromkeys(("find_executable_batch_size",), "accel_state.batch_size"),
    **dict.fromkeys(("set_numa_affinity",), "accel_state.devices.affinity"),
    **dict.fromkeys((
        "check_cuda_p2p_ib_support", "check_os_kernel", "get_gpu_info",
    ), "accel_state.devices.info"),
    **dict.fromkeys((
        "check_cuda_fp8_capability", "get_current_device_type", "is_bf16_available", "is_cuda_available",
        "is_fp16_available", "is_habana_gaudi1", "is_hpu_available", "is_mlu_available", "is_mps_available",
        "is_musa_available", "is_neuron_available", "is_npu_available", "is_rocm_available",
        "is_sdaa_available", "is_torch_xla_available", "is_transformer_engine_mxfp8_available",
        "is_xccl_available", "is_xpu_available",
    ), "accel_state.devices.probes"),
    **dict.fromkeys((
        "are_libraries_initialized", "clear_environment", "convert_dict_to_env_variables",
        "get_int_from_env", "parse_choice_from_env", "parse_flag_from_env", "patch_environment",
        "purge_accelerate_environment", "str_to_bool",
    ), "accel_state.environ"),
    **dict.fromkeys((
        "ComputeEnvironment", "CustomDtype", "DDPCommunicationHookType", "DistributedType", "DynamoBackend",
        "FP8BackendType", "LoggerType", "PrecisionType", "RNGType", "SageMakerDistributedType",
        "TORCH_DISTRIBUTED_OPERATION_TYPES",
    ), "accel_state.labels"),
    **dict.fromkeys(("release_memory",), "accel_state.memory"),
    **dict.fromkeys(("wait_for_everyone",), "accel_state.partial_state"),
    **dict.fromkeys(("is_port_in_use",), "accel_state.ports"),
    **dict.fromkeys(("tqdm",), "accel_state.progress"),
    **dict.fromkeys(("set_seed", "synchronize_rng_state", "synchronize_rng_states"), "accel_state.rng"),
    **dict.fromkeys(("get_cpu_distributed_information",), "accel_state.topology"),
    **dict.fromkeys((
        "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION", "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
        "compare_versions", "is_torch_version",
    ), "accel_state.versions"),
    **dict.fromkeys((
        "load_fsdp_model", "load_fsdp_optimizer", "save_fsdp_model", "save_fsdp_optimizer",
    ), "accel_train.checkpoint.fsdp_files"),
    **dict.fromkeys((
        "OPTIMIZER_NAME", "RNG_STATE_NAME", "SAMPLER_NAME", "SCALER_NAME", "SCHEDULER_NAME",
    ), "accel_train.checkpoint.layout"),
    **dict.fromkeys(("merge_fsdp_weights",), "accel_train.checkpoint.merge"),
    **dict.fromkeys(("DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper"), "accel_train.deepspeed"),
    **dict.fromkeys((
        "fsdp2_apply_ac", "fsdp2_canonicalize_names", "fsdp2_load_full_state_dict", "fsdp2_prepare_model",
        "fsdp2_switch_optimizer_parameters",
    ), "accel_train.fsdp"),
    **dict.fromkeys(("PrepareForLaunch",), "accel_train.launchers"),
    **dict.fromkeys(("PROFILE_PATTERN_NAME",), "accel_train.profiling"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
