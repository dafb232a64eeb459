"""The sections of `Settings`: every field with its row of the settings table."""
