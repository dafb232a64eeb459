"""The strategies that come with accel, each a factory `build(settings, runtime, precision, handlers)`."""
