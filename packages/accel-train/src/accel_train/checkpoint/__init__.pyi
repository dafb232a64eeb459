from accel_train.checkpoint import load as load
from accel_train.checkpoint import offloaded as offloaded
from accel_train.checkpoint import save as save
