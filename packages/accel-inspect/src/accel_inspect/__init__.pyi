from accel_inspect.estimate.memory import DeviceShare as DeviceShare
from accel_inspect.estimate.memory import ModelSizes as ModelSizes
from accel_inspect.estimate.memory import TrainingSetup as TrainingSetup
from accel_inspect.estimate.memory import estimate_axes as estimate_axes
