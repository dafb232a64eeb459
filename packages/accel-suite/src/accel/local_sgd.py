"""Training in which processes agree only now and then."""

from accel_state.lazy import attach

attach(__name__, "accel._internal")
