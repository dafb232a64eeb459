"""What the subcommands take. Nothing here imports anything heavy, so that `--help` answers at once."""
