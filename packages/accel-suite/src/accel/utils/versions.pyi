# fmt: off
from accel_state.libraries import compare_versions as compare_versions, is_torch_version as is_torch_version
