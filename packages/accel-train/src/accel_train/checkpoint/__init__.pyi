from accel_train.checkpoint import load as load
from accel_train.checkpoint import save as save
from accel_train.checkpoint import single_files as single_files
