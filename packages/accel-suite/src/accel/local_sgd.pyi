# fmt: off
from accel_train.local_sgd import LocalSGD as LocalSGD
