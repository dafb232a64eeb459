from accel_plugins.precision.build import build_precision as build_precision
from accel_plugins.precision.scaling import stepping_with as stepping_with
