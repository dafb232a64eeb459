# fmt: off
from accel_plugins.optimizers.host_adamw import HostAdamW as HostAdamW
from accel_plugins.optimizers.muon import Muon as Muon
