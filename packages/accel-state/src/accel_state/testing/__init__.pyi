from accel_state.testing.thread_ranks import ThreadCollectives as ThreadCollectives
from accel_state.testing.thread_ranks import ThreadRanks as ThreadRanks
