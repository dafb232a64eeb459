from accel_state.testing.async_device import LateDevice as LateDevice
from accel_state.testing.async_device import RaceError as RaceError
from accel_state.testing.async_device import late_device as late_device
from accel_state.testing.async_memory import Race as Race
from accel_state.testing.thread_ranks import ThreadCollectives as ThreadCollectives
from accel_state.testing.thread_ranks import ThreadRanks as ThreadRanks
