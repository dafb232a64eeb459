# fmt: off
from accel_plugins.optimizers.muon import Muon as Muon
