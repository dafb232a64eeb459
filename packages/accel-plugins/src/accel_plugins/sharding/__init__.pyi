from accel_plugins.sharding import folder as folder
from accel_plugins.sharding import wrap as wrap
