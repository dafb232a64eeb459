# fmt: off
from accel_bigmodel.device_map import (
    check_device_map as check_device_map, get_balanced_memory as get_balanced_memory,
    infer_auto_device_map as infer_auto_device_map,
)
from accel_bigmodel.dispatch import (
    cpu_offload as cpu_offload, cpu_offload_with_hook as cpu_offload_with_hook,
    disk_offload as disk_offload, dispatch_model as dispatch_model,
)
from accel_bigmodel.empty import init_empty_weights as init_empty_weights, init_on_device as init_on_device
from accel_bigmodel.hooks import (
    SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
    attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
)
from accel_bigmodel.load import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
