"""The subcommands other than `launch`, `config` and `env`."""
