"""`python -m accel.commands.config` is `accel config`."""

import sys

from accel.commands.config import main

if __name__ == "__main__":
    sys.exit(main())
