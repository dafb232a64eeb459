"""Several ranks in one process, for tests; the guide "Extending" shows `ThreadRanks`."""

from accel_state.lazy import attach

attach(__name__)
