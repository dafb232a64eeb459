"""Parsers of the subcommands; they import no torch, so that `--help` is fast."""
