from accel_plugins.precision.build import build_precision as build_precision
from accel_plugins.precision.scaling import LossScaling as LossScaling
from accel_plugins.precision.scaling import step_unscaled as step_unscaled
