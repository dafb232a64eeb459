"""`accel completion`: what shells need to complete commands, flags and values."""
