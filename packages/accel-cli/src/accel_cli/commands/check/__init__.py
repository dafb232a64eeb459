"""`accel check`: what a run on many devices would do, found out without any."""
