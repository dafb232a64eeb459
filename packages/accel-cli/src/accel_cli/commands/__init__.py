"""The subcommands beside `launch`, `config` and `env`."""
