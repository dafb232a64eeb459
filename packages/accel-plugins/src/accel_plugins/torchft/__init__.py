"""Fault tolerance by torchft: groups of processes train copies of the model, and any may die."""
