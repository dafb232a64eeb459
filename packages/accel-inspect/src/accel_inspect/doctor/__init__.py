"""`accel doctor`: compare a run on many ranks with the same run on one process."""
