"""Weight files: their names, sizes, shards and aliases; reading and writing them."""

from accel_state.lazy import attach

# Imported by the first use: safetensors.torch takes 0.01 s.
attach(__name__)
