"""Export table."""
