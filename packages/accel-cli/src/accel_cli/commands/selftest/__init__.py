"""`accel test`: does this machine train correctly with a config, and how fast does data move?"""
