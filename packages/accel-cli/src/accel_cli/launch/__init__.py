"""`accel launch`: read the command line, decide what to run, and become it."""
