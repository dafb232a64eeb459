from accel_ops.weights import write as write
