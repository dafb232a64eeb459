from accel_plugins.sharding import adapters as adapters
from accel_plugins.sharding import folder as folder
from accel_plugins.sharding import shards as shards
from accel_plugins.sharding import state as state
from accel_plugins.sharding import wrap as wrap
