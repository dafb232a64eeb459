"""`accel check`: predict a run on many devices without devices."""
