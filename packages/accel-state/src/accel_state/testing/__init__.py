"""Fakes for tests: an asynchronous device on the CPU, and several ranks in one process.

The guides "Testing code that copies asynchronously" and "Extending" show `late_device` and `ThreadRanks`.
"""

from accel_state.lazy import attach

attach(__name__)
