"""A script that tests start by its path."""

from accel_cli.commands.selftest_checks import check_script as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
