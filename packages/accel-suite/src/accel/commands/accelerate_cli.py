"""Names under the path by which users of Accelerate import them."""

import sys

from accel_state.lazy import attach

attach(__name__, "accel._internal")

if __name__ == "__main__":
    from accel_cli.main import main

    sys.exit(main())
