# fmt: off
from accel_cli.programs import (
    prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env, prepare_multi_gpu_env as prepare_multi_gpu_env,
    prepare_sagemager_args_inputs as prepare_sagemager_args_inputs,
    prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env, prepare_tpu as prepare_tpu,
)
from accel_train.launching import PrepareForLaunch as PrepareForLaunch
