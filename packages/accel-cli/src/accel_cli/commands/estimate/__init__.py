"""How much memory a model takes: its weights, and its training by strategy."""
