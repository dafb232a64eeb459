# fmt: off
from accel.utils import (
    ao as ao, bnb as bnb, constants as constants, dataclasses as dataclasses, deepspeed as deepspeed,
    environment as environment, fsdp_utils as fsdp_utils, imports as imports, launch as launch,
    megatron_lm as megatron_lm, memory as memory, modeling as modeling, offload as offload,
    operations as operations, other as other, random as random, torch_xla as torch_xla,
    transformer_engine as transformer_engine, versions as versions,
)
from accel_bigmodel.device_map import (
    check_device_map as check_device_map,
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    get_balanced_memory as get_balanced_memory, get_max_memory as get_max_memory,
    infer_auto_device_map as infer_auto_device_map,
)
from accel_bigmodel.hooks import (
    align_module_device as align_module_device, has_offloaded_params as has_offloaded_params,
)
from accel_bigmodel.load import load_checkpoint_in_model as load_checkpoint_in_model
from accel_bigmodel.offload import (
    OffloadedWeightsLoader as OffloadedWeightsLoader, PrefixedDataset as PrefixedDataset,
    extract_submodules_state_dict as extract_submodules_state_dict,
    load_offloaded_weight as load_offloaded_weight, load_offloaded_weights as load_offloaded_weights,
    offload_state_dict as offload_state_dict, offload_weight as offload_weight,
    save_offload_index as save_offload_index,
)
from accel_bigmodel.placement import set_module_tensor_to_device as set_module_tensor_to_device
from accel_bigmodel.sizes import (
    calculate_maximum_sizes as calculate_maximum_sizes, compute_module_sizes as compute_module_sizes,
    get_max_layer_size as get_max_layer_size,
)
from accel_cli.commands.config import write_basic_config as write_basic_config
from accel_cli.commands.tpu import install_xla as install_xla
from accel_cli.programs import (
    TORCH_LAUNCH_PARAMS as TORCH_LAUNCH_PARAMS, prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env as prepare_multi_gpu_env,
    prepare_sagemager_args_inputs as prepare_sagemager_args_inputs,
    prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env, prepare_tpu as prepare_tpu,
)
from accel_ops.collectives import (
    broadcast as broadcast, broadcast_object_list as broadcast_object_list, gather as gather,
    gather_object as gather_object, reduce as reduce,
)
from accel_ops.modules import (
    compile_regions as compile_regions, compile_regions_deepspeed as compile_regions_deepspeed,
    compile_regions_fsdp2 as compile_regions_fsdp2,
    extract_model_from_parallel as extract_model_from_parallel,
    get_module_children_bottom_up as get_module_children_bottom_up, get_pretty_name as get_pretty_name,
    has_compiled_regions as has_compiled_regions, is_compiled_module as is_compiled_module,
    is_peft_model as is_peft_model, merge_dicts as merge_dicts, model_has_dtensor as model_has_dtensor,
    recursive_getattr as recursive_getattr,
)
from accel_ops.pad import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    pad_across_processes as pad_across_processes, pad_input_tensors as pad_input_tensors,
)
from accel_ops.tree import (
    TensorInformation as TensorInformation, concatenate as concatenate,
    convert_outputs_to_fp32 as convert_outputs_to_fp32, convert_to_fp32 as convert_to_fp32,
    copy_tensor_to_devices as copy_tensor_to_devices, find_batch_size as find_batch_size,
    find_device as find_device, get_data_structure as get_data_structure, honor_type as honor_type,
    ignorant_find_batch_size as ignorant_find_batch_size, initialize_tensors as initialize_tensors,
    is_namedtuple as is_namedtuple, is_tensor_information as is_tensor_information,
    is_torch_tensor as is_torch_tensor, listify as listify, recursively_apply as recursively_apply,
    send_to_device as send_to_device, slice_tensors as slice_tensors,
)
from accel_ops.weights.layout import (
    MODEL_NAME as MODEL_NAME, SAFE_MODEL_NAME as SAFE_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME, WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME, WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME,
    convert_bytes as convert_bytes, convert_file_size_to_int as convert_file_size_to_int,
    dtype_byte_size as dtype_byte_size,
)
from accel_ops.weights.read import load as load, load_state_dict as load_state_dict
from accel_ops.weights.safetensors_io import (
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
)
from accel_ops.weights.tensors import (
    check_tied_parameters_in_config as check_tied_parameters_in_config,
    find_tied_parameters as find_tied_parameters, id_tensor_storage as id_tensor_storage,
    named_module_tensors as named_module_tensors, retie_parameters as retie_parameters,
)
from accel_ops.weights.write import save as save
from accel_plugins.ddp import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accel_plugins.deepspeed.config import (
    DummyOptim as DummyOptim, DummyScheduler as DummyScheduler, HfDeepSpeedConfig as HfDeepSpeedConfig,
)
from accel_plugins.deepspeed.engine import (
    DeepSpeedEngineWrapper as DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
)
from accel_plugins.deepspeed.library import (
    GatheredParameters as GatheredParameters,
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
)
from accel_plugins.deepspeed.plugin import (
    DeepSpeedPlugin as DeepSpeedPlugin, deepspeed_required as deepspeed_required,
    get_active_deepspeed_plugin as get_active_deepspeed_plugin,
)
from accel_plugins.fp8.ao import (
    convert_model_to_fp8_ao as convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers as filter_first_and_last_linear_layers,
    has_ao_layers as has_ao_layers, torchao_required as torchao_required,
)
from accel_plugins.fp8.recipe import (
    AORecipeKwargs as AORecipeKwargs, FP8RecipeKwargs as FP8RecipeKwargs,
    MSAMPRecipeKwargs as MSAMPRecipeKwargs, TERecipeKwargs as TERecipeKwargs,
)
from accel_plugins.fp8.te import (
    apply_fp8_autowrap as apply_fp8_autowrap, contextual_fp8_autocast as contextual_fp8_autocast,
    convert_model as convert_model, has_transformer_engine_layers as has_transformer_engine_layers,
)
from accel_plugins.fsdp.blocks import ensure_weights_retied as ensure_weights_retied
from accel_plugins.fsdp.plugin import (
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
from accel_plugins.kwargs import (
    AutocastKwargs as AutocastKwargs, DataLoaderConfiguration as DataLoaderConfiguration,
    GradScalerKwargs as GradScalerKwargs, GradientAccumulationPlugin as GradientAccumulationPlugin,
    InitProcessGroupKwargs as InitProcessGroupKwargs, KwargsHandler as KwargsHandler,
    ProfileKwargs as ProfileKwargs, ProjectConfiguration as ProjectConfiguration,
    TorchDynamoPlugin as TorchDynamoPlugin,
)
from accel_plugins.megatron.plugin import (
    add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
)
from accel_plugins.megatron.data import (
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
)
from accel_plugins.megatron.plugin import MegatronLMPlugin as MegatronLMPlugin
from accel_plugins.megatron.train_steps import (
    AbstractTrainStep as AbstractTrainStep, BertTrainStep as BertTrainStep, GPTTrainStep as GPTTrainStep,
    T5TrainStep as T5TrainStep,
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)
from accel_plugins.parallelism.config import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    ParallelismConfig as ParallelismConfig, TorchContextParallelConfig as TorchContextParallelConfig,
    TorchPipelineParallelConfig as TorchPipelineParallelConfig,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from accel_plugins.parallelism.tensor import get_model_tp_size as get_model_tp_size
from accel_plugins.precision import (
    get_fsdp2_grad_scaler as get_fsdp2_grad_scaler, get_grad_scaler as get_grad_scaler,
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from accel_quant.config import BnbQuantizationConfig as BnbQuantizationConfig
from accel_quant.layers import has_4bit_bnb_layers as has_4bit_bnb_layers
from accel_quant.load import load_and_quantize_model as load_and_quantize_model
from accel_state.device_kinds import (
    check_cuda_p2p_ib_support as check_cuda_p2p_ib_support, check_os_kernel as check_os_kernel,
    get_gpu_info as get_gpu_info,
)
from accel_state.devices import (
    check_cuda_fp8_capability as check_cuda_fp8_capability,
    get_current_device_type as get_current_device_type, is_bf16_available as is_bf16_available,
    is_cuda_available as is_cuda_available, is_fp16_available as is_fp16_available,
    is_habana_gaudi1 as is_habana_gaudi1, is_hpu_available as is_hpu_available,
    is_mlu_available as is_mlu_available, is_mps_available as is_mps_available,
    is_musa_available as is_musa_available, is_neuron_available as is_neuron_available,
    is_npu_available as is_npu_available, is_rocm_available as is_rocm_available,
    is_sdaa_available as is_sdaa_available, is_torch_xla_available as is_torch_xla_available,
    is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
    is_xccl_available as is_xccl_available, is_xpu_available as is_xpu_available,
    set_numa_affinity as set_numa_affinity,
)
from accel_state.environ import (
    are_libraries_initialized as are_libraries_initialized, clear_environment as clear_environment,
    convert_dict_to_env_variables as convert_dict_to_env_variables, get_int_from_env as get_int_from_env,
    parse_choice_from_env as parse_choice_from_env, parse_flag_from_env as parse_flag_from_env,
    patch_environment as patch_environment, purge_accelerate_environment as purge_accelerate_environment,
    str_to_bool as str_to_bool,
)
from accel_state.labels import (
    ComputeEnvironment as ComputeEnvironment, CustomDtype as CustomDtype,
    DDPCommunicationHookType as DDPCommunicationHookType, DistributedType as DistributedType,
    DynamoBackend as DynamoBackend, FP8BackendType as FP8BackendType, LoggerType as LoggerType,
    PrecisionType as PrecisionType, RNGType as RNGType,
    SageMakerDistributedType as SageMakerDistributedType,
    TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES,
)
from accel_state.libraries import (
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
    XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
    compare_versions as compare_versions, is_4bit_bnb_available as is_4bit_bnb_available,
    is_8bit_bnb_available as is_8bit_bnb_available, is_aim_available as is_aim_available,
    is_amdsmi_available as is_amdsmi_available,
    is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
    is_bnb_available as is_bnb_available, is_boto3_available as is_boto3_available,
    is_clearml_available as is_clearml_available, is_comet_ml_available as is_comet_ml_available,
    is_datasets_available as is_datasets_available, is_deepspeed_available as is_deepspeed_available,
    is_dvclive_available as is_dvclive_available, is_fp8_available as is_fp8_available,
    is_import_timer_available as is_import_timer_available, is_lomo_available as is_lomo_available,
    is_matplotlib_available as is_matplotlib_available,
    is_megatron_lm_available as is_megatron_lm_available, is_mlflow_available as is_mlflow_available,
    is_msamp_available as is_msamp_available, is_pandas_available as is_pandas_available,
    is_peft_available as is_peft_available, is_pippy_available as is_pippy_available,
    is_pynvml_available as is_pynvml_available, is_pytest_available as is_pytest_available,
    is_rich_available as is_rich_available, is_sagemaker_available as is_sagemaker_available,
    is_schedulefree_available as is_schedulefree_available, is_swanlab_available as is_swanlab_available,
    is_tensorboard_available as is_tensorboard_available, is_timm_available as is_timm_available,
    is_torch_version as is_torch_version, is_torchao_available as is_torchao_available,
    is_torchdata_available as is_torchdata_available,
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
    is_torchvision_available as is_torchvision_available, is_trackio_available as is_trackio_available,
    is_transformer_engine_available as is_transformer_engine_available,
    is_transformers_available as is_transformers_available, is_triton_available as is_triton_available,
    is_wandb_available as is_wandb_available, is_weights_only_available as is_weights_only_available,
)
from accel_state.logging import tqdm as tqdm
from accel_state.memory import (
    find_executable_batch_size as find_executable_batch_size, release_memory as release_memory,
)
from accel_state.partial_state import wait_for_everyone as wait_for_everyone
from accel_state.rng import (
    set_seed as set_seed, synchronize_rng_state as synchronize_rng_state,
    synchronize_rng_states as synchronize_rng_states,
)
from accel_state.topology import (
    get_cpu_distributed_information as get_cpu_distributed_information, is_port_in_use as is_port_in_use,
)
from accel_train.checkpoint.layout import (
    OPTIMIZER_NAME as OPTIMIZER_NAME, RNG_STATE_NAME as RNG_STATE_NAME, SAMPLER_NAME as SAMPLER_NAME,
    SCALER_NAME as SCALER_NAME, SCHEDULER_NAME as SCHEDULER_NAME,
)
from accel_train.checkpoint.single_files import (
    load_fsdp_model as load_fsdp_model, load_fsdp_optimizer as load_fsdp_optimizer,
    merge_fsdp_weights as merge_fsdp_weights, save_fsdp_model as save_fsdp_model,
    save_fsdp_optimizer as save_fsdp_optimizer,
)
from accel_train.fsdp import (
    fsdp2_apply_ac as fsdp2_apply_ac, fsdp2_canonicalize_names as fsdp2_canonicalize_names,
    fsdp2_load_full_state_dict as fsdp2_load_full_state_dict, fsdp2_prepare_model as fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
)
from accel_train.launching import PrepareForLaunch as PrepareForLaunch
from accel_train.profiling import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME
