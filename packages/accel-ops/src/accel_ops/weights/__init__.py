"""Weight files: names, sizes, shards and aliases; read and write them."""

from accel_state.lazy import attach

attach(__name__)
