from accel_train.checkpoint import agreement as agreement
from accel_train.checkpoint import layout as layout
from accel_train.checkpoint import load as load
from accel_train.checkpoint import preemption as preemption
from accel_train.checkpoint import save as save
from accel_train.checkpoint import staging as staging
