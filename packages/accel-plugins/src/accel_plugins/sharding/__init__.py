"""Sharded models: materialise, optimise and save them."""
