"""`accel completion`: shell completion of commands, flags and values."""
