# fmt: off
from accel_plugins.deepspeed.plugin import deepspeed_required as deepspeed_required
from accel_plugins.fp8.ao import torchao_required as torchao_required
from accel_state.devices import (
    is_bf16_available as is_bf16_available, is_cuda_available as is_cuda_available,
    is_fp16_available as is_fp16_available, is_habana_gaudi1 as is_habana_gaudi1,
    is_hpu_available as is_hpu_available, is_mlu_available as is_mlu_available,
    is_mps_available as is_mps_available, is_musa_available as is_musa_available,
    is_neuron_available as is_neuron_available, is_npu_available as is_npu_available,
    is_rocm_available as is_rocm_available, is_sdaa_available as is_sdaa_available,
    is_torch_xla_available as is_torch_xla_available,
    is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
    is_xccl_available as is_xccl_available, is_xpu_available as is_xpu_available,
)
from accel_state.libraries import (
    is_4bit_bnb_available as is_4bit_bnb_available, is_8bit_bnb_available as is_8bit_bnb_available,
    is_aim_available as is_aim_available, is_amdsmi_available as is_amdsmi_available,
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
    is_torchao_available as is_torchao_available, is_torchdata_available as is_torchdata_available,
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
    is_torchvision_available as is_torchvision_available, is_trackio_available as is_trackio_available,
    is_transformer_engine_available as is_transformer_engine_available,
    is_transformers_available as is_transformers_available, is_triton_available as is_triton_available,
    is_wandb_available as is_wandb_available, is_weights_only_available as is_weights_only_available,
)
