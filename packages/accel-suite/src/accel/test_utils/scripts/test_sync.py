"""A script that tests start by its path. Written by tools/gen_exports.py."""

from accel_cli.commands.selftest_checks import check_gradient_sync as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
