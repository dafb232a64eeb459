# fmt: off
from accel_bigmodel.offload import (
    OffloadedWeightsLoader as OffloadedWeightsLoader, PrefixedDataset as PrefixedDataset,
    extract_submodules_state_dict as extract_submodules_state_dict,
    load_offloaded_weight as load_offloaded_weight, offload_state_dict as offload_state_dict,
    offload_weight as offload_weight, save_offload_index as save_offload_index,
)
