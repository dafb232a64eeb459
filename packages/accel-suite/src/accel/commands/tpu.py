"""Names under the path by which users of Accelerate import them."""

import sys
from functools import partial

from accel_cli.main import run
from accel_state.lazy import attach

attach(__name__, "accel._internal")
main = partial(run, "tpu-config")

if __name__ == "__main__":
    sys.exit(main())
