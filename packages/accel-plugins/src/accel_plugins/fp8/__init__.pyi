from accel_plugins.fp8 import build as build
