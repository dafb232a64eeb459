from accel_plugins.sharding import optimizers as optimizers
