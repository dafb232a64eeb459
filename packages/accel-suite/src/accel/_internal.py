"""Names that Accelerate does not document and that libraries import, by module, and where each is."""

NAMES = {
    "accel.accelerator": {"torch": "torch:"},
    "accel.big_modeling": {
        "_attach_context_parallel_hooks": "accel_plugins.parallelism.context:attach_mask_hooks"
    },
    "accel.hooks": {"_accelerate_added_attributes": "accel_bigmodel.dispatch"},
    "accel.test_utils": {
        "execute_subprocess_async": "accel_train.testing",
        "get_torch_dist_unique_port": "accel_train.testing",
    },
    "accel.test_utils.testing": {
        "execute_subprocess_async": "accel_train.testing",
        "get_backend": "accel_train.testing",
        "get_torch_dist_unique_port": "accel_train.testing",
        "run_command": "accel_train.testing",
    },
    "accel.utils.megatron_lm": {"MegatronEngine": "accel_plugins.megatron.engine"},
    "accel.utils.modeling": {
        "_get_proper_dtype": "accel_bigmodel.placement:torch_dtype",
        "logger": "accel_bigmodel.device_map:_log",
    },
}
