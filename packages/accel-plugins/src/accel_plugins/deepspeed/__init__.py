"""Configuration of DeepSpeed, and the code around its engine. The library is imported only when used."""

from accel_state.lazy import attach

attach(__name__)
