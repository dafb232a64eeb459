"""The rows of the table of settings, a module for each topic."""
