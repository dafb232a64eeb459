"""The config file of the command."""
