# fmt: off
from accel.test_utils import (
    examples as examples, scripts as scripts, testing as testing, training as training,
)
