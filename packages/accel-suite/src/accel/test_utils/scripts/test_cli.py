"""A script that tests start by its path."""

from accel_train.testing.processes import print_devices as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
