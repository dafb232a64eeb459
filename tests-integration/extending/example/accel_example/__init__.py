"""A small distribution that extends accel by entry points."""
