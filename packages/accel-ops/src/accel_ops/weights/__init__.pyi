from accel_ops.weights import hub_names as hub_names
from accel_ops.weights import write as write
