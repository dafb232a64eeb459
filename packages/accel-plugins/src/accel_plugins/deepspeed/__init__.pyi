from accel_plugins.deepspeed import engine as engine
from accel_plugins.deepspeed import library as library
