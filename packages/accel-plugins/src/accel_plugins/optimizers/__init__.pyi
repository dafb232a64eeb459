from accel_plugins.optimizers import matrices as matrices
