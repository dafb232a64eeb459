"""`accel test`: check that this host trains correctly with a config, and measure transfers."""
