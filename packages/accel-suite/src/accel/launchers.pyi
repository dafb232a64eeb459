# fmt: off
from accel_train.launching import (
    ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION as ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION,
    debug_launcher as debug_launcher, notebook_launcher as notebook_launcher, test_launch as test_launch,
)
