from accel_plugins.fsdp import presharded as presharded
