"""The families of devices: how they are found, named and asked about themselves."""
