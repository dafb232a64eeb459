"""The kinds of devices: detection, names and properties."""
