"""`accel check`: predict what a run on many devices does, without devices."""
