"""Subcommands other than `launch`, `config` and `env`."""
