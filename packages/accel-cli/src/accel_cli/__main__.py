"""`python -m accel_cli` is the `accel` command, where its script is not on the path."""

from __future__ import annotations

import sys

from accel_cli.main import main

sys.exit(main())
