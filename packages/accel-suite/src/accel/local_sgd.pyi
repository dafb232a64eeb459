# fmt: off
from accel_train.step import LocalSGD as LocalSGD
